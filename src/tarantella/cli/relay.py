"""Passes on what mpiexec and the ranks print, reads their announcements, and acts on them."""

from __future__ import annotations

import fcntl
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from tarantella.cli import caller, console, processes
from tarantella.cli.launcher_messages import LauncherMessages
from tarantella.cli.mpiexec_command import MpiexecCommand
from tarantella.cli.outcome import Outcome
from tarantella.cli.rank_prefix import RankPrefix
from tarantella.cli.run_record import STALL, WARNING, RunRecord
from tarantella.cli.signals import Stopped
from tarantella.cli.stalls import Stalls
from tarantella.cli.streams import Passage, StreamFilter
from tarantella.runtime import times
from tarantella.runtime.announce import (
    ASKS,
    LEAVES,
    PRINTED,
    REPLIES,
    Announcement,
    line_start,
    parse,
)

_PIECE = 1 << 16
_PIPE_SIZE = 1 << 20  # bytes; the most that Linux gives to every user
# No setting of TensorFlow hides these: they come before it has read its settings.
_TENSORFLOW_START_UP = (
    b"WARNING: All log messages before absl::InitializeLog() is called",
    b"I0000 00:00:",
)
# What it prints after the reason when it gives up, as when memory runs out: its C++ functions.
_TENSORFLOW_STACK = (b"*** Check failure stack trace: ***", b"    @     0x")
# What TensorFlow's collectives print on every other rank when a rank has ended: where each line
# begins, and what it has in it.
_COLLECTIVES_ABORT = {
    b"E0000 00:00:": (b"Aborting Ring", b"CollectiveExecutor::StartAbort"),
    b"W0000 00:00:": (b"Local rendezvous is aborting with status: UNAVAILABLE: Collective ops",),
    b"Additional GRPC error information from remote target /job:": (b"",),
    b":UNKNOWN:Error received from peer": (b"",),
    b"The error could be from a previous operation. Restart your program": (b"",),
    b"\t [[{{": (b"{{node Collective",),
}


