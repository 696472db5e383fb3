"""What became of the ranks: gathered from what they announce, told in one message."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tarantella.launch.mpich_abort import exit_status
from tarantella.runtime import times
from tarantella.runtime.announce import (
    ENDED,
    FAILED,
    FINISHED,
    ON_CPU,
    PRINTED_LAST,
    SHORT_OF_MEMORY,
    STARTED,
    TRAINS_ALONE,
    Announcement,
    trained_alone,
)

_LIKELY = {
    "SIGKILL": "perhaps because memory ran out",
    "SIGSEGV": "a crash in compiled code",
    "SIGBUS": "perhaps because /dev/shm or a disk is full",
    "SIGABRT": "a library gave up; it may have printed why",
    "SIGILL": "perhaps compiled for another processor",
    "SIGFPE": "a crash in compiled code",
    "SIGTERM": "asked to end, perhaps by a scheduler at a time limit",
    "SIGXCPU": "the limit of CPU time was reached",
}


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong, which caused everything that followed.

    Attributes:
        rank: the rank that failed; None if it is not known
        host: its host; empty if it was not a rank that failed
        cause: what happened, in one line
        status: the exit status for the command
        when: the time of day
    """

    rank: int | None
    host: str
    cause: str
    status: int
    when: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"), compare=False)


