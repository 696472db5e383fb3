"""What this rank waits for, reported when it takes too long.

A rank that waits for others cannot know which is missing, nor why. So a thread of each rank checks
from time to time whether the rank makes progress. If not, it reports that the rank waits, and in
what; or that it does something else, and where. The command puts the reports together.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tarantella.runtime import failure, times
from tarantella.runtime.announce import (
    ELSEWHERE,
    WAITS,
    Announcement,
    announce,
    is_run_by_command,
    say,
)
from tarantella.runtime.configuration import configuration
from tarantella.runtime.script_place import COLLECTIVES, place_of_thread

_WORDS = {
    "collectives": "a collective of the script",
    "gradients": "a sum of gradients",
    "sparse gradients": "a sum of gradients",
    "metrics": "a sum of metrics",
    "losses": "a sum for the loss",
    "layers": "a sum of the state of layers",
    "statistics": "the statistics for batch normalization",
    "callbacks": "an agreement between callbacks",
    "reports": "a file that the master rank writes",
    "data": "the sizes of a step's micro-batches",
    "engine": "the choice of what sums",
    "control": "a check that all ranks agree",
}
_OUTSIDE_OF_STEPS = ("collectives", "reports", "engine", "control")
_BLOCKING = (
    "Allgather",
    "Allgatherv",
    "Allreduce",
    "Barrier",
    "Bcast",
    "Gather",
    "Gatherv",
    "Recv",
    "Sendrecv",
    "allgather",
    "allreduce",
    "barrier",
    "bcast",
    "gather",
    "recv",
)

_waits: dict[int, tuple[str, float, int]] = {}  # what is waited in, since when, in which thread
_asleep = 0.0  # seconds for which this process was stopped, or had no core
_moved_on = time.monotonic()
_step = 0
# Waits that no Python function sees: their purposes, and what tells them apart.
_unseen: list[tuple[str, Callable[[], int | None]]] = []
_unseen_since: dict[tuple[str, int], float] = {}


class waiting:  # noqa: N801, used like a function
    """What is done in here cannot end without the other ranks.

    Args:
        purpose: What is waited in.
        computes: Whether this rank may compute meanwhile, so that it loses no time.
    """

    __slots__ = ("_computes", "_purpose")

    def __init__(self, purpose: str, computes: bool = False) -> None:
        self._purpose = purpose
        self._computes = computes

    def __enter__(self) -> None:
        _waits[id(self)] = (self._purpose, _clock(), threading.get_ident())
        if not self._computes:
            _time_lost.begin()

    def __exit__(self, *_: object) -> None:
        global _moved_on
        _waits.pop(id(self), None)
        _moved_on = _clock()
        if not self._computes:
            _time_lost.end()


class _TimeLost:
    """The time in which at least one thread waited."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits = 0
        self._since = 0.0
        self._seconds = 0.0

    def begin(self) -> None:
        with self._lock:
            if not self._waits:
                self._since = time.monotonic()
            self._waits += 1

    def end(self) -> None:
        with self._lock:
            self._waits -= 1
            if not self._waits:
                self._seconds += time.monotonic() - self._since

    def seconds(self) -> float:
        with self._lock:
            return self._seconds + (time.monotonic() - self._since if self._waits else 0.0)


_time_lost = _TimeLost()


def seconds_waited() -> float:
    """For how long this rank has waited for others so far."""
    return _time_lost.seconds()


def _clock() -> float:
    """Seconds, without those in which this process was stopped."""
    return time.monotonic() - _asleep


def note_step(number: int) -> None:
    """This rank has begun a step."""
    global _step
    _step = number


def also_watch(purpose: str, number_in_progress: Callable[[], int | None]) -> None:
    """Watches what waits for other ranks without calling Python.

    Args:
        purpose: What is waited in.
        number_in_progress: Tells, in the thread that watches, the number of what is in progress,
            or None. It is asked only if this rank seems to make no progress.
    """
    _unseen.append((purpose, number_in_progress))


