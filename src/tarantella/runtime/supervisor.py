"""Starts the program of a rank, waits for its end, and tells the command how it ended.

No MPI launcher says reliably which rank ended, and by what: a status, a signal, or an `os._exit`
that left the others waiting. The parent of a process always knows. It tells before it ends itself,
so before the launcher can take the other ranks down: the first bad news is the cause.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from tarantella.runtime import colons, launcher
from tarantella.runtime.announce import ENDED, FAILED, STARTED, Announcement, announce

NOT_STARTED = 127  # the status that shells give to a program that cannot be started
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
              signal.SIGUSR2, signal.SIGCONT)  # fmt: skip
_TIME_TO_LEAVE = 3  # seconds from SIGTERM to SIGKILL
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run a program with its arguments as the rank; returns its exit status."""
    command = colons.unescaped(arguments)
    rank = launcher.rank_by_launcher()
    host = socket.gethostname()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(command, rank, host, parent)
    _pass_signals_on(pid)
    announce(Announcement(STARTED, rank, host, parent))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_IGN)  # too late: the end of this process is its status
    announce(Announcement(ENDED, rank, host, pid, status=status))
    return status if status >= 0 else 128 - status


def _become(command: list[str], rank: int, host: str, parent: int) -> NoReturn:
    try:
        # A group of its own: a signal to the supervisor's group comes once, passed on from there.
        os.setpgid(0, 0)
        _die_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored if a script has started us with &
        # mpiexec gives some ranks an input that never ends: reading it would wait for ever.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(command[0], command)
    except OSError as error:
        cause = f"cannot start {command[0]}: {error.strerror}"
        announce(Announcement(FAILED, rank, host, os.getpid(), status=NOT_STARTED, cause=cause))
    os._exit(NOT_STARTED)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is killed, where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(NOT_STARTED)


def _pass_signals_on(pid: int) -> None:
    def pass_on(number: int, _: FrameType | None) -> None:
        if number == signal.SIGTERM:
            signal.alarm(_TIME_TO_LEAVE)
        _send(pid, signal.SIGKILL if number == signal.SIGALRM else number)

    for number in (*_PASSED_ON, signal.SIGALRM):
        signal.signal(number, pass_on)


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
