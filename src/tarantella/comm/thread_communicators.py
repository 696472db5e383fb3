"""Separate communicators for threads of the script that train at the same time.

All ranks use a communicator in the same order. Each of two threads does, but not both together:
on every rank they are interleaved differently. So each needs communicators that no other uses.
"""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from tarantella.comm.agreement import check_same
from tarantella.errors import InputError
from tarantella.runtime import watch, world
from tarantella.runtime.world import PURPOSES, Communicators

_LARGEST_TAG = 32767  # that every MPI library allows
# Python numbers threads that got no name. A rank may have started more of them than others.
_NUMBERED = re.compile(r"^(Thread|ThreadPoolExecutor|Dummy)-\d+")

_lock = threading.Lock()
_by_thread: dict[str, Communicators] = {}
_in_use: set[str] = set()


@contextmanager
def communicators_of_this_thread() -> Iterator[None]:
    """Inside it, this thread uses communicators that no other thread of this rank uses.

    Does nothing in the main thread. The threads of the ranks that belong together are those of the
    same name, not counting the number that Python gives to threads without one, and every rank must
    have one. Communicators are kept for the next such thread.

    Raises:
        InputError: If another thread of this name is inside.
        MismatchError: If a thread of another name takes part on another rank.
    """
    name = _NUMBERED.sub(r"\1", threading.current_thread().name)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if world.get_size() == 1 or in_main_thread or world.has_own_communicators():
        yield
        return
    with _lock:
        if name in _in_use:
            raise InputError(
                f"Two threads named {name!r} train at the same time: give each thread a name of "
                "its own, the same on all ranks."
            )
        _in_use.add(name)
    try:
        if name not in _by_thread:
            _by_thread[name] = _created(name)
        with world.using(_by_thread[name]):
            yield
    finally:
        with _lock:
            _in_use.discard(name)


def all_communicators() -> list[Communicators]:
    """Those of the main thread, and of the other threads; in the same order on all ranks."""
    return [world.communicators(), *(_by_thread[name] for name in sorted(_by_thread))]


def _created(name: str) -> Communicators:
    """New communicators. Only the ranks' threads of this name take part."""
    ranks = world.communicator("control")
    group = ranks.Get_group()
    with watch.waiting(f"the first training in thread {name!r}, which every rank must have"):
        common = ranks.Create_group(group, zlib.crc32(name.encode()) % _LARGEST_TAG)
        communicators = Communicators(
            {purpose: watch.watched(common.Dup(), purpose) for purpose in PURPOSES}, name
        )
    group.Free()
    common.Free()
    # Two names can have the same tag.
    check_same(name, "the name of a thread that trains", communicators["control"])
    return communicators
