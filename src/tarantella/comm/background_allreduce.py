"""Sums over the ranks in the background, while the rank computes.

Messages are summed in the order in which they are sent, which must be the same on all ranks. MPI
makes progress only while it is called, so a thread polls it until all messages have arrived.

MPI cannot add numbers of 16 bits and keep their sums in 32. Each rank gets a segment of them from
all others, adds it up in float32, and sends the sum to all, in 16 bits again. These are messages
from rank to rank, which use all of a link of 1 Gbit/s; MPICH's `Ialltoallv` and `Iallgatherv` use
half of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from tarantella.comm import buffers
from tarantella.comm.waiting import count_barrier, pauses
from tarantella.runtime import times, watch
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
# A piece of 16 bits has two tags. Every MPI has this many, and far fewer pieces are in flight.
_TAGS = 32768


@dataclass(frozen=True)
class Exchange:
    """Communication in progress.

    Attributes:
        requests: MPI's requests.
        then: What to do when they are done; another exchange may follow.
    """

    requests: list[Any]
    then: Callable[[], Exchange | None]


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
        self._source = source
        self._target = target
        self._name = name
        self._sent = self._started = now()

    def pieces(self, nbytes: int) -> Iterator[tuple[Any, Array]]:
        """What MPI reads and writes, in pieces of this many bytes."""
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
    """

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
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
        in_flight: deque[Exchange] = deque()
        looks = pauses(times.LONGEST_PAUSE_FOR_GRADIENTS)
        while True:
            while len(in_flight) < _PIECES_IN_FLIGHT and (one := next(exchanges)) is not None:
                in_flight.append(one)
            if not in_flight:
                return
            if not MPI.Request.Testall(in_flight[0].requests):
                next(looks)
                continue
            following = in_flight.popleft().then()
            if following is not None:
                in_flight.append(following)

    def _exchanges(self) -> Iterator[Exchange | None]:
        """Starts one piece after the other; None if there is none to start."""
        while True:
            message = self._next()
            if message is None:
                yield None
                continue
            if self._timeline is not None:
                yield Exchange([self._communicator.Ibarrier()], message.note_start)
            *pieces, last = message.pieces(self._piece_bytes)
            for source, target in pieces:
                yield self._start(source, target, lambda: None)
            yield self._start(*last, partial(self._finish, message))

    def _start(self, source: Any, target: Array, then: Callable[[], None]) -> Exchange:
        """Starts to sum a piece; `then` is called when its sum is there."""
        if target.itemsize != 2 or target.dtype.kind in "iu":
            return Exchange([self._communicator.Iallreduce(source, target)], then)
        return _exchange_segments(source, target, self._communicator, next(self._tags), then)

    def _next(self) -> Message | None:
        with self._changed:
            return self._to_send.popleft() if self._to_send else None

    def _finish(self, message: Message) -> None:
        if self._timeline is not None:
            message.note_end(self._timeline)
        with self._changed:
            message.is_done = True
            self._changed.notify_all()


def _exchange_segments(
    source: Any, target: Array, communicator: Any, tag: int, then: Callable[[], None]
) -> Exchange:
    """Starts to sum numbers of 16 bits over the ranks, in float32.

    Args:
        source: What this rank contributes, or MPI.IN_PLACE for what is in the target.
        target: Where the sum will be.
        communicator: One of all ranks.
        tag: For the segments of all ranks; the next one is for their sums.
        then: Called when all is done.
    """
    from mpi4py import MPI

    rank, size = communicator.Get_rank(), communicator.Get_size()
    others = [(rank + distance) % size for distance in range(1, size)]
    # As integers, since MPI does not know all types of 16 bits.
    sums = np.array_split(target.view(np.uint16), size)
    own = sums if source is MPI.IN_PLACE else np.array_split(source.view(np.uint16), size)
    segments = {other: np.empty_like(sums[rank]) for other in others}
    requests = [communicator.Irecv(segments[other], other, tag) for other in others]
    requests += [communicator.Isend(own[other], other, tag) for other in others]

    def send_sum() -> Exchange:
        segments[rank] = own[rank]
        total = np.zeros(len(own[rank]), np.float32)
        for other in range(size):  # in an order that does not depend on when they arrive
            np.add(total, segments[other].view(target.dtype), out=total)
        sums[rank].view(target.dtype)[:] = total
        requests = [communicator.Irecv(sums[other], other, tag + 1) for other in others]
        requests += [communicator.Isend(sums[rank], other, tag + 1) for other in others]
        return Exchange(requests, then)

    return Exchange(requests, send_sum)


@cache
def background_allreduce(communicator: Any) -> BackgroundAllreduce:
    """The background allreduce on a communicator of `world.communicator`."""
    return BackgroundAllreduce(communicator)