class OutputRelay:
    """Passes the output of mpiexec on until it ends, and ends the run when a rank has failed.

    Args:
        process: mpiexec
        outcome: is told what becomes of the ranks
        run_id: identifies the run
        command: what mpiexec was started with
        stalls: is told which ranks wait
        record: keeps the warnings
        observers: are told all that ranks announce
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        outcome: Outcome,
        run_id: str,
        command: MpiexecCommand,
        stalls: Stalls,
        record: RunRecord,
        observers: Sequence[Callable[[Announcement], None]] = (),
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._outcome = outcome
        self._stalls = stalls
        self._record = record
        self._observers = observers
        self._run_id = run_id
        self._started = self._looked = time.monotonic()
        self._hosts = dict(enumerate(command.hosts))
        self._has_hosts = command.allocation is not None
        hidden = _TENSORFLOW_START_UP if command.quiet_tensorflow else ()
        stack = _TENSORFLOW_STACK if command.quiet_tensorflow else ()
        self._lines = RankPrefix(self._has_hosts, (*hidden, *stack))
        self._stopping = False
        self._deadline: float | None = None
        self._workers_deadline: float | None = None
        # The launcher passes on what its processes on other hosts say.
        hosts = {*command.hosts, socket.gethostname()}
        messages = LauncherMessages(outcome, hosts, self._is_ending)
        self._filters = {
            1: StreamFilter(messages.in_output()),
            2: self._error_filter(messages, hidden),
        }
        self._selector = selectors.DefaultSelector()
        for descriptor, stream in ((1, process.stdout), (2, process.stderr)):
            _enlarge(stream.fileno())
            self._selector.register(stream, selectors.EVENT_READ, descriptor)

    @property
    def all_started(self) -> bool:
        return self._outcome.all_started

    def stop_after(self, seconds: float) -> None:
        """Stop after this time, even if something has not been shown by then."""
        self._stopping = True
        self._give_up_after(seconds)

    def _give_up_after(self, seconds: float) -> None:
        """Stop waiting for the end of the run after this time, if nothing more comes."""
        if self._deadline is None:
            self._deadline = time.monotonic() + seconds

    def relay(self) -> None:
        """Runs until mpiexec has ended and all output has been shown, or until time is up."""
        while self._selector.get_map():
            ready = self._selector.select(self._timeout())
            for key, _ in ready:
                data = os.read(key.fd, _PIECE)
                self._show(key.data, self._filters[key.data].feed(data))
                if not data:
                    self._selector.unregister(key.fileobj)
            if not ready:
                self._show_held()
            self._check_clock()
            self._end_processes()
            if self._time_is_up() and (self._stopping or not ready):
                break
        self._show_held()
        for descriptor in (1, 2):
            self._show(descriptor, self._lines.finish(descriptor))
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(times.TIME_FOR_WORKERS_TO_END)

    def _check_clock(self) -> None:
        """Tell the outcome what is overdue."""
        now = time.monotonic()
        gap = now - self._looked
        if gap < times.CLOCK_CHECK_INTERVAL:
            return
        self._looked = now
        if gap > times.GAP_OF_STOPPED_COMMAND:  # or nobody has read its output
            self._started += gap
            self._outcome.forgive(gap)
            self._stalls.forgive(gap)
        self._outcome.hear_early_end(times.TIME_TO_END_TOGETHER)
        if (warning := self._stalls.warning()) is not None:
            self._record.note(STALL, warning)
            console.warn(warning)
        if (failure := self._stalls.failure()) is not None:
            self._outcome.hear_stall(failure)
        if self._has_hosts:
            self._outcome.hear_silence(times.HOST_IS_DEAD)
            if now - self._started > times.TIME_TO_START:
                self._outcome.hear_no_start(self._hosts, times.TIME_TO_START)

    def _show_held(self) -> None:
        for descriptor, stream in self._filters.items():
            self._show(descriptor, stream.flush())

    def _timeout(self) -> float:
        waiting = self._deadline or self._workers_deadline
        held = any(stream.holds for stream in self._filters.values())
        return times.OUTPUT_PAUSE if waiting or held else times.CLOCK_CHECK_INTERVAL

    def _time_is_up(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _end_processes(self) -> None:
        """End mpiexec or what ranks leave behind, depending on how far they have come."""
        now = time.monotonic()
        for news in self._outcome.output_of_failed_rank():
            # It belongs next to the message, whichever stream the rank has printed it to.
            self._show(2, self._lines.add(replace(news, stream=2)))
        if self._outcome.failure is not None and self._deadline is None:
            self._give_up_after(times.TIME_FOR_RANKS_TO_END)
            if not self._outcome.all_ended:
                # MPI_Abort or the launcher may do so as well, but not for a rank that fails
                # before MPI has started.
                self._process.send_signal(signal.SIGTERM)
        if self._process.poll() is not None:
            self._give_up_after(times.TIME_FOR_WORKERS_TO_END)
        if self._outcome.all_ended and self._workers_deadline is None:
            self._workers_deadline = now + times.TIME_FOR_WORKERS_TO_END
        if self._workers_deadline is not None and now > self._workers_deadline:
            # The launcher waits for everything that can still print.
            launcher = self._process.pid
            processes.kill_until_gone(lambda: processes.of_run(self._run_id, launcher))
            self._give_up_after(times.TIME_FOR_WORKERS_TO_END)

    def _can_write(self, descriptor: int) -> bool:
        """Whether there is time to write; unless we have to stop, a reader may be slow."""
        if self._deadline is None or not self._stopping:
            return True
        left = max(0.0, self._deadline - time.monotonic())
        return bool(select.select([], [descriptor], [], left)[1])

    def _show(self, descriptor: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and self._can_write(descriptor):
                # If we must not wait, no more than a pipe takes without waiting for its reader.
                some = view[: select.PIPE_BUF] if self._stopping else view
                view = view[os.write(descriptor, some) :]
        except BrokenPipeError:
            if descriptor == 1:
                raise Stopped(signal.SIGPIPE) from None
        except OSError:
            pass  # a terminal that is gone

    def _is_ending(self) -> bool:
        return self._deadline is not None or self._outcome.failure is not None

    def _hear(self, news: Announcement) -> None:
        warned = len(self._outcome.warnings)
        self._outcome.hear(news)
        for warning in self._outcome.warnings[warned:]:
            self._record.note(WARNING, warning)
            if self._stalls.warns:
                console.warn(warning)
        self._stalls.hear(news)
        for hear in self._observers:
            hear(news)
        if news.kind == LEAVES and self._stopping and self._deadline is not None:
            # A rank that uses up its time is then killed, and its announcement has to arrive.
            patience = news.status + times.TIME_FOR_RANKS_TO_END
            self._deadline = max(self._deadline, time.monotonic() + patience)
        if news.kind == ASKS:
            caller.send_piece(self._process, news.status)
        if news.kind == REPLIES:
            caller.tell(news)
        if news.kind == PRINTED:
            self._show(news.stream, self._lines.add(news))

    def _error_filter(self, messages: LauncherMessages, hidden: Sequence[bytes]) -> StreamFilter:
        def announced(line: bytes) -> bytes:
            with suppress(ValueError):  # torn by a launcher
                self._hear(parse(line, self._run_id))
            return b""

        passages = [Passage(line_start(self._run_id), b"\n", announced), *messages.in_errors()]
        passages += [Passage(start, b"\n", lambda _: b"") for start in hidden]
        if hidden:
            passages += [
                Passage(start, b"\n", lambda _: b"", begins_line=True)
                for start in _TENSORFLOW_STACK
            ]
            passages += [
                Passage(start, b"\n", partial(_unless_it_has, texts), begins_line=True)
                for start, texts in _COLLECTIVES_ABORT.items()
            ]
        return StreamFilter(passages)


def _unless_it_has(texts: Sequence[bytes], line: bytes) -> bytes:
    return b"" if any(text in line for text in texts) else line


def _enlarge(pipe: int) -> None:
    """Give a launcher room: Intel MPI's tears lines apart when it finds a pipe full."""
    if sys.platform == "linux":
        with suppress(OSError):  # no more for this user
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
