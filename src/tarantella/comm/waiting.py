"""Waiting for the other ranks without taking a core from those who compute.

MPI libraries wait by polling, which is quickest while the others are about to come and a core is
there to spend. Ranks that share cores would keep each other from computing what they wait for; a
rank that waits for another host, itself. There they meet before each collective, looking less and
less often whether all have come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

from tarantella.runtime import times, watch, world

_lock = threading.Lock()
_meetings = 0
_due: list[Callable[[], None]] = []  # what this rank does before the next meeting
_left_alone: list[tuple[Any, Any]] = []  # requests that nobody waits for, and their buffers


def barrier(communicator: Any) -> None:
    """Returns when every rank has called it; at once on one host with a core for each."""
    # A thread of the script calls collectives whenever it likes: on each rank at another point.
    if communicator.purpose != "collectives" or in_main_thread():
        expect_meeting()
    if ranks_share_cores() or world.has_several_hosts():
        wait_aside(communicator.Ibarrier(), communicator.purpose)


def expect_meeting() -> None:
    """This rank is about to meet the others."""
    global _meetings
    with _lock:
        due = _due.copy()
        _due.clear()
    for function in due:
        function()
    with _lock:
        _meetings += 1


def meetings() -> int:
    """How often this rank has met the others: the same on all ranks at the same point."""
    return _meetings


def in_main_thread() -> bool:
    """Whether this is the thread that is at a point which the ranks have in common."""
    return threading.current_thread() is threading.main_thread()


def before_next_meeting(function: Callable[[], None]) -> None:
    """Has a function called, once, when this rank is about to meet the others."""
    with _lock:
        _due.append(function)


def wait(request: Any, purpose: str) -> None:
    """Waits for a request to be done; on a core that other ranks need, without holding it."""
    if ranks_share_cores():
        wait_aside(request, purpose)
    else:
        with watch.waiting(purpose):
            request.Wait()


def wait_aside(request: Any, purpose: str | None) -> None:
    """Waits for a request to be done, and leaves the core to other threads meanwhile.

    Args:
        request: What is waited for.
        purpose: What for, if it is a problem when the others do not come; None: they may take
            as long as they like.
    """
    waits = pauses()
    with watch.waiting(purpose) if purpose else nullcontext():
        while not request.Test():
            next(waits)


def leave_alone(request: Any, buffers: Any) -> None:
    """Keeps the buffers of a request that nobody waits for any more, for as long as MPI has it."""
    with _lock:
        _left_alone[:] = [(other, kept) for other, kept in _left_alone if not other.Test()]
        _left_alone.append((request, buffers))


def pauses(longest: float = times.LONGEST_PAUSE) -> Iterator[None]:
    """Waits from one look to the next: not at all at first, then longer and longer."""
    for _ in range(times.LOOKS_WITHOUT_PAUSE):
        yield
    pause = times.SHORTEST_PAUSE
    while True:
        time.sleep(pause)
        yield
        pause = min(2 * pause, longest)


@cache
def ranks_share_cores() -> bool:
    """Whether any host has more ranks than cores. All ranks come to the same answer."""
    places_of: dict[str, list[world.Place]] = {}
    for place in world.get_places():
        places_of.setdefault(place.host, []).append(place)
    return any(len(places) > _cores_of(places) for places in places_of.values())


def _cores_of(places: list[world.Place]) -> int:
    limits = [place.core_limit for place in places if place.core_limit is not None]
    return min([len(frozenset().union(*(place.cores for place in places))), *limits])
