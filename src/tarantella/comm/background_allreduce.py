"""Sums over the ranks in the background, while the rank computes.

Messages are summed in the order in which they are sent, which must be the same on all ranks. MPI
makes progress only while it is called, so a thread polls it until all messages have arrived.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tarantella.comm import buffers
from tarantella.comm.waiting import count_barrier, pauses
from tarantella.runtime import times, watch
from tarantella.runtime.timeline import Timeline, now, timeline

Array = npt.NDArray[Any]

# Between hosts messages are sent in pieces, several at a time: while one is added up, others are in
# flight, even while this thread waits for a core. On a link of 1 Gbit/s a message of 16 MB alone
# uses 2/3 of it, pieces of 256 kB or more use all of it; during a backward pass on the same core,
# 8 MB in flight do better than 1 MB. An allreduce among many ranks takes more rounds, and larger
# pieces.
_PIECE_BYTES = 1 << 20
_PIECES_IN_FLIGHT = 8


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
        with self._changed:
            self._to_send.append(message)
            self._changed.notify_all()

    def wait(self, message: Message) -> None:
        """Returns when the sum has arrived."""
        with watch.waiting(self._communicator.purpose), self._changed:
            while not message.is_done:
                if self._error is not None:
                    raise self._error
                self._changed.wait()

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
        requests = self._requests()
        in_flight: deque[tuple[Any, Callable[[], None] | None]] = deque()
        looks = pauses(times.LONGEST_PAUSE_FOR_GRADIENTS)
        while True:
            while len(in_flight) < _PIECES_IN_FLIGHT and (one := next(requests)) is not None:
                in_flight.append(one)
            if not in_flight:
                return
            if not in_flight[0][0].Test():
                next(looks)
                continue
            _, then = in_flight.popleft()
            if then is not None:
                then()

    def _requests(self) -> Iterator[tuple[Any, Callable[[], None] | None] | None]:
        """Starts one piece after the other: its request, and what to do when it is done."""
        while True:
            message = self._next()
            if message is None:
                yield None
                continue
            if self._timeline is not None:
                yield self._communicator.Ibarrier(), message.note_start
            *pieces, last = message.pieces(self._piece_bytes)
            for source, target in pieces:
                yield self._communicator.Iallreduce(source, target), None
            yield self._communicator.Iallreduce(*last), partial(self._finish, message)

    def _next(self) -> Message | None:
        with self._changed:
            return self._to_send.popleft() if self._to_send else None

    def _finish(self, message: Message) -> None:
        if self._timeline is not None:
            message.note_end(self._timeline)
        with self._changed:
            message.is_done = True
            self._changed.notify_all()


@cache
def background_allreduce(communicator: Any) -> BackgroundAllreduce:
    """The background allreduce on a communicator of `world.communicator`."""
    return BackgroundAllreduce(communicator)
