"""The master tells the other ranks how something went that it does for all, and waits for none.

The others wait for the notice. What the master does without them, as in
`if tnt.is_master_rank(): model.save(...)`, it gives notice of, too, and nobody takes it. So a rank
must find the notice that is meant for it. Three things help:

- the subject: what was done, and to what;
- the time: how often the master had met the others. All ranks count alike, so what a rank waits
  for is not older than itself;
- a mark when the master goes on to meet the others. After it, no notice of that time will come: a
  rank then takes one with another object, for a path may have another name on each rank (the time
  of day, a temporary folder).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tarantella.comm import waiting
from tarantella.errors import MismatchError
from tarantella.runtime import messages, watch, world

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Subject:
    """What a notice is about.

    Attributes:
        action: what was done, as in "save"
        thing: what it was done to, as in a path
    """

    action: str
    thing: str


@dataclass(frozen=True)
class _Notice:
    time: int  # meetings before
    subject: Subject | None  # None: the master goes on to the next meeting, or has failed
    problem: bytes | None = None

    def packed(self) -> np.ndarray:
        subject = None if self.subject is None else [self.subject.action, self.subject.thing]
        problem = None if self.problem is None else self.problem.decode()
        return messages.packed([self.time, subject, problem])

    @classmethod
    def unpacked(cls, data: bytearray) -> _Notice:
        time, subject, problem = messages.unpacked(data)
        return cls(
            time,
            None if subject is None else Subject(*subject),
            None if problem is None else problem.encode(),
        )


# What the master says last: there is nothing more to receive.
_END = _Notice(-1, None)

_lock = threading.Lock()
_sent: list[tuple[MPI.Request, np.ndarray]] = []
_heard: list[_Notice] = []
_left = -1  # the time that the master has left last, as far as this rank has heard
_says_when_it_leaves = False


def done_by_master(subject: Subject, action: Callable[[], None]) -> None:
    """Has the master do something, and returns or raises on all ranks alike.

    The master does it whether or not the others come here; they wait for it.
    """
    if world.get_size() == 1:
        action()
    elif not world.is_master_rank():
        _await(subject)
    else:
        try:
            action()
        except Exception as error:
            _tell(subject, messages.packed_error(error))
            raise
        _tell(subject, None)


# The master


def _tell(subject: Subject, problem: bytes | None) -> None:
    global _says_when_it_leaves
    with _lock:
        if not _says_when_it_leaves:
            _says_when_it_leaves = True
            waiting.before_next_meeting(_tell_of_leaving)
        _send(_Notice(waiting.meetings(), subject, problem))


def tell_of_failure(error: Exception) -> None:
    """Lets those who wait for the master know that it has failed on its way.

    It must be about to meet the others, as they will be when they have heard of it.
    """
    if world.is_master_rank():
        with _lock:
            _send(_Notice(waiting.meetings(), None, messages.packed_error(error)))


def _tell_of_leaving() -> None:
    global _says_when_it_leaves
    with _lock:
        if _says_when_it_leaves:
            _says_when_it_leaves = False
            _send(_Notice(waiting.meetings(), None))


def _send(notice: _Notice) -> None:
    comm = world.communicator("notices")
    _sent[:] = [(request, data) for request, data in _sent if not request.Test()]
    data = notice.packed()
    for rank in range(world.get_size()):
        if rank != world.get_master_rank():
            _sent.append((comm.Isend(data, rank), data))


# The others


def _await(subject: Subject) -> None:
    # Other threads than the main one are at no point that the ranks have in common.
    in_order = waiting.in_main_thread()
    since = waiting.meetings() if in_order else 0
    notice = None
    with watch.waiting("notices"):
        pauses = waiting.pauses()
        while notice is None:
            next(pauses)
            with _lock:
                _listen()
                notice = _take(subject, since, in_order)
    if notice.problem is not None:
        raise messages.unpacked_error(notice.problem)


def _listen() -> None:
    """Receives what has come."""
    global _left
    while (notice := _received()) is not None:
        if notice.subject is None and notice.problem is None:
            _left = max(_left, notice.time)
        else:
            _heard.append(notice)


def _received() -> _Notice | None:
    """The next notice, if one has come."""
    data = _next_message("notices")
    return None if data is None else _Notice.unpacked(data)


def _next_message(purpose: str) -> bytearray | None:
    """The next message of a communicator, if one has come."""
    from mpi4py import MPI

    status = MPI.Status()
    message = world.communicator(purpose).Improbe(status=status)
    if message is None:
        return None
    data = bytearray(status.Get_count(MPI.BYTE))
    message.Recv(data)
    return data


def _take(subject: Subject, since: int, in_order: bool) -> _Notice | None:
    recent = [n for n in _heard if n.time >= since]
    exact = [n for n in recent if n.subject == subject or (n.subject is None and in_order)]
    if not exact and in_order and _left >= since:
        exact = [n for n in recent if n.subject and n.subject.action == subject.action]
        if not exact:
            raise MismatchError(
                f"`{subject.action}` of {subject.thing} was called on rank {world.get_rank()}, "
                "but not on the master rank, which has gone on: call it on all ranks, or on the "
                "master alone."
            )
    if not exact:
        return None
    # What was for an earlier call of this rank, it has taken; the rest of that nobody waits for.
    _heard[:] = [n for n in _heard if n.subject != subject or n.time >= since]
    _heard.remove(exact[0])
    return exact[0]


def settle() -> None:
    """Receives all that nobody has asked for: MPI wants no message to be left when it ends.

    Every rank must call it, last of all.
    """
    if world.get_size() == 1:
        return
    _drop_unread("data")  # of steps that were announced, and not taken
    if world.is_master_rank():
        with _lock:
            _send(_END)
            for request, _ in _sent:
                waiting.wait_aside(request, None)
        return
    pauses = waiting.pauses()
    while (last := _received()) != _END:
        if last is None:
            next(pauses)


def _drop_unread(purpose: str) -> None:
    """Receives the messages of a communicator that have come; every rank must call it."""
    # Nobody sends any more then, and most of it has come.
    waiting.wait_aside(world.communicator(purpose).Ibarrier(), None)
    while _next_message(purpose) is not None:
        pass