def watched(communicator: Any, purpose: str) -> Any:
    """The same communicator, whose blocking calls are known to wait."""

    def method(name: str) -> Any:
        plain = getattr(type(communicator), name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with waiting(purpose):
                return plain(self, *args, **kwargs)

        return call

    methods = {name: method(name) for name in _BLOCKING}
    # There is one object for each communicator, so it can be a key as itself.
    attributes = {**methods, "purpose": purpose, "__hash__": object.__hash__}
    return type("Watched", (type(communicator),), attributes)(communicator)


def start(rank: int, seconds: float) -> None:
    """Reports from now on if this rank waits for longer than this many seconds."""
    descriptor = os.dup(2)  # the script may close or redirect its own
    watch = threading.Thread(
        target=_watch, args=(rank, seconds, descriptor), daemon=True, name="tnt-watch"
    )
    watch.start()


def _watch(rank: int, seconds: float, descriptor: int) -> None:
    def tell(kind: str, place: str, status: int = 0, text: str = "") -> None:
        host, pid = socket.gethostname(), os.getpid()
        announce(Announcement(kind, rank, host, pid, status, text, place=place), descriptor)

    has_warned = False
    while True:
        _sleep(min(seconds / times.LOOKS_PER_STALL_TIMEOUT, times.LONGEST_TIME_BETWEEN_REPORTS))
        waited, purpose, thread = _longest_wait(seconds)
        if waited > seconds:
            place = str(script_place := place_of_thread(thread))
            where = _described(purpose, script_place.call)
            tell(WAITS, place, int(waited), where)
            if not is_run_by_command():
                where = f"{where}, in {place}" if place else where
                text = f"Rank {rank} has been waiting for {waited:.0f} seconds, in {where}, for "
                _manage_alone(f"{text}other ranks", waited, seconds, has_warned, descriptor)
            has_warned = True
        else:
            has_warned = False
            if _clock() - _moved_on > seconds:
                tell(ELSEWHERE, str(place_of_thread()))


def _described(purpose: str, call: str) -> str:
    """What this rank waits in, in words."""
    if purpose == "collectives" and call not in COLLECTIVES:
        purpose = "control"
    in_step = _step and purpose not in _OUTSIDE_OF_STEPS
    return f"{_WORDS.get(purpose, purpose)}{f' of step {_step}' if in_step else ''}"


def _sleep(seconds: float) -> None:
    """Sleeps, and notes if it took longer: this process was stopped meanwhile."""
    global _asleep
    before = time.monotonic()
    time.sleep(seconds)
    too_long = time.monotonic() - before - seconds
    if too_long > max(2 * seconds, times.SHORTEST_STOP):
        _asleep += too_long


def _longest_wait(seconds: float) -> tuple[float, str, int]:
    """For how long this rank has waited, in what, and in which thread; 0: it is not known."""
    now = _clock()
    waits = [(now - since, purpose, thread) for purpose, since, thread in list(_waits.values())]
    if now - _moved_on > seconds / 2:
        waits += [(waited, purpose, 0) for waited, purpose in _unseen_waits(now)]
    return max(waits, default=(0.0, "", 0))


def _unseen_waits(now: float) -> list[tuple[float, str]]:
    """What is in progress unseen, and for how long it has been seen to be."""
    global _unseen_since
    found: list[tuple[str, int | None]] = []
    for purpose, number in list(_unseen):
        with suppress(Exception):  # TensorFlow may be about to end
            found.append((purpose, number()))
    _unseen_since = {
        (purpose, number): _unseen_since.get((purpose, number), now)
        for purpose, number in found
        if number is not None
    }
    return [(now - since, purpose) for (purpose, _), since in _unseen_since.items()]


def _manage_alone(
    text: str, waited: float, seconds: float, has_warned: bool, descriptor: int
) -> None:
    """Without the command, nobody knows of the other ranks: any rank may have to report."""
    if not has_warned and configuration().log_level != "ERROR":
        say(
            f"tarantella WARNING: {text}, which may have failed, or may be doing something else.",
            descriptor,
        )
    if waited > times.STALL_TIMEOUTS_TO_END * seconds:
        say(f"tarantella ERROR: {text}: ending the run.", descriptor)
        failure.abort(1)
