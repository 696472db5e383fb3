"""A host as the plan sees it: its cores by socket, and its GPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tarantella.cli.gpus import Gpu, find_gpus
from tarantella.runtime.cores import core_limit, parse_list, usable_cores


@dataclass(frozen=True)
class Host:
    """A machine that ranks can run on.

    Attributes:
        name: its host name
        sockets: the cores we may use in each NUMA domain, none in some; the threads of one
            physical core are neighbours
        gpus: the GPUs we may use, in the order in which CUDA numbers them
        core_limit: how many cores we may use at a time; None: all of them
    """

    name: str
    sockets: tuple[tuple[int, ...], ...]
    gpus: tuple[Gpu, ...] = ()
    core_limit: int | None = None

    @property
    def domains(self) -> tuple[int, ...]:
        """The numbers of the NUMA domains with cores for us."""
        return tuple(number for number, cores in enumerate(self.sockets) if cores)

    @property
    def cores(self) -> tuple[int, ...]:
        return tuple(core for cores in self.sockets for core in cores)

    @property
    def core_count(self) -> int:
        """How many cores we may use at a time."""
        return min(len(self.cores), self.core_limit or len(self.cores))


def this_host(environ: Mapping[str, str] = os.environ) -> Host:
    """The machine we are on, as a process with this environment sees it."""
    sockets = find_sockets(usable_cores())
    return Host(socket.gethostname(), sockets, find_gpus(environ), core_limit())


def assumed_hosts(names: Sequence[str], like: Host, gpus: int | None) -> list[Host]:
    """Hosts that were not checked, assumed to be like another one.

    Args:
        names: their names
        like: what they are like
        gpus: how many GPUs they have; None: as many
    """
    found = like.gpus if gpus is None else tuple([Gpu("not checked")] * gpus)
    return [replace(like, name=name, gpus=found) for name in names]


def host_from(description: dict[str, Any], name: str) -> Host:
    """A host that another process has described by `asdict`."""
    return Host(
        name,
        tuple(tuple(cores) for cores in description["sockets"]),
        tuple(Gpu(**gpu) for gpu in description["gpus"]),
        description["core_limit"],
    )


def find_sockets(
    usable: tuple[int, ...], system: Path = Path("/sys/devices/system")
) -> tuple[tuple[int, ...], ...]:
    """The usable cores of each NUMA domain; one domain if the system does not say."""
    order = {core: (_siblings(core, system)[0], core) for core in usable}
    domains: list[tuple[int, ...]] = []
    for node in sorted(system.glob("node/node[0-9]*"), key=lambda path: int(path.name[4:])):
        number = int(node.name[4:])
        domains += [()] * (number - len(domains))  # numbers may be missing
        cores = set(parse_list(_read(node / "cpulist"))) & set(usable)
        domains.append(tuple(sorted(cores, key=order.__getitem__)))
    if sum(map(len, domains)) != len(usable):
        return (tuple(sorted(usable, key=order.__getitem__)),)
    return tuple(domains)


def format_list(numbers: tuple[int, ...]) -> str:
    """A list like `0-3,8,10-11`, as Linux writes it."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _siblings(core: int, system: Path) -> list[int]:
    return parse_list(_read(system / f"cpu/cpu{core}/topology/thread_siblings_list")) or [core]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
