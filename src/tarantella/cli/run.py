"""Runs mpiexec, carries home what the ranks print, and sees to it that everything ends."""

from __future__ import annotations

import ctypes
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

from tarantella.cli.launch import Launch
from tarantella.cli.outcome import Outcome
from tarantella.cli.streams import Passage, StreamFilter
from tarantella.cli.survivors import kill_processes
from tarantella.runtime.announce import RUN_ID, mark, parse

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TIME_TO_LEAVE = 5.0  # seconds for ranks that were asked to end
_TIME_FOR_WORKERS = 2.0  # seconds for processes that outlive the ranks that started them
_PAUSE = 0.1  # seconds without output after which nothing is held back any longer
_LOOK = 1.0  # seconds between looks at mpiexec while nothing happens
_PIECE = 1 << 16
_PR_SET_PDEATHSIG = 1
_TENSORFLOW_START_UP = (
    b"WARNING: All log messages before absl::InitializeLog() is called",
    b"I0000 00:00:",
)


class Stopped(BaseException):
    """A signal asks the command to end, or nobody reads its output any more."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run(launch: Launch, environ: Mapping[str, str]) -> int:
    """Start the ranks and wait for their end; returns the exit status for the command."""
    run_id = secrets.token_hex(8)
    with _stop_signals() as stops:
        process = subprocess.Popen(
            launch.command,
            env={**environ, **launch.environment, RUN_ID: run_id},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl+C comes to us alone
            preexec_fn=_end_with_parent,
        )
        outcome = Outcome(launch.ranks)
        carrier = _Carrier(process, outcome, run_id, launch.quiet_tensorflow)
        try:
            stops.arm()
            carrier.carry()
        except Stopped as stopped:
            return _stop(stopped.number, process, carrier)
        finally:
            stops.disarm()
            _kill(process, run_id)
        failure = outcome.end(process.wait())
    if failure is None:
        return 0
    _say(outcome.message())
    return failure.status


def _stop(number: int, process: subprocess.Popen[bytes], carrier: _Carrier) -> int:
    """Ask all ranks to end, as the signal has asked us, and give them a little time for it."""
    carrier.give_up_after(_TIME_TO_LEAVE)
    with suppress(ProcessLookupError, Stopped):  # whoever asks twice does not want to wait
        process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        carrier.carry()
    if number != signal.SIGPIPE:
        _say(f"ended by {signal.Signals(number).name}; all ranks were ended.")
    return 128 + number


def _kill(process: subprocess.Popen[bytes], run_id: str) -> None:
    """Leave nothing of the run behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    kill_processes(run_id)
    process.wait()


