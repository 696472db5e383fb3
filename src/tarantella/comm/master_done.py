"""The master does something for all ranks, such as saving a file, and reports how it went.

The master waits for no rank; the others wait for its report. It also reports what it does without
them, as in `if tnt.is_master_rank(): model.save(...)`, and no rank takes that report. So a rank has
to find the report that is meant for it. Three things help:

- the subject: what was done, and to what;
- the time: how many barriers the master had passed. All ranks count alike, so a rank ignores
  reports that are older than its own time;
- a message when the master reaches the next barrier. After it, no report of that time will come: a
  rank then takes one about another object, because a path may differ between ranks (the time of
  day, a temporary folder).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tarantella.comm import waiting
from tarantella.comm.thread_communicators import all_communicators
from tarantella.errors import MismatchError
from tarantella.runtime import messages, watch, world

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Subject:
    """What a report is about.

    Attributes:
        action: what was done, as in "save"
        thing: what it was done to, such as a path
    """

    action: str
    thing: str


@dataclass(frozen=True)
class _Report:
    time: int  # barriers before
    subject: Subject | None  # None: the master is at the next barrier, or has failed
    problem: bytes | None = None

    def packed(self) -> np.ndarray:
        subject = None if self.subject is None else [self.subject.action, self.subject.thing]
        problem = None if self.problem is None else self.problem.decode()
        return messages.packed([self.time, subject, problem])

    @classmethod
    def unpacked(cls, data: bytearray) -> _Report:
        time, subject, problem = messages.unpacked(data)
        return cls(
            time,
            None if subject is None else Subject(*subject),
            None if problem is None else problem.encode(),
        )


# The master's last message: there is nothing more to receive.
_END = _Report(-1, None)


def done_by_master(subject: Subject, action: Callable[[], None]) -> None:
    """Lets the master do something; all ranks return, or raise the master's error.

    The master does it whether or not the others call this; they wait for it.
    """
    if world.get_size() == 1:
        action()
    elif not world.is_master_rank():
        _reports().wait_for(subject)
    else:
        try:
            action()
        except Exception as error:
            _reports().send(subject, messages.packed_error(error))
            raise
        _reports().send(subject, None)


def report_failure(error: Exception) -> None:
    """Tells the ranks that wait for the master that it failed before it got there.

    It must be about to enter a barrier, as they will when they receive this.
    """
    if world.is_master_rank():
        _reports().send(None, messages.packed_error(error))


def drain() -> None:
    """Receives all messages that are left: there must be none when MPI ends.

    Every rank must call it, last of all.
    """
    if world.get_size() > 1:
        for communicators in all_communicators():
            _drop_unread(communicators["data"])  # of steps that were announced, and not taken
            _reports_of(communicators).drain()


class _Reports:
    """The reports on one communicator.

    Args:
        communicator: One that nobody else uses.
    """

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self._lock = threading.Lock()
        # On the master
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []
        self._reports_next_barrier = False
        # On the others
        self._received: list[_Report] = []
        self._master_left = -1  # the time that the master has left last, as far as is known

    def send(self, subject: Subject | None, problem: bytes | None) -> None:
        with self._lock:
            if subject is not None and not self._reports_next_barrier:
                self._reports_next_barrier = True
                waiting.before_next_barrier(self._communicator, self._report_next_barrier)
            self._send(_Report(waiting.barrier_count(self._communicator), subject, problem))

    def _report_next_barrier(self) -> None:
        with self._lock:
            self._reports_next_barrier = False
            self._send(_Report(waiting.barrier_count(self._communicator), None))

    def _send(self, report: _Report) -> None:
        self._sent[:] = [(request, data) for request, data in self._sent if not request.Test()]
        data = report.packed()
        for rank in range(world.get_size()):
            if rank != world.get_master_rank():
                self._sent.append((self._communicator.Isend(data, rank), data))

    def wait_for(self, subject: Subject) -> None:
        """Returns, or raises, what the master reports on a subject."""
        in_order = waiting.in_common_order()
        since = waiting.barrier_count(self._communicator) if in_order else 0
        report = None
        with watch.waiting(self._communicator.purpose):
            pauses = waiting.pauses()
            while report is None:
                next(pauses)
                with self._lock:
                    self._receive()
                    report = self._take(subject, since, in_order)
        if report.problem is not None:
            raise messages.unpacked_error(report.problem)

    def _receive(self) -> None:
        """Receives what has arrived."""
        while (report := self._next()) is not None:
            if report.subject is None and report.problem is None:
                self._master_left = max(self._master_left, report.time)
            else:
                self._received.append(report)

    def _next(self) -> _Report | None:
        """The next report, if one has arrived."""
        data = _next_message(self._communicator)
        return None if data is None else _Report.unpacked(data)

    def _take(self, subject: Subject, since: int, in_order: bool) -> _Report | None:
        recent = [each for each in self._received if each.time >= since]
        exact = [
            each
            for each in recent
            if each.subject == subject or (each.subject is None and in_order)
        ]
        if not exact and in_order and self._master_left >= since:
            exact = [
                each for each in recent if each.subject and each.subject.action == subject.action
            ]
            if not exact:
                raise MismatchError(
                    f"`{subject.action}` of {subject.thing} was called on rank "
                    f"{world.get_rank()}, but not on the master rank, which has moved on: call it "
                    "on all ranks, or on the master alone."
                )
        if not exact:
            return None
        # This rank has taken those for its earlier calls; nobody waits for the rest of them.
        self._received[:] = [
            each for each in self._received if each.subject != subject or each.time >= since
        ]
        self._received.remove(exact[0])
        return exact[0]

    def drain(self) -> None:
        """Receives all reports; every rank must call it."""
        if world.is_master_rank():
            with self._lock:
                self._send(_END)
                for request, _ in self._sent:
                    waiting.wait_polling(request, None)
            return
        pauses = waiting.pauses()
        while (last := self._next()) != _END:
            if last is None:
                next(pauses)


_by_communicators: dict[world.Communicators, _Reports] = {}


def _reports() -> _Reports:
    return _reports_of(world.communicators())


def _reports_of(communicators: world.Communicators) -> _Reports:
    return _by_communicators.setdefault(communicators, _Reports(communicators["reports"]))


def _drop_unread(communicator: Any) -> None:
    """Receives the messages that have arrived; every rank must call it."""
    # Nobody sends any more then, and most of it has arrived.
    waiting.wait_polling(communicator.Ibarrier(), None)
    while _next_message(communicator) is not None:
        pass


def _next_message(communicator: Any) -> bytearray | None:
    """The next message on a communicator, if one has arrived."""
    from mpi4py import MPI

    status = MPI.Status()
    message = communicator.Improbe(status=status)
    if message is None:
        return None
    data = bytearray(status.Get_count(MPI.BYTE))
    message.Recv(data)
    return data
