"""Too few GPUs for the ranks of a run: what the user is told before it, after it, or instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tarantella.cli.host import Host
from tarantella.runtime.words import count

_TO_REFUSE = "Use --gpu to make this an error."


@dataclass(frozen=True)
class GpuShortage:
    """Hosts with fewer GPUs than ranks, which keep a run off the GPUs of all its hosts.

    Attributes:
        hosts: all hosts of the run
        lacking: the names of those with too few GPUs, by the number of their GPUs and of their
            ranks; 0 ranks: one for each GPU was asked for
    """

    hosts: tuple[Host, ...]
    lacking: Mapping[tuple[int, int], Sequence[str]]

    def warnings(self) -> tuple[str, ...]:
        """What to say before a run on the CPU."""
        warnings = [_warning(names, *numbers) for numbers, names in self.lacking.items()]
        if self._count < len(self.hosts):
            warnings.append(
                "All other hosts use the CPU as well: a run is as fast as its slowest rank."
            )
        return tuple(warnings)

    def reminder(self) -> str:
        """What to say after it: how many GPUs stood idle, and why."""
        idle = [host for host in self.hosts if host.gpus]
        cost = ""
        if idle:
            gpus = count(sum(len(host.gpus) for host in idle), "GPU")
            cost = f", so {gpus} on {_hosts([host.name for host in idle])} stood idle"
        return f"The run used the CPU: {self._reasons()}{cost}. {_TO_REFUSE}"

    def refusal(self, asked: str) -> str:
        """What to say instead of a run.

        Args:
            asked: how the user has asked for GPUs
        """
        ways = ["use --no-gpu to run on the CPU"]
        if self._count < len(self.hosts):
            ways.insert(0, f"leave out {'that host' if self._count == 1 else 'those hosts'}")
        if any(gpus for gpus, _ in self.lacking):
            ways.insert(0, "start fewer ranks")
        return f"{asked} needs a GPU for each rank, but {self._reasons()}: {', or '.join(ways)}."

    @property
    def _count(self) -> int:
        """How many hosts have too few."""
        return sum(map(len, self.lacking.values()))

    def _reasons(self) -> str:
        return ", and ".join(_reason(names, *numbers) for numbers, names in self.lacking.items())


def find_shortage(hosts: Sequence[Host], counts: Sequence[int]) -> GpuShortage | None:
    """The hosts that have too few GPUs for their ranks; None if all have enough.

    Args:
        hosts: all hosts of the run
        counts: the number of ranks on each; 0: one for each GPU
    """
    lacking: dict[tuple[int, int], list[str]] = {}
    for host, ranks in zip(hosts, counts, strict=True):
        if not host.gpus or len(host.gpus) < ranks:
            lacking.setdefault((len(host.gpus), ranks), []).append(host.name)
    return GpuShortage(tuple(hosts), lacking) if lacking else None


def reminders_of_ranks(found: Mapping[str, Mapping[int, int]]) -> tuple[str, ...]:
    """What to say after a run in which TensorFlow has not found the GPUs that were there.

    Args:
        found: for each host, the ranks that used the CPU, and how many GPUs TensorFlow found
    """
    reminders = []
    for host, ranks in sorted(found.items()):
        number = min(ranks.values())
        seen = f"only {_gpus(number)}" if number else "no GPU"
        reminders.append(
            f"{count(len(ranks), 'rank')} on host {host} used the CPU, and "
            f"{count(len(ranks), 'GPU')} stood idle: TensorFlow found {seen} there. {_TO_REFUSE}"
        )
    return tuple(reminders)


def _warning(names: Sequence[str], gpus: int, ranks: int) -> str:
    advice = "Use --no-gpu to run on the CPU without this warning."
    if ranks == 0:
        there = "there" if len(names) == 1 else "on each"
        return f"No GPU was found on {_hosts(names)}: one rank runs {there}, on the CPU. {advice}"
    reason = _reason(names, gpus, ranks)
    runs = "it runs" if ranks == 1 else "they run"
    return f"{reason[0].upper()}{reason[1:]}: {runs} on the CPU. {advice}"


def _reason(names: Sequence[str], gpus: int, ranks: int) -> str:
    if ranks == 0:
        return f"no GPU was found on {_hosts(names)}"
    has = f"has {_gpus(gpus)}" if len(names) == 1 else f"have {_gpus(gpus)} each"
    return f"{_hosts(names)} {has} for {count(ranks, 'rank')}"


def _hosts(names: Sequence[str]) -> str:
    return ("host " if len(names) == 1 else "hosts ") + ", ".join(names)


def _gpus(number: int) -> str:
    return count(number, "GPU") if number else "no GPU"