class _Carrier:
    """Carries the output of mpiexec to ours until it ends, and ends the run when a rank failed."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        outcome: Outcome,
        run_id: str,
        quiet_tensorflow: bool,
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._outcome = outcome
        self._run_id = run_id
        self._deadline: float | None = None
        self._workers_deadline: float | None = None
        self._filters = {1: self._output_filter(), 2: self._error_filter(quiet_tensorflow)}
        self._selector = selectors.DefaultSelector()
        self._selector.register(process.stdout, selectors.EVENT_READ, 1)
        self._selector.register(process.stderr, selectors.EVENT_READ, 2)

    def give_up_after(self, seconds: float) -> None:
        """Stop waiting for the end of the run after this time."""
        if self._deadline is None:
            self._deadline = time.monotonic() + seconds

    def carry(self) -> None:
        """Until mpiexec has ended and all output has been shown, or until time is up."""
        while self._selector.get_map() and not self._time_is_up():
            ready = self._selector.select(self._timeout())
            for key, _ in ready:
                data = os.read(key.fd, _PIECE)
                self._show(key.data, self._filters[key.data].feed(data))
                if not data:
                    self._selector.unregister(key.fileobj)
            if not ready:
                self._show_held()
            self._look_after()
        self._show_held()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_TIME_FOR_WORKERS)

    def _show_held(self) -> None:
        for descriptor, stream in self._filters.items():
            self._show(descriptor, stream.flush())

    def _timeout(self) -> float:
        waiting = self._deadline or self._workers_deadline
        held = any(stream.holds for stream in self._filters.values())
        return _PAUSE if waiting or held else _LOOK

    def _time_is_up(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _look_after(self) -> None:
        """End what has to end, as far as the ranks and mpiexec have come."""
        now = time.monotonic()
        if self._outcome.failure is not None and self._deadline is None:
            self.give_up_after(_TIME_TO_LEAVE)
            if not self._outcome.all_ended:
                # MPI_Abort or the launcher may do so as well; a rank that fails before MPI has
                # started is of no interest to them.
                self._process.send_signal(signal.SIGTERM)
        if self._process.poll() is not None:
            self.give_up_after(_TIME_FOR_WORKERS)
        if self._outcome.all_ended and self._workers_deadline is None:
            self._workers_deadline = now + _TIME_FOR_WORKERS
        if self._workers_deadline is not None and now > self._workers_deadline:
            # The launcher waits for everything that can still print.
            kill_processes(self._run_id, except_launcher=self._process.pid)
            self.give_up_after(_TIME_FOR_WORKERS)

    def _show(self, descriptor: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(descriptor, view) :]
        except BrokenPipeError:
            if descriptor == 1:
                raise Stopped(signal.SIGPIPE) from None
        except OSError:
            pass  # a terminal that is gone

    def _said_by_launcher(self, line: bytes) -> bytes:
        """Its words while a run goes down confuse; before that they may be all we have."""
        return line if self._deadline is None else b""

    def _output_filter(self) -> StreamFilter:
        def taken(banner: bytes) -> bytes:
            self._outcome.hear_bad_termination(banner)
            return b""

        start = b"\n" + b"=" * 83 + b"\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
        return StreamFilter(
            [
                Passage(start, b"debugging suggestions\n", taken),
                Passage(b"[mpiexec@", b"\n", self._said_by_launcher),
            ]
        )

    def _error_filter(self, quiet_tensorflow: bool) -> StreamFilter:
        def announced(line: bytes) -> bytes:
            self._outcome.hear(parse(line, self._run_id))
            return b""

        def aborted(line: bytes) -> bytes:
            if b"application called MPI_Abort" not in line:
                return line
            self._outcome.hear_abort(line)
            return b""

        passages = [
            Passage(mark(self._run_id), b"\n", announced),
            Passage(b"Abort(", b"\n", aborted),
            Passage(b"[mpiexec@", b"\n", self._said_by_launcher),
            Passage(b"[proxy:", b"\n", self._said_by_launcher),
        ]
        if quiet_tensorflow:
            # No setting of TensorFlow's hides these, as they come before it has read its settings.
            passages += [Passage(start, b"\n", lambda _: b"") for start in _TENSORFLOW_START_UP]
        return StreamFilter(passages)


class _Stops:
    """Turns the signals that ask us to end into an exception, once there is something to end."""

    def __init__(self) -> None:
        self._armed = False
        self._came: int | None = None

    def arm(self) -> None:
        self._armed = True
        if self._came is not None:
            raise Stopped(self._came)

    def disarm(self) -> None:
        self._armed = False

    def take(self, number: int, _: FrameType | None) -> None:
        self._came = number
        if self._armed:
            raise Stopped(number)


@contextmanager
def _stop_signals() -> Iterator[_Stops]:
    stops = _Stops()
    before = {number: signal.getsignal(number) for number in _STOPS}
    for number, action in before.items():
        # A command started by nohup outlives its terminal. But SIGINT is ignored in whatever a
        # shell script starts with &, and there it can only have been sent on purpose.
        if number != signal.SIGHUP or action is not signal.SIG_IGN:
            signal.signal(number, stops.take)
    try:
        yield stops
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _end_with_parent() -> None:
    """Have the kernel end mpiexec, and it the ranks, when we are killed, where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"tarantella: {text}\n".encode(errors="replace"))
