"""What each rank was doing when, as a trace that Perfetto and chrome://tracing show.

Nothing is recorded unless `TNT_TIMELINE` names a file. The master rank writes it when all ranks
end normally. Times are those of the master's clock; the clocks of other hosts are compared with
it at the start and at the end.
"""

from __future__ import annotations

import json
import secrets
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tarantella.errors import InputError
from tarantella.runtime import ending, world
from tarantella.runtime.log import LOGGER

STEPS = "steps"  # the lane of what a rank does in each step

_MOST_SPANS = 200_000  # on each rank; about 20 MB of the file
_EXCHANGES = 20  # between two clocks; the quickest one counts


@dataclass(frozen=True)
class Span:
    """Something that took time.

    Attributes:
        lane: the row it is shown in
        name: what it was
        begin: when it began, in nanoseconds
        end: when it ended
        details: more about it
    """

    lane: str
    name: str
    begin: int
    end: int
    details: dict[str, Any]


class Timeline:
    """What this rank has done so far."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.is_full = False
        self._lock = threading.Lock()
        self._phase_began = now()

    def add(self, lane: str, name: str, begin: int, end: int, **details: Any) -> None:
        """Something took from `begin` to `end`."""
        with self._lock:
            self._add(Span(lane, name, begin, end, details))

    def phase(self, name: str) -> None:
        """The phase that began when the last one ended ends now."""
        with self._lock:
            end = now()
            self._add(Span(STEPS, name, self._phase_began, end, {}))
            self._phase_began = end

    def _add(self, span: Span) -> None:
        if len(self.spans) < _MOST_SPANS:
            self.spans.append(span)
        else:
            self.is_full = True


_timeline: Timeline | None = None


def timeline() -> Timeline | None:
    """Where to record what this rank does; None if there is no timeline."""
    return _timeline


def now() -> int:
    return time.perf_counter_ns()


def start(name: str) -> None:
    """Starts to record, for a file of this name; all ranks must call it."""
    global _timeline
    path = Path(name).absolute()  # a script may change its working directory
    if world.is_master_rank():
        _check(path)
    _timeline = recorded = Timeline()
    clock = _Clock()

    def finish() -> None:
        if recorded.is_full:
            LOGGER.warning(
                "The timeline shows only the start of the run: the first %d spans of each rank.",
                _MOST_SPANS,
            )
        if world.get_size() > 1 or recorded.spans:
            clock.compare_again()
            _write(path, recorded.spans, clock)

    ending.before_end(finish, by_mpi=world.get_size() > 1)


def _check(path: Path) -> None:
    """Checks now, and not after hours, that the file can be written."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(0, "it is not a file")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(
            f"The timeline cannot be written to {str(path)!r}: {error.strerror}."
        ) from None


class _Clock:
    """This rank's clock, read in the master's time."""

    def __init__(self) -> None:
        self._origin = self._began = self._ended = now()
        self._ahead_at_begin = self._ahead_at_end = _ahead_of_master()
        if world.get_size() > 1:
            origin = array("q", [self._origin])
            world.communicator("control").Bcast(origin, world.get_master_rank())
            self._origin = origin[0]

    def compare_again(self) -> None:
        self._ended = now()
        self._ahead_at_end = _ahead_of_master()

    def microseconds(self, moment: int) -> float:
        """From the master's start to a moment of this rank's."""
        passed = (moment - self._began) / max(self._ended - self._began, 1)
        ahead = self._ahead_at_begin + (self._ahead_at_end - self._ahead_at_begin) * passed
        return (moment - ahead - self._origin) / 1000


def _ahead_of_master() -> float:
    """By how much this rank's clock is ahead of the master's; ranks of one host share a clock."""
    hosts, master = world.get_host_names(), world.get_master_rank()
    if world.is_master_rank():
        for rank, host in enumerate(hosts):
            if host != hosts[master]:
                _tell_time(rank)
        return 0.0
    return 0.0 if hosts[world.get_rank()] == hosts[master] else _ask_time(master)


def _tell_time(rank: int) -> None:
    comm, time_here = world.communicator("control"), array("q", [0])
    for _ in range(_EXCHANGES):
        comm.Recv(time_here, rank)
        time_here[0] = now()
        comm.Send(time_here, rank)


def _ask_time(master: int) -> float:
    comm, time_there = world.communicator("control"), array("q", [0])
    answers = []
    for _ in range(_EXCHANGES):
        asked = now()
        comm.Send(time_there, master)
        comm.Recv(time_there, master)
        answered = now()
        answers.append((answered - asked, (asked + answered) / 2 - time_there[0]))
    return min(answers)[1]


def _write(path: Path, spans: list[Span], clock: _Clock) -> None:
    own = b",\n".join(json.dumps(event).encode() for event in _events(spans, clock))
    if not world.is_master_rank():
        world.communicator("control").Send(own, world.get_master_rank())
        return
    everyones = _received(own)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with unfinished.open("xb") as file:
            file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, events in enumerate(everyones):
                file.write((b",\n" if number else b"") + events)
            file.write(b"\n]}\n")
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        LOGGER.error("The timeline could not be written to %s: %s", path, error.strerror)
    for _ in everyones:
        pass  # receives what others have sent in any case


def _received(own: bytes) -> Iterator[bytes]:
    for rank in range(world.get_size()):
        if rank == world.get_master_rank():
            yield own
            continue
        from mpi4py import MPI  # a serial run has none

        comm, status = world.communicator("control"), MPI.Status()
        comm.Probe(rank, status=status)
        events = bytearray(status.Get_count(MPI.BYTE))
        comm.Recv(events, rank)
        yield bytes(events)


def _events(spans: list[Span], clock: _Clock) -> Iterator[dict[str, Any]]:
    """The events of this rank in the format of a Chrome trace."""
    rank = world.get_rank()
    host = world.get_host_names()[rank]
    yield _named("process_name", rank, 0, name=f"rank {rank} on {host}")
    yield _named("process_sort_index", rank, 0, sort_index=rank)
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys([STEPS, *_lanes(spans)]))}
    for lane, number in lanes.items():
        yield _named("thread_name", rank, number, name=lane)
        yield _named("thread_sort_index", rank, number, sort_index=number)
    for span in spans:
        begin, end = clock.microseconds(span.begin), clock.microseconds(span.end)
        yield {
            "name": span.name,
            "ph": "X",
            "ts": round(begin, 3),
            "dur": round(end - begin, 3),
            "pid": rank,
            "tid": lanes[span.lane],
            "args": span.details,
        }


def _lanes(spans: list[Span]) -> list[str]:
    """The lanes in the order in which they were first used."""
    return list(dict.fromkeys(span.lane for span in sorted(spans, key=lambda span: span.begin)))


def _named(kind: str, rank: int, lane: int, **what: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": lane, "args": what}
