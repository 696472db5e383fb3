"""Sums over the ranks that go on while the rank computes.

Messages are summed in the order in which they are handed in, which must be the same on all ranks.
MPI moves on only while it is called, so a thread looks after the messages until they have arrived.
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
from tarantella.comm.waiting import expect_meeting, pauses
from tarantella.runtime import times, watch, world
from tarantella.runtime.timeline import Timeline, now, timeline

Array = npt.NDArray[Any]

# Between hosts messages travel in pieces, some at a time: while one is added up, others are on
# their way, also while this thread has to wait for a core. On a link of 1 Gbit/s a message of 16 MB
# on its own uses 2/3 of it, pieces of 256 kB or more use all of it; during a backward pass on the
# same core, 8 MB on their way do better than 1 MB. An allreduce among many ranks takes more rounds,
# and larger pieces.
_PIECE_BYTES = 1 << 20
_PIECES_ON_THEIR_WAY = 8


class Message:
    """A flat array that is being summed.

    Args:
        source: What this rank contributes; the target itself, or another array that nobody changes
            until the sum is there.
        target: Where the sum will be.
        name: What it is called in a timeline.
    """

    def __init__(self, source: Array, target: Array, name: str = "") -> None:
        self.is_done = False
        self._source = source
        self._target = target
        self._name = name
        self._sent = self._met = now()

    def pieces(self, nbytes: int) -> Iterator[tuple[Any, Array]]:
        """What MPI reads and writes, in pieces of so many bytes."""
        from mpi4py import MPI

        step = max(1, nbytes // self._target.itemsize)
        for start in range(0, max(len(self._target), 1), step):
            target = self._target[start : start + step]
            in_place = self._source is self._target
            yield MPI.IN_PLACE if in_place else self._source[start : start + step], target

    def barrier(self) -> None:
        """All ranks have handed it in."""
        self._met = now()

    def note(self, notes: Timeline) -> None:
        """The sum is there."""
        size = self._target.nbytes
        notes.add(self._name, "waiting", self._sent, self._met, bytes=size)
        notes.add(self._name, "reducing", self._met, now(), bytes=size)


class Flow:
    """The messages of one communicator, of which some pieces are on their way at any time.

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
        threading.Thread(target=self._look_after, name="tarantella-flow", daemon=True).start()

    def send(self, message: Message) -> None:
        """Has a message summed, after all that were handed in before."""
        expect_meeting()
        with self._changed:
            self._to_send.append(message)
            self._changed.notify_all()

    def wait(self, message: Message) -> None:
        """Returns when the sum is there."""
        with watch.waiting("gradients"), self._changed:
            while not message.is_done:
                if self._error is not None:
                    raise self._error
                self._changed.wait()

    def _look_after(self) -> None:
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
        """Sums the messages that are there, and those that come meanwhile."""
        started = self._started()
        on_their_way: deque[tuple[Any, Callable[[], None] | None]] = deque()
        looks = pauses(times.LONGEST_PAUSE_FOR_GRADIENTS)
        while True:
            while len(on_their_way) < _PIECES_ON_THEIR_WAY and (one := next(started)) is not None:
                on_their_way.append(one)
            if not on_their_way:
                return
            if not on_their_way[0][0].Test():
                next(looks)
                continue
            _, then = on_their_way.popleft()
            if then is not None:
                then()

    def _started(self) -> Iterator[tuple[Any, Callable[[], None] | None] | None]:
        """Starts one piece after the other: its request, and what to do when it is there."""
        while True:
            message = self._next()
            if message is None:
                yield None
                continue
            if self._timeline is not None:
                yield self._communicator.Ibarrier(), message.barrier
            *pieces, last = message.pieces(self._piece_bytes)
            for source, target in pieces:
                yield self._communicator.Iallreduce(source, target), None
            yield self._communicator.Iallreduce(*last), partial(self._finish, message)

    def _next(self) -> Message | None:
        with self._changed:
            return self._to_send.popleft() if self._to_send else None

    def _finish(self, message: Message) -> None:
        if self._timeline is not None:
            message.note(self._timeline)
        with self._changed:
            message.is_done = True
            self._changed.notify_all()


@cache
def flow(purpose: str) -> Flow:
    """The flow of a communicator, one of `world.PURPOSES`."""
    return Flow(world.communicator(purpose))
