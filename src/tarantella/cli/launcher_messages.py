"""The messages of launchers and MPI libraries among what the ranks print.

Some say how a run has ended, which the command says better. The others are all we have if a run
does not even start, and only confuse once it ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from tarantella.cli.outcome import Outcome
from tarantella.cli.streams import Passage
from tarantella.launch.mpich_abort import find_abort

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

_OPEN_MPI_ABORT = re.compile(
    rb"MPI_ABORT was invoked on rank (?P<rank>\d+) in communicator MPI_COMM_WORLD\s"
    rb".*?errorcode:? (?P<code>-?\d+)",
    re.DOTALL | re.IGNORECASE,
)
_HYDRA_KILLED = re.compile(
    rb"RUNNING AT (?P<host>\S+)\s*=\s*(?:EXIT CODE|KILLED BY SIGNAL): (?P<signal>\d+)"
)
_OPEN_MPI_KILLED = re.compile(
    rb"noticed that process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on"
    rb"\s+signal (?P<signal>\d+)"
)


class LauncherMessages:
    """Takes such messages out of the output, and tells the outcome what they say.

    Args:
        outcome: is told what they say
        hosts: the names that the library puts in front of its lines
        is_ending: whether the run is ending
    """

    def __init__(
        self, outcome: Outcome, hosts: Iterable[str], is_ending: Callable[[], bool]
    ) -> None:
        self._outcome = outcome
        self._hosts = {host.partition(".")[0].encode() for host in hosts}
        self._is_ending = is_ending
        self._banner_was_here = False

    def in_output(self) -> list[Passage]:
        """The messages on the standard output."""
        return [
            Passage(_HYDRA_RULE + _HYDRA_BANNER, _HYDRA_RULE, self._banner),
            Passage(_HYDRA_MORE, b"debugging suggestions\n", lambda _: b""),
            Passage(b"[mpiexec@", b"\n", self._line),
        ]

    def in_errors(self) -> list[Passage]:
        """The messages on the error stream."""
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
        if abort := _OPEN_MPI_ABORT.search(text):
            self._outcome.hear_abort(int(abort["rank"]), int(abort["code"]))
        # Hydra does not say which rank, and may name the host of another one that it has killed
        # as a result.
        if killed := _HYDRA_KILLED.search(text):
            self._outcome.hear_killed(None, _decode(killed["host"]), int(killed["signal"]))
        elif killed := _OPEN_MPI_KILLED.search(text):
            rank, host = int(killed["rank"]), _decode(killed["host"])
            self._outcome.hear_killed(rank, host, int(killed["signal"]))
        return b""

    def _end_of_banner(self, byte: bytes) -> bytes:
        return b"" if self._banner_was_here else byte  # Open MPI writes it after some

    def _abort(self, line: bytes) -> bytes:
        abort = find_abort(line)
        if abort is None or not abort.is_call:
            return line
        self._outcome.hear_abort(abort.rank, abort.code)
        return b""

    def _line(self, line: bytes) -> bytes:
        if b"no port to bind" in line:
            self._outcome.hear_hint(
                "no port is free in the range set by a variable such as MPIEXEC_PORT_RANGE or "
                "MPICH_PORT_RANGE: widen the range, or unset the variable"
            )
        elif b"check for firewalls" in line:
            self._outcome.hear_hint(
                "a host cannot connect to this machine: check for a firewall between them"
            )
        return b"" if self._banner_was_here or self._is_ending() else line

    def _line_of_open_mpi(self, line: bytes) -> bytes:
        if not _OPEN_MPI_LINE.match(line):
            return line
        return b"" if _OPEN_MPI_RACE in line else self._line(line)


def _decode(name: bytes) -> str:
    return name.decode(errors="replace")
