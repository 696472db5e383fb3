"""Sums over the ranks in the background, while the rank computes.

Sums begin in the order in which messages are sent, which must be the same on all ranks. MPI makes
progress only while it is called, so a thread polls it until all sums have arrived.

Of each host, one sum crosses the network, however many ranks it has (`hierarchical_allreduce`).
Small arrays are left to MPI's `Iallreduce`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import cycle
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from tarantella.comm import buffers
from tarantella.comm.hierarchical_allreduce import (
    Exchange,
    HierarchicalAllreduce,
    Peers,
    uses_least_bytes,
)
from tarantella.comm.waiting import count_barrier, pauses
from tarantella.runtime import times, watch, world
from tarantella.runtime.meter import METER
from tarantella.runtime.timeline import Timeline, now, timeline

Array = npt.NDArray[Any]

# Between hosts messages are sent in pieces, several at a time: while one is added up, others are in
# flight, even while this thread waits for a core. On a link of 1 Gbit/s a message of 16 MB alone
# uses 2/3 of it, pieces of 256 kB or more use all of it; during a backward pass on the same core,
# 8 MB in flight do better than 1 MB. An allreduce among many ranks takes more rounds, and larger
# pieces.
_PIECE_BYTES = 1 << 20
_PIECES_IN_FLIGHT = 8
# A piece has two tags. Every MPI has this many, and far fewer pieces are in flight.
_TAGS = 32768


class Message:
    """A flat array that is being summed.

    Args:
        source: What this rank contributes; the target itself, or another array that nobody changes
            until the sum has arrived.
        target: Where the sum will be.
        name: What it is called in a timeline.
    """

    def __init__(self, source: Array, target: Array, name: str = "") -> None:
        self.is_done = False
        self.missing = 0  # what has not ended yet, once it is being summed
        self._source = source
        self._target = target
        self._name = name
        self._sent = self._started = now()

    def pieces(self, nbytes: int) -> Iterator[tuple[Any, Array]]:
        """What MPI reads and writes, in pieces of this many bytes; at least one."""
        from mpi4py import MPI

        step = max(1, nbytes // self._target.itemsize)
        for start in range(0, max(len(self._target), 1), step):
            target = self._target[start : start + step]
            in_place = self._source is self._target
            yield MPI.IN_PLACE if in_place else self._source[start : start + step], target

    def note_start(self) -> None:
        """All ranks have sent it."""
        self._started = now()

    def note_end(self, notes: Timeline) -> None:
        """The sum has arrived."""
        size = self._target.nbytes
        notes.add(self._name, "waiting", self._sent, self._started, bytes=size)
        notes.add(self._name, "reducing", self._started, now(), bytes=size)


class BackgroundAllreduce:
    """Sums the messages of one communicator, with several pieces in flight at a time.

    Args:
        communicator: One that nobody else uses.
        host_names: The host name of each rank.
    """

    def __init__(self, communicator: Any, host_names: Sequence[str]) -> None:
        self._communicator = communicator
        self._peers = Peers.of(communicator.Get_rank(), host_names)
        self._hosts = len(set(host_names))
        self._tags = cycle(range(0, _TAGS, 2))
        rounds = int(np.ceil(np.log2(communicator.Get_size())))
        self._piece_bytes = min(_PIECE_BYTES * max(rounds, 1), buffers.MESSAGE_BYTES)
        self._timeline = timeline()
        self._changed = threading.Condition()
        self._to_send: deque[Message] = deque()
        self._error: BaseException | None = None
        threading.Thread(target=self._attend, name="tarantella-allreduce", daemon=True).start()

    def send(self, message: Message) -> None:
        """Sums a message, in the background, after all that were sent before."""
        count_barrier(self._communicator)
        METER.note_sent()
        with self._changed:
            self._to_send.append(message)
            self._changed.notify_all()

    def wait(self, message: Message) -> None:
        """Returns when the sum has arrived."""
        since = monotonic()
        with watch.waiting(self._communicator.purpose, computes=True), self._changed:
            while not message.is_done:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
        METER.note_received(since)

    def _attend(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._to_send:
                        self._changed.wait()
                self._sum_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _sum_all(self) -> None:
        """Sums the messages that wait, and those that are sent meanwhile."""
        from mpi4py import MPI

        exchanges = self._exchanges()
        in_flight: list[Exchange] = []
        looks = pauses(times.LONGEST_PAUSE_FOR_GRADIENTS)
        while True:
            while len(in_flight) < _PIECES_IN_FLIGHT and (one := next(exchanges)) is not None:
                in_flight.append(one)
            if not in_flight:
                return
            # Not only those of the oldest piece: it may have to wait for a slower rank, which may
            # itself wait for a later step of another piece. Done requests become null, and false.
            MPI.Request.Testsome([request for each in in_flight for request in each.requests])
            if all(any(each.requests) for each in in_flight):
                next(looks)
                continue
            following = (each if any(each.requests) else each.then() for each in in_flight)
            in_flight = [each for each in following if each is not None]

    def _exchanges(self) -> Iterator[Exchange | None]:
        """Starts one piece after the other; None if there is none to start."""
        while True:
            message = self._next()
            if message is None:
                yield None
                continue
            pieces = list(message.pieces(self._piece_bytes))
            message.missing = len(pieces)
            if self._timeline is not None:
                message.missing += 1
                yield Exchange([self._communicator.Ibarrier()], partial(self._begin, message))
            for source, target in pieces:
                yield self._start(source, target, partial(self._finish_piece, message))

    def _start(self, source: Any, target: Array, then: Callable[[], None]) -> Exchange:
        """Starts to sum a piece; `then` is called when its sum is there."""
        if not uses_least_bytes(target, self._hosts):
            return Exchange([self._communicator.Iallreduce(source, target)], then)
        tag = next(self._tags)
        communicator, peers = self._communicator, self._peers
        return HierarchicalAllreduce(source, target, communicator, peers, tag, then).start()

    def _next(self) -> Message | None:
        with self._changed:
            return self._to_send.popleft() if self._to_send else None

    def _begin(self, message: Message) -> None:
        message.note_start()
        self._finish_piece(message)

    def _finish_piece(self, message: Message) -> None:
        message.missing -= 1
        if message.missing:
            return
        if self._timeline is not None:
            message.note_end(self._timeline)
        with self._changed:
            message.is_done = True
            self._changed.notify_all()


@cache
def background_allreduce(communicator: Any) -> BackgroundAllreduce:
    """The background allreduce on a communicator of `world.communicator`."""
    return BackgroundAllreduce(communicator, world.get_host_names())