class Outcome:
    """Listens to the ranks of a run.

    Args:
        ranks: how many there are
        scripts: whether they run Python scripts, and announce when these reach their end
    """

    def __init__(self, ranks: int, scripts: bool = True) -> None:
        self._ranks = ranks
        self._scripts = scripts
        self._hosts: dict[int, str] = {}
        self._heard: dict[int, float] = {}
        self._tails: dict[int, list[Announcement]] = {}
        self._finished: set[int] = set()
        self._ended: set[int] = set()
        self._left: dict[int, float] = {}
        self._consequences: dict[int, Failure] = {}
        self._unexplained: dict[int, tuple[float, Failure]] = {}
        self._shortages: dict[int, str] = {}
        self._killed: Failure | None = None
        self._hint = ""
        self.failure: Failure | None = None
        self.launchers: dict[str, list[str]] = {}  # the launcher's processes on each host
        # On each host, the ranks that use the CPU, and how many GPUs TensorFlow finds there.
        self.on_cpu: dict[str, dict[int, int]] = {}
        self.warnings: list[str] = []  # what ranks do that is likely to be a mistake

    @property
    def all_started(self) -> bool:
        return len(self._hosts) == self._ranks

    @property
    def all_ended(self) -> bool:
        return len(self._ended) == self._ranks

    def hear(self, news: Announcement) -> None:
        """A rank announces something."""
        self._heard[news.rank] = time.monotonic()
        if news.kind == STARTED:
            self._hosts[news.rank] = news.host
            if news.launcher not in (known := self.launchers.setdefault(news.host, [])):
                known.append(news.launcher)
        elif news.kind == PRINTED_LAST:
            self._tails.setdefault(news.rank, []).append(news)
        elif news.kind == ON_CPU:
            self.on_cpu.setdefault(news.host, {})[news.rank] = news.status
        elif news.kind == TRAINS_ALONE:
            self.warnings.append(trained_alone(news.cause, news.place, self._ranks))
        elif news.kind == SHORT_OF_MEMORY:
            self._shortages[news.rank] = news.cause
        elif news.kind == FINISHED:
            self._finished.add(news.rank)
        elif news.kind == FAILED:
            cause = f"{news.cause} (exit status {news.status})"
            self._fail_after(Failure(news.rank, news.host, cause, news.status))
        elif news.kind == ENDED:
            self._ended.add(news.rank)
            if self._scripts and news.status == 0 and news.rank not in self._finished:
                self._left[news.rank] = time.monotonic()
            if news.status != 0:
                cause, status = describe_end(news.status, self._shortages.get(news.rank, ""))
                failure = Failure(news.rank, news.host, cause, status)
                if news.cause:
                    self._consequences[news.rank] = failure
                    self._left.setdefault(news.rank, time.monotonic())
                elif news.status > 0:
                    # MPICH ends the other ranks with the status of one that called MPI_Abort,
                    # and they may be heard before it.
                    self._unexplained[news.rank] = time.monotonic(), failure
                else:
                    self._fail_after(failure)

    def forgive(self, seconds: float) -> None:
        """The command has not listened for this long: nothing was missing in that time."""
        for since_when in (self._heard, self._left):
            since_when.update((rank, since + seconds) for rank, since in since_when.items())
        self._unexplained = {
            rank: (since + seconds, failure) for rank, (since, failure) in self._unexplained.items()
        }

    def hear_silence(self, seconds: float) -> None:
        """Find ranks that have not been heard for this long: their host must be gone."""
        now = time.monotonic()
        for rank, host in self._hosts.items():
            if rank not in self._ended and now - self._heard[rank] > seconds:
                cause = f"nothing was heard from the host for {now - self._heard[rank]:.0f} seconds"
                self._fail(Failure(rank, host, cause, 1))

    def hear_early_end(self, seconds: float) -> None:
        """Find ranks that left this long before others that need them: by os._exit(0), or because
        someone other than this command asked them to end; and ranks that ended with an error
        status and have not announced a cause."""
        now = time.monotonic()
        for since, failure in self._unexplained.values():
            if now - since > times.TIME_FOR_CAUSE:
                self._fail(failure)
        for rank, since in self._left.items():
            if not self.all_ended and now - since > seconds:
                self._fail(self._early_end(rank))

    def _early_end(self, rank: int) -> Failure:
        if rank in self._consequences:
            return self._consequences[rank]
        cause = "it exited before its script reached the end"
        return Failure(rank, self._hosts.get(rank, "?"), cause, 1)

    def hear_stall(self, failure: Failure) -> None:
        """Ranks have waited for others for too long."""
        self._fail(failure)

    def hear_no_start(self, host_of: Mapping[int, str], seconds: float) -> None:
        """Find ranks that have not started after this long."""
        missing = [rank for rank in host_of if rank not in self._hosts]
        if missing and self.failure is None:
            cause = (
                f"it did not start within {seconds:.0f} seconds; check that this host can connect "
                "to the one that the command runs on, and that no firewall is between them"
            )
            self._fail(Failure(missing[0], host_of[missing[0]], cause, 1))

    def output_of_failed_rank(self) -> list[Announcement]:
        """What the rank that failed has printed last, if that was not shown yet."""
        rank = None if self.failure is None else self.failure.rank
        return [] if rank is None else self._tails.pop(rank, [])

    def hear_abort(self, rank: int, code: int) -> None:
        """A rank has called MPI_Abort with this error code."""
        cause = f"it called MPI_Abort (exit status {code})"
        self._fail(Failure(rank, self._hosts.get(rank, "?"), cause, exit_status(code)))

    def hear_killed(self, rank: int | None, host: str, number: int) -> None:
        """The launcher has seen that a signal ended a supervisor; None: it does not know whose."""
        cause, status = describe_end(-number)
        self._killed = Failure(rank, host, cause, status)

    def hear_hint(self, hint: str) -> None:
        """Why the launcher itself may fail."""
        self._hint = hint

    def end(self, status: int) -> Failure | None:
        """What failed, given the exit status of mpiexec; None if every rank succeeded."""
        for _, failure in self._unexplained.values():
            self._fail(failure)
        if self.failure is not None:
            return self.failure
        missing = sorted(set(range(self._ranks)) - self._ended)
        if not missing and not self._consequences:
            return None  # whatever the status of the launcher
        left = sorted(self._left.keys() - self._consequences.keys())
        if left:
            # One left by os._exit(0), and the launcher ended the others, which still needed it.
            self._fail(self._early_end(left[0]))
        elif self._killed is not None:
            self._fail(self._killed)
        elif self._consequences:
            self._fail(next(iter(self._consequences.values())))
        elif status != 0:
            end, status = describe_end(status)
            cause = f"{self._hint or 'mpiexec ended all ranks, or did not start them'}; {end}"
            self._fail(Failure(None, "", cause, status))
        elif missing:
            self._fail(Failure(missing[0], self._hosts.get(missing[0], "?"), "it disappeared", 1))
        return self.failure

    def message(self) -> str:
        """The failure in one sentence."""
        assert self.failure is not None
        when = f"({self.failure.when})"
        if not self.failure.host:
            return f"the run failed: {self.failure.cause} {when}."
        others = "; the other ranks were ended" if self._ranks > 1 else ""
        who = "a rank" if self.failure.rank is None else f"rank {self.failure.rank}"
        return f"{who} on host {self.failure.host} failed: {self.failure.cause}{others} {when}."

    def _fail_after(self, failure: Failure) -> None:
        """A rank has failed, perhaps after another one that did not announce why."""
        for rank, (_, before) in self._unexplained.items():
            if rank != failure.rank and before.status != failure.status:
                self._fail(before)
        self._fail(failure)

    def _fail(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure


def describe_end(status: int, shortage: str = "") -> tuple[str, int]:
    """How a process ended, in words, and the exit status for that.

    Args:
        status: as Python's subprocess gives it, negative for a signal
        shortage: why too little memory is the likely cause, if it is
    """
    if status >= 0:
        return f"it ended with exit status {status}", status
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    likely = shortage or _LIKELY.get(name, "")
    explained = f"{name}: {likely}" if likely else name
    return f"it was killed by signal {-status} ({explained})", 128 - status
