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

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tarantella.comm import waiting
from tarantella.errors import MismatchError
from tarantella.runtime import world

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


# What the master says last: there is nothing more to receive.
_END = _Notice(-1, None)

_lock = threading.Lock()
_sent: list[MPI.Request] = []
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
            _tell(subject, packed(error))
            raise
        _tell(subject, None)


def packed(error: Exception) -> bytes:
    """An error for another rank; one that cannot travel is replaced by another with its text."""
    try:
        data = pickle.dumps(error)
        arrived = pickle.loads(data)
        if type(arrived) is type(error) and str(arrived) == str(error):
            return data
    except Exception:  # a class of the user's may raise anything
        pass
    return pickle.dumps(RuntimeError(str(error)))


def unpacked(data: bytes) -> Exception:
    """The error that another rank has packed."""
    error = pickle.loads(data)
    assert isinstance(error, Exception)
    return error


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
            _send(_Notice(waiting.meetings(), None, packed(error)))


def _tell_of_leaving() -> None:
    global _says_when_it_leaves
    with _lock:
        if _says_when_it_leaves:
            _says_when_it_leaves = False
            _send(_Notice(waiting.meetings(), None))


def _send(notice: _Notice) -> None:
    comm = world.communicator("notices")
    _sent[:] = [request for request in _sent if not request.Test()]
    for rank in range(world.get_size()):
        if rank != world.get_master_rank():
            _sent.append(comm.isend(notice, rank))


# The others


def _await(subject: Subject) -> None:
    # Other threads than the main one are at no point that the ranks have in common.
    in_order = threading.current_thread() is threading.main_thread()
    since = waiting.meetings() if in_order else 0
    pauses = waiting.pauses()
    while True:
        with _lock:
            _listen()
            notice = _take(subject, since, in_order)
        if notice is not None:
            break
        next(pauses)
    if notice.problem is not None:
        raise unpacked(notice.problem)


def _listen() -> None:
    """Receives what has come."""
    global _left
    comm = world.communicator("notices")
    while (message := comm.improbe(world.get_master_rank())) is not None:
        notice: _Notice = message.recv()
        if notice.subject is None and notice.problem is None:
            _left = max(_left, notice.time)
        else:
            _heard.append(notice)


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
    comm = world.communicator("notices")
    if world.is_master_rank():
        with _lock:
            _send(_END)
            for request in _sent:
                waiting.wait_aside(request)
        return
    pauses = waiting.pauses()
    last: Any = None
    while last != _END:
        message = comm.improbe(world.get_master_rank())
        if message is None:
            next(pauses)
        else:
            last = message.recv()
