"""What became of the ranks, gathered from what they announce, and told in one message."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from tarantella.runtime.announce import ENDED, FAILED, FINISHED, STARTED, Announcement


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong, which is the cause of whatever followed.

    Attributes:
        rank: the rank that failed, None if it is not known
        host: its host, empty if it was no rank that failed
        cause: what happened, in one line
        status: the exit status for the command
    """

    rank: int | None
    host: str
    cause: str
    status: int


class Outcome:
    """Listens to the ranks of a run.

    Args:
        ranks: how many there are
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._hosts: dict[int, str] = {}
        self._finished: set[int] = set()
        self._ended: set[int] = set()
        self._killed: Failure | None = None
        self.failure: Failure | None = None

    @property
    def all_ended(self) -> bool:
        return len(self._ended) == self._ranks

    def hear(self, news: Announcement) -> None:
        """Take note of what a rank announces."""
        if news.kind == STARTED:
            self._hosts[news.rank] = news.host
        elif news.kind == FINISHED:
            self._finished.add(news.rank)
        elif news.kind == FAILED:
            cause = f"{news.cause} (exit status {news.status})"
            self._fail(Failure(news.rank, news.host, cause, news.status))
        elif news.kind == ENDED:
            self._ended.add(news.rank)
            if news.status != 0:
                cause, status = describe_end(news.status)
                self._fail(Failure(news.rank, news.host, cause, status))

    def hear_abort(self, line: bytes) -> None:
        """Take note of a rank's own call of MPI_Abort, from the line that MPICH prints."""
        match = re.search(rb"Abort\((-?\d+)\) on node (\d+)", line)
        if match:
            code, rank = int(match[1]), int(match[2])
            cause = f"it called MPI_Abort (exit status {code})"
            self._fail(Failure(rank, self._hosts.get(rank, "?"), cause, code & 0xFF or 1))

    def hear_bad_termination(self, banner: bytes) -> None:
        """Take note of a killed supervisor, from what hydra prints about it.

        Hydra may name one of the others there, which it has killed itself in consequence.
        """
        match = re.search(rb"RUNNING AT (\S+)\s*=\s*EXIT CODE: (\d+)", banner)
        if match:
            cause, status = describe_end(-int(match[2]))
            self._killed = Failure(None, match[1].decode(errors="replace"), cause, status)

    def end(self, status: int) -> Failure | None:
        """What the run came to, given the status of mpiexec; None if every rank ended well."""
        if self.failure is not None:
            return self.failure
        missing = sorted(set(range(self._ranks)) - self._ended)
        left = sorted(self._ended - self._finished)
        if missing and left:
            # One left by os._exit(0), and the launcher ended the others, who still needed it.
            cause = "it left before its script had come to the end"
            self._fail(Failure(left[0], self._hosts.get(left[0], "?"), cause, 1))
        elif self._killed is not None:
            self._fail(self._killed)
        elif status != 0:
            cause, status = describe_end(status)
            self._fail(Failure(None, "", f"mpiexec: {cause}", status))
        elif missing:
            self._fail(Failure(missing[0], self._hosts.get(missing[0], "?"), "it disappeared", 1))
        return self.failure

    def message(self) -> str:
        """The failure in one sentence."""
        assert self.failure is not None
        if not self.failure.host:
            return f"the run failed: {self.failure.cause}."
        others = "; the other ranks were ended" if self._ranks > 1 else ""
        who = "a rank" if self.failure.rank is None else f"rank {self.failure.rank}"
        return f"{who} on host {self.failure.host} failed: {self.failure.cause}{others}."

    def _fail(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure


def describe_end(status: int) -> tuple[str, int]:
    """A process's end in words, and the exit status that stands for it.

    Args:
        status: as Python's subprocess gives it, negative for a signal
    """
    if status >= 0:
        return f"it ended with exit status {status}", status
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    hint = ", perhaps because memory ran out" if name == "SIGKILL" else ""
    return f"it was killed by signal {-status} ({name}{hint})", 128 - status
