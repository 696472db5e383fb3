"""What launchers and MPI libraries say of their own accord, among what the ranks print.

Some of it tells how a run has ended, which the command says better. The rest is all we have if a
run does not even start, and confuses once it goes down.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from tarantella.cli.outcome import Outcome
from tarantella.cli.streams import Passage

_HYDRA_RULE = b"\n" + b"=" * 83 + b"\n"
_HYDRA_BANNER = b"=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
_HYDRA_MORE = b"YOUR APPLICATION TERMINATED WITH THE EXIT STRING:"  # not with Intel MPI

_OPEN_MPI_RULE = b"-" * 74 + b"\n"
_OPEN_MPI_BANNERS = (
    b"MPI_ABORT was invoked on rank",
    b"An MPI communication peer process has unexpectedly disconnected",
    b"Primary job  terminated normally, but",
    *(
        launcher + words
        for launcher in (b"prterun", b"mpirun", b"mpiexec")
        for words in (
            b" noticed that process rank",
            b" detected that one or more processes exited",
            b" has exited due to process rank",
        )
    ),
)
_OPEN_MPI_LOST_PEER = b":00000] *** An error occurred in Socket closed"
_OPEN_MPI_LOST_PEER_END = b"terminate your MPI job as well)\n"
# Its launcher and the ssh that it has just started both want to do the same; one is too late.
_OPEN_MPI_RACE = b"plm:ssh: Warning: setpgid("
_OPEN_MPI_LINE = re.compile(rb"\[[^]\s]+:\d+\] ")


class LauncherWords:
    """Takes such words out, and has the outcome hear what they tell.

    Args:
        outcome: hears them
        hosts: whose names the library puts in front of its lines
        is_ending: whether the run goes down
    """

    def __init__(
        self, outcome: Outcome, hosts: Iterable[str], is_ending: Callable[[], bool]
    ) -> None:
        self._outcome = outcome
        self._hosts = {host.partition(".")[0].encode() for host in hosts}
        self._is_ending = is_ending
        self._banner_was_here = False

    def in_output(self) -> list[Passage]:
        """The words on the standard output."""
        return [
            Passage(_HYDRA_RULE + _HYDRA_BANNER, _HYDRA_RULE, self._banner),
            Passage(_HYDRA_MORE, b"debugging suggestions\n", lambda _: b""),
            Passage(b"[mpiexec@", b"\n", self._line),
        ]

    def in_errors(self) -> list[Passage]:
        """The words on the error stream."""
        passages = [
            Passage(b"Abort(", b"\n", self._abort),
            *(Passage(start, b"\n", self._line) for start in (b"[mpiexec@", b"[proxy:", b"[cli_")),
            *(Passage(_OPEN_MPI_RULE + start, _OPEN_MPI_RULE, self._banner)
              for start in _OPEN_MPI_BANNERS),
            Passage(b"\0", b"", self._end_of_banner),
        ]  # fmt: skip
        for host in self._hosts:
            lost_peer = b"[" + host + _OPEN_MPI_LOST_PEER
            passages.append(Passage(lost_peer, _OPEN_MPI_LOST_PEER_END, self._banner))
            passages.append(Passage(b"[" + host, b"\n", self._line_of_open_mpi))
        return passages

    def _banner(self, text: bytes) -> bytes:
        self._banner_was_here = True
        self._outcome.hear_abort(text)
        self._outcome.hear_bad_termination(text)
        return b""

    def _end_of_banner(self, byte: bytes) -> bytes:
        return b"" if self._banner_was_here else byte  # Open MPI writes it after some

    def _abort(self, line: bytes) -> bytes:
        if b"application called MPI_Abort" not in line:
            return line
        self._outcome.hear_abort(line)
        return b""

    def _line(self, line: bytes) -> bytes:
        self._outcome.hear_launcher(line)
        return b"" if self._banner_was_here or self._is_ending() else line

    def _line_of_open_mpi(self, line: bytes) -> bytes:
        if not _OPEN_MPI_LINE.match(line):
            return line
        return b"" if _OPEN_MPI_RACE in line else self._line(line)
