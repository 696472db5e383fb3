"""Starts the program of a rank, waits until it ends, and tells the command how it ended.

No MPI launcher says reliably which rank ended, and why: with a status, by a signal, or by an
`os._exit` that left the others waiting. The parent of a process always knows. It reports before
it ends itself, so before the launcher can end the other ranks: the first bad news is the cause.

What the master rank prints goes to the launcher untouched. What other ranks print is held, and
shown only if they fail; or, with `TNT_OUTPUT_ON_ALL_DEVICES`, announced to the command, which shows
it with the rank in front of each line.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tarantella.errors import InputError
from tarantella.launch import binding, lost_connection, mpiexec_quoting
from tarantella.launch.mpi_leftovers import remove_leftovers
from tarantella.launch.process_identity import identity
from tarantella.launch.rank_output import RankOutput
from tarantella.runtime import launcher, memory, times
from tarantella.runtime.announce import (
    ALIVE,
    CALLER,
    ENDED,
    FAILED,
    HEARTBEAT,
    LEAVES,
    RESTARTS,
    RESUMED,
    SHORT_OF_MEMORY,
    STARTED,
    STOPPED,
    Announcement,
    announce,
)
from tarantella.runtime.configuration import configuration
from tarantella.runtime.failure import BAD_INPUT

NOT_STARTED = 127  # the status that shells give to a program that cannot be started
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
              signal.SIGUSR2, signal.SIGCONT)  # fmt: skip
_UNKNOWN_ERROR = 14  # Open MPI's MPI_ERR_UNKNOWN
_PIECE = 1 << 16
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run a program with its arguments as the rank; returns its exit status."""
    rank = launcher.rank_by_launcher()
    host = socket.gethostname()
    parent = os.getpid()
    started = time.monotonic()
    kills = memory.oom_kills()
    die_with(os.getppid(), signal.SIGTERM)
    try:
        command = binding.bound(mpiexec_quoting.unescaped(arguments), rank, configuration())
        kept = _file_for_output(rank)
    except (InputError, OSError) as error:
        announce(Announcement(FAILED, rank, host, parent, status=BAD_INPUT, cause=str(error)))
        return BAD_INPUT
    is_open = _is_open(rank)
    pipes = [] if is_open and not configuration().output_dir else [os.pipe(), os.pipe()]
    # A signal that ended us before we handle it would leave behind what the rank has started.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _become(command, rank, host, parent, [writing for _, writing in pipes])
    for _, writing in pipes:
        os.close(writing)
    output = RankOutput(rank, host, pid, is_open, kept)
    program = _Program(pid, rank, host, [reading for reading, _ in pipes], output)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    announce(Announcement(STARTED, rank, host, parent, launcher=identity(os.getppid())))
    status = program.wait()
    signal.alarm(0)
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_IGN)  # too late: the status must still be returned
    if shortage := memory.shortage_at_end(status, kills):
        announce(Announcement(SHORT_OF_MEMORY, rank, host, pid, cause=shortage))
    cause = "it was asked to" if program.was_asked_to_end else _lost_peer(status)
    announce(Announcement(ENDED, rank, host, pid, status=status, cause=cause))
    if status != 0:
        # A scheduler loses track of what the rank has started once the rank is gone.
        _send(-pid, signal.SIGKILL)
    if os.environ.get(HEARTBEAT) and launcher.is_open_mpi():
        time.sleep(times.TIME_TO_READ_BEFORE_END)
    if program.was_asked_to_end:
        # A scheduler may have asked, and let nobody else reach this host afterwards.
        remove_leftovers(time.monotonic() - started)
    return status if status >= 0 else 128 - status


def _lost_peer(status: int) -> str:
    """The cause, if Open MPI has ended a rank because it lost its connection to another one."""
    return (
        "it lost its connection to another rank"
        if status == _UNKNOWN_ERROR and launcher.is_open_mpi()
        else ""
    )


