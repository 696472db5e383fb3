"""Waiting for the other ranks without taking a core from those that compute.

MPI libraries wait by polling. That is quickest when the others are about to arrive and there is a
core to spare. Ranks that share cores would keep each other from computing what they wait for, and
a rank that waits for another host would slow itself down. These ranks have a barrier before each
collective, and check less and less often whether all have arrived.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

from tarantella.runtime import times, watch, world


class _Barriers:
    """The barriers of one set of communicators."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.due: list[Callable[[], None]] = []  # what this rank does before the next one


_barriers: dict[world.Communicators, _Barriers] = {}
_lock = threading.Lock()
_unfinished: list[tuple[Any, Any]] = []  # requests that nobody waits for, and their buffers


def barrier(communicator: Any) -> None:
    """Returns when every rank has called it; at once on one host with a core for each."""
    # A thread of the script calls collectives whenever it likes: at another point on each rank.
    if communicator.purpose != "collectives" or in_common_order():
        count_barrier(communicator)
    if ranks_share_cores() or world.has_several_hosts():
        wait_polling(communicator.Ibarrier(), communicator.purpose)


def count_barrier(communicator: Any) -> None:
    """This rank is about to wait for the others."""
    barriers = _barriers_of(communicator)
    with barriers.lock:
        due = barriers.due.copy()
        barriers.due.clear()
    for function in due:
        function()
    with barriers.lock:
        barriers.count += 1


def barrier_count(communicator: Any) -> int:
    """How many barriers this rank has passed: the same on all ranks at the same point.

    Communicators of one thread are counted together.
    """
    return _barriers_of(communicator).count


def before_next_barrier(communicator: Any, function: Callable[[], None]) -> None:
    """Registers a function to call once, when this rank is about to wait for the others."""
    barriers = _barriers_of(communicator)
    with barriers.lock:
        barriers.due.append(function)


def _barriers_of(communicator: Any) -> _Barriers:
    siblings = communicator.siblings
    return _barriers.get(siblings) or _barriers.setdefault(siblings, _Barriers())


def in_common_order() -> bool:
    """Whether this thread does the same things in the same order on every rank.

    The main thread does, and so does one that has its own communicators.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread or world.has_own_communicators()


def wait(request: Any, purpose: str) -> None:
    """Waits for a request to be done; on a core that other ranks need, without holding it."""
    if ranks_share_cores():
        wait_polling(request, purpose)
    else:
        with watch.waiting(purpose):
            request.Wait()


def wait_polling(request: Any, purpose: str | None) -> None:
    """Waits for a request to be done, and leaves the core to other threads meanwhile.

    Args:
        request: What is waited for.
        purpose: What for, if it is a problem when the others do not arrive; None: they may take
            as long as they like.
    """
    waits = pauses()
    with watch.waiting(purpose) if purpose else nullcontext():
        while not request.Test():
            next(waits)


def keep_until_done(request: Any, buffers: Any) -> None:
    """Keeps the buffers of a request that nobody waits for, for as long as MPI uses them."""
    with _lock:
        _unfinished[:] = [(other, kept) for other, kept in _unfinished if not other.Test()]
        _unfinished.append((request, buffers))


def pauses(longest: float = times.LONGEST_PAUSE) -> Iterator[None]:
    """Waits between two checks: not at all at first, then longer and longer."""
    for _ in range(times.CHECKS_WITHOUT_PAUSE):
        yield
    pause = times.SHORTEST_PAUSE
    while True:
        time.sleep(pause)
        yield
        pause = min(2 * pause, longest)


@cache
def ranks_share_cores() -> bool:
    """Whether any host has more ranks than cores. All ranks come to the same answer."""
    return any(ranks > cores for cores, ranks in world.get_cores_and_ranks().values())


@cache
def ranks_have_spare_cores() -> bool:
    """Whether every host has at least four cores a rank. All ranks come to the same answer.

    Then one core can sum while the others compute. With two it does not pay; three were not tried.
    """
    return all(4 * ranks <= cores for cores, ranks in world.get_cores_and_ranks().values())
