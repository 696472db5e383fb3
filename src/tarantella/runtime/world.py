"""The ranks of this run, and the communicators between them.

A process that an MPI launcher has started is a rank. Any other is a serial run: one rank, which is
the master rank, and no MPI at all. `start` finds out which of them this process is.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tarantella.errors import TarantellaError
from tarantella.runtime.cores import core_limit, usable_cores

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# Collectives that run at the same time need a communicator each. Creating one is collective too,
# so all are created together, in this order.
PURPOSES = (
    "collectives",  # `tnt.allreduce` and the like, and checks that the ranks agree
    "gradients",
    "sparse gradients",  # gathered while dense ones are summed in the background
    "metrics",
    "losses",  # divisors of masks and weights, and numbers that the user's code computes
    "layers",  # the state that layers write, at the end of a step
    "statistics",  # of synchronized batch normalization, in the middle of one
    "callbacks",  # requests to stop, and logs; a rank may wait for these while it trains
    "reports",  # what the master has done for all, as saving a file; the master never waits
    "data",  # the sizes of steps, some steps ahead
    "engine",  # what sums values in graphs; decided once, by whichever thread needs a sum first
    "control",  # the start, and the master's weights
)


@dataclass(frozen=True)
class RankLocation:
    """Where a rank runs.

    Attributes:
        host: name of its host
        cores: the cores it may run on
        gpus: the GPUs its environment lets it see, as CUDA_VISIBLE_DEVICES says; None: all
        core_limit: how many cores' worth of time it and its neighbours get; None: all
    """

    host: str
    cores: frozenset[int]
    gpus: str | None
    core_limit: int | None = None


def this_location() -> RankLocation:
    """Where this process runs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return RankLocation(socket.gethostname(), frozenset(usable_cores()), visible, core_limit())


class Communicators:
    """A communicator of all ranks for each purpose. Each keeps one order of calls on all ranks.

    Args:
        by_purpose: The communicators, which `watch.watched` has made.
        thread: The name of the thread that uses them; empty for the main thread.
    """

    def __init__(self, by_purpose: Mapping[str, Any], thread: str = "") -> None:
        self._by_purpose = by_purpose
        self.thread = thread
        for communicator in by_purpose.values():
            communicator.siblings = self

    def __getitem__(self, purpose: str) -> Any:
        return self._by_purpose[purpose]


_rank = 0
_size = 1
_locations: tuple[RankLocation, ...] = (this_location(),)
_host_count = 1
_communicators: Communicators | None = None
_communicators_in_use: ContextVar[Communicators | None] = ContextVar("communicators", default=None)
_pid = 0  # the process that MPI runs in; 0 where it does not


def belong_to(rank: int, size: int) -> None:
    """This process is a worker of a rank: it knows of the ranks, but cannot communicate."""
    global _rank, _size, _locations
    _rank, _size = rank, size
    _locations *= size  # all it knows


def join(rank: int, locations: Sequence[RankLocation], communicators: Communicators) -> None:
    """This process is a rank."""
    global _rank, _size, _locations, _host_count, _communicators, _pid
    _rank, _size = rank, len(locations)
    _locations = tuple(locations)
    _host_count = len(set(get_host_names()))
    _communicators = communicators
    _pid = os.getpid()


def get_rank() -> int:
    """The number of this rank, from 0 to `get_size()` - 1; 0 in a serial run.

    Example:
        >>> import tarantella as tnt
        >>> tnt.get_rank() in range(tnt.get_size())
        True
    """
    return _rank


def get_size() -> int:
    """The number of ranks in this run; 1 in a serial run."""
    return _size


def get_master_rank() -> int:
    """The rank that writes files and shows output: 0."""
    return 0


def is_master_rank() -> bool:
    """Whether this is the rank that writes files and shows output.

    Example:
        >>> import tarantella as tnt
        >>> if tnt.is_master_rank():
        ...     report = f"{tnt.get_size()} ranks"  # on one rank
    """
    return get_rank() == get_master_rank()


def get_local_rank() -> int:
    """The number of this rank among the ranks of its host."""
    mine = get_host_names()[_rank]
    return get_host_names()[:_rank].count(mine)


def get_local_size() -> int:
    """The number of ranks on the host of this rank."""
    return len(get_local_locations())


def get_host_names() -> tuple[str, ...]:
    """The host name of each rank."""
    return tuple(location.host for location in _locations)


def get_host_count() -> int:
    """On how many hosts the ranks of this run are."""
    return _host_count


def has_several_hosts() -> bool:
    """Whether the ranks of this run are on more than one host."""
    return _host_count > 1


def get_locations() -> tuple[RankLocation, ...]:
    """Where each rank runs."""
    return _locations


def get_local_locations() -> tuple[RankLocation, ...]:
    """Where each rank of this host runs, by local rank."""
    return tuple(each for each in _locations if each.host == _locations[_rank].host)


def get_cores_and_ranks() -> dict[str, tuple[int, int]]:
    """For each host, how many cores its ranks may use together, and how many ranks it has."""
    by_host: dict[str, list[RankLocation]] = {}
    for location in _locations:
        by_host.setdefault(location.host, []).append(location)
    return {host: (_cores_of(found), len(found)) for host, found in by_host.items()}


def _cores_of(locations: Sequence[RankLocation]) -> int:
    limits = [each.core_limit for each in locations if each.core_limit is not None]
    return min([len(frozenset().union(*(each.cores for each in locations))), *limits])


def communicator(purpose: str) -> Intracomm:
    """The communicator of all ranks for a purpose, one of `PURPOSES`."""
    if purpose not in PURPOSES:
        raise ValueError(f"There is no communicator for {purpose!r}, only for {PURPOSES}.")
    found: Intracomm = communicators()[purpose]
    return found


def communicators() -> Communicators:
    """The communicators of what this thread is doing."""
    return _communicators_in_use.get() or main_communicators()


def main_communicators() -> Communicators:
    """The communicators of the main thread."""
    if _communicators is None or _pid != os.getpid():
        raise TarantellaError(
            "This process is not a rank, so it cannot communicate with the ranks: "
            "it runs serially, or it is a worker process that a rank has started."
        )
    return _communicators


def shared_communicator(purpose: str) -> Intracomm:
    """The communicator of all ranks for a purpose that all threads share."""
    found: Intracomm = main_communicators()[purpose]
    return found


def has_own_communicators() -> bool:
    """Whether this thread uses communicators of its own, and not those of the main thread."""
    return _communicators_in_use.get() is not None


@contextmanager
def using(communicators: Communicators) -> Iterator[None]:
    """What this thread does in here uses these communicators."""
    token = _communicators_in_use.set(communicators)
    try:
        yield
    finally:
        _communicators_in_use.reset(token)