def _file_for_output(rank: int) -> int | None:
    """The file for all that a rank prints, if it is kept."""
    if not configuration().output_dir:
        return None
    folder = Path(configuration().output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    # A restarted run adds to the file.
    begin = 0 if int(os.environ.get(RESTARTS) or 0) else os.O_TRUNC
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | begin
    return os.open(folder / f"rank-{rank}.txt", flags, 0o666)


def _is_open(rank: int) -> bool:
    """Whether what this rank prints is shown unchanged."""
    launch = launcher.find_launch()
    alone = launch is None or launch.size == 1
    return alone or (rank == 0 and not configuration().output_on_all_devices)


def _become(command: list[str], rank: int, host: str, parent: int, pipes: list[int]) -> NoReturn:
    errors = os.dup(2)  # which the command listens to
    try:
        # A group of its own: a signal to the supervisor's group comes once, forwarded by the
        # supervisor; and what the rank starts can be ended with it.
        os.setpgid(0, 0)
        die_with(parent, signal.SIGKILL)
        # A shell script that has started us with & has it ignored.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if rank != 0 or CALLER not in os.environ:  # `tnt.run` sends the master rank a function
            # mpiexec gives some ranks an input that never ends: reading it would block forever.
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, pipe in enumerate(pipes, 1):
            os.dup2(pipe, stream)
        os.execvp(command[0], command)
    except OSError as error:
        cause = f"cannot start {command[0]}: {error.strerror}"
        news = Announcement(FAILED, rank, host, os.getpid(), status=NOT_STARTED, cause=cause)
        announce(news, errors)
    os._exit(NOT_STARTED)


def die_with(parent: int, number: int) -> None:
    """Have the kernel, if it is Linux, send this process a signal when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(NOT_STARTED)


class _Program:
    """The running program of a rank: forwards its output, and signals to it, until it ends.

    Args:
        pid: its process
        rank: its rank
        host: the name of this host
        pipes: where its output and its errors come from; none if they go to the launcher directly
        output: what becomes of them
    """

    def __init__(
        self, pid: int, rank: int, host: str, pipes: list[int], output: RankOutput
    ) -> None:
        self._pid = pid
        self._rank = rank
        self._host = host
        self._started = time.monotonic()
        self._status: int | None = None
        self.was_asked_to_end = False
        self._needs_time = False
        self._output = output
        self._heartbeat = float(os.environ.get(HEARTBEAT) or 0) or None
        self._selector = selectors.DefaultSelector()
        for stream, pipe in enumerate(pipes, 1):
            os.set_blocking(pipe, False)
            self._selector.register(pipe, selectors.EVENT_READ, stream)
        self._watch_signals()

    def wait(self) -> int:
        """Wait for the end; returns the exit status, or the number of a signal, negated."""
        next_beat = time.monotonic() + (self._heartbeat or 0)
        self._check_program()  # it may have ended before we handled signals
        while self._status is None:
            pause = None if self._heartbeat is None else max(0.0, next_beat - time.monotonic())
            for key, _ in self._selector.select(pause):
                self._read(key.fd, key.data)
            self._check_program()
            if self._needs_time:
                self._needs_time = False
                self._tell(LEAVES, configuration().grace_seconds)
            if self._heartbeat is not None and time.monotonic() >= next_beat:
                next_beat += self._heartbeat
                self._send_heartbeat()
        for key in list(self._selector.get_map().values()):
            self._read(key.fd, key.data, to_the_end=True)
        if self._status != 0 and not self.was_asked_to_end:
            self._output.announce_tail()
        return self._status

    def _check_program(self) -> None:
        """Notice the end of the program, and announce when a signal stops or resumes it."""
        with suppress(ChildProcessError):
            while self._status is None:
                pid, status = os.waitpid(self._pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
                if not pid:
                    return
                if os.WIFSTOPPED(status):
                    self._tell(STOPPED, os.WSTOPSIG(status))
                elif os.WIFCONTINUED(status):
                    self._tell(RESUMED)
                else:
                    self._status = os.waitstatus_to_exitcode(status)

    def _tell(self, kind: str, status: int = 0) -> None:
        announce(Announcement(kind, self._rank, self._host, self._pid, status))

    def _send_heartbeat(self) -> None:
        announce(Announcement(ALIVE, self._rank, self._host, os.getpid()))
        if lost_connection.is_cut_off(os.getppid()):
            # Nobody can tell us to end any more, and nobody waits for us.
            _clean_up_after(os.getppid(), time.monotonic() - self._started)
            self.was_asked_to_end = True
            _send(self._pid, signal.SIGKILL)
            _send(os.getppid(), signal.SIGTERM)

    def _read(self, pipe: int, stream: int, to_the_end: bool = False) -> None:
        while True:
            try:
                data = os.read(pipe, _PIECE)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(pipe)
                return
            if stream:  # the other one only says that a signal has come
                self._output.add(stream, data)
            if not to_the_end:
                return

    def _watch_signals(self) -> None:
        """Makes signals wake up the loop, and forwards them to the program."""
        reading, writing = os.pipe()
        for pipe in (reading, writing):
            os.set_blocking(pipe, False)
        self._selector.register(reading, selectors.EVENT_READ, 0)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

        def forward(number: int, _: FrameType | None) -> None:
            self._end(number)

        for number in (*_FORWARDED, signal.SIGALRM):
            signal.signal(number, forward)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only wakes up the loop

    def _end(self, number: int) -> None:
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self.was_asked_to_end = True
        if number == signal.SIGTERM:
            self._needs_time = _catches(self._pid, number)
            grace = configuration().grace_seconds if self._needs_time else 0
            signal.alarm(max(grace, times.TIME_FROM_TERM_TO_KILL))
        _send(self._pid, signal.SIGKILL if number == signal.SIGALRM else number)


def _clean_up_after(launcher_pid: int, seconds: float) -> None:
    """Lets another process remove what the launcher on this host leaves: it may end us first.

    Args:
        launcher_pid: the launcher's process on this host
        seconds: the age of the run
    """
    supervisor = os.getpid()
    if os.fork():
        return
    os.setsid()
    for number in (*_FORWARDED, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    deadline = time.monotonic() + times.TIME_TO_END_CUT_OFF
    while time.monotonic() < deadline and any(map(_is_there, (launcher_pid, supervisor))):
        time.sleep(times.CUT_OFF_CHECK_INTERVAL)
    time.sleep(times.CUT_OFF_CHECK_INTERVAL)
    remove_leftovers(seconds + times.TIME_TO_END_CUT_OFF)
    os._exit(0)


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _catches(pid: int, number: int) -> bool:
    """Whether a program handles a signal; False where the system does not tell."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "SigCgt":
                return bool(int(value, 16) >> (number - 1) & 1)
    return False


def _send(pid: int, number: int) -> None:
    """Send a signal to a process, or to a group of them if the number is negative."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
