"""Runs mpiexec, carries home what the ranks print, and sees to it that everything ends."""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from tarantella.cli import processes
from tarantella.cli.launcher_messages import LauncherWords
from tarantella.cli.mpiexec_command import Launch
from tarantella.cli.outcome import Outcome
from tarantella.cli.rank_prefix import MarkedLines
from tarantella.cli.remote import ask_all, send_to_group
from tarantella.cli.schedulers import Allocation
from tarantella.cli.signals import Stopped, Stops
from tarantella.cli.stalls import Stalls
from tarantella.cli.streams import Passage, StreamFilter
from tarantella.cli.sweep import SWEEP
from tarantella.launch.mpi_leftovers import remove_leftovers
from tarantella.launch.supervisor import HEARTBEAT, die_with
from tarantella.runtime import times
from tarantella.runtime.announce import LEAVES, PRINTED, RUN_ID, Announcement, mark, parse
from tarantella.runtime.configuration import read_configuration

_PIECE = 1 << 16
_ROOM = 1 << 20  # bytes; the most that Linux gives to everybody
# No setting of TensorFlow's hides these, as they come before it has read its settings.
_TENSORFLOW_START_UP = (
    b"WARNING: All log messages before absl::InitializeLog() is called",
    b"I0000 00:00:",
)


@dataclass(frozen=True)
class Mark:
    """By which the processes and files of a run are known, also if it is started several times.

    Attributes:
        run_id: what its processes have in their environment
        began: when it was started first
    """

    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    began: float = field(default_factory=time.monotonic)


def run(launch: Launch, environ: Mapping[str, str], stops: Stops, run_mark: Mark) -> int:
    """Start the ranks and wait for their end; returns the exit status for the command."""
    settings = read_configuration({**environ, **launch.environment})
    shows_warnings = settings.log_level != "ERROR"
    stalls = Stalls(dict(enumerate(launch.hosts)), settings.stall_seconds, shows_warnings)
    run_id = run_mark.run_id
    command = os.getpid()
    stops.disarm()
    process = subprocess.Popen(
        launch.command,
        env={**environ, **launch.environment, **_marks(launch, run_id)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,  # Ctrl+C comes to us alone
        preexec_fn=lambda: die_with(command, signal.SIGTERM),
    )
    outcome = Outcome(len(launch.hosts), launch.runs_script)
    carrier = _Carrier(process, outcome, run_id, launch, stalls)
    status = None
    try:
        stops.arm()
        carrier.carry()
    except Stopped as stopped:
        stops.note(stopped.number)
        status = _stop(stopped.number, process, carrier, stops)
    finally:
        stops.disarm()
        _kill(process, run_id)
        failure = outcome.end(process.wait())
        if launch.allocation is not None or status is not None or failure is not None:
            age = time.monotonic() - run_mark.began
            _sweep(launch.allocation, run_id, outcome.launchers, age)
    if status is not None:
        return status
    if failure is None:
        return 0
    say(outcome.message())
    return failure.status


def _marks(launch: Launch, run_id: str) -> dict[str, str]:
    """The variables by which the processes of a run are known, to themselves and to others."""
    marks = {
        RUN_ID: run_id,
        processes.SCRIPT: launch.script,
        processes.COMMAND: str(os.getpid()),
    }
    return marks if launch.allocation is None else marks | {HEARTBEAT: str(times.HEARTBEAT)}


def _stop(number: int, process: subprocess.Popen[bytes], carrier: _Carrier, stops: Stops) -> int:
    """Ask all ranks to end, as the signal has asked us, and give them a little time for it."""
    carrier.stop_after(times.TIME_FOR_RANKS_TO_END)
    with suppress(ProcessLookupError, Stopped):  # whoever asks twice does not want to wait
        stops.arm_again()
        # Intel MPI's launcher may hang on SIGTERM while it starts, and leave something behind.
        gently = number == signal.SIGINT or not carrier.all_started
        process.send_signal(signal.SIGINT if gently else signal.SIGTERM)
        carrier.carry()
    if number != signal.SIGPIPE:
        say(f"ended by {signal.Signals(number).name}; all ranks were ended.")
    return 128 + number


def _kill(process: subprocess.Popen[bytes], run_id: str) -> None:
    """Leave nothing of the run behind on this machine."""
    send_to_group(process, signal.SIGKILL)
    processes.kill_until_gone(lambda: processes.of_run(run_id))
    process.wait()


def _sweep(
    allocation: Allocation | None, run_id: str, launchers: Mapping[str, list[str]], seconds: float
) -> None:
    """Leave nothing behind on any host: of a run that was ended, or of children of ranks."""
    remove_leftovers(seconds)
    if allocation is None:
        return
    question = {
        "run_id": run_id,
        "launchers": launchers,  # they do not have the mark of the run on other hosts
        "action": "kill",
        "seconds": seconds,
    }
    for host, answer in ask_all(allocation, SWEEP, question, times.TIME_TO_SWEEP_HOSTS).items():
        if answer.content is None and not allocation.is_over(answer.errors):
            say(f"host {host} could not be asked to end what may still run there.")


class _Carrier:
    """Carries the output of mpiexec to ours until it ends, and ends the run when a rank failed."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        outcome: Outcome,
        run_id: str,
        launch: Launch,
        stalls: Stalls,
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._outcome = outcome
        self._stalls = stalls
        self._run_id = run_id
        self._started = self._looked = time.monotonic()
        self._hosts = dict(enumerate(launch.hosts))
        self._has_hosts = launch.allocation is not None
        hidden = _TENSORFLOW_START_UP if launch.quiet_tensorflow else ()
        self._lines = MarkedLines(self._has_hosts, hidden)
        self._stopping = False
        self._deadline: float | None = None
        self._workers_deadline: float | None = None
        # The hosts of the master rank, whose words are shown, and of the launcher.
        hosts = (launch.hosts[0], socket.gethostname())
        words = LauncherWords(outcome, hosts, self._is_ending)
        self._filters = {
            1: StreamFilter(words.in_output()),
            2: self._error_filter(words, hidden),
        }
        self._selector = selectors.DefaultSelector()
        for descriptor, stream in ((1, process.stdout), (2, process.stderr)):
            _enlarge(stream.fileno())
            self._selector.register(stream, selectors.EVENT_READ, descriptor)

    @property
    def all_started(self) -> bool:
        return self._outcome.all_started

    def stop_after(self, seconds: float) -> None:
        """Stop after this time, whatever has not been shown by then."""
        self._stopping = True
        self._give_up_after(seconds)

    def _give_up_after(self, seconds: float) -> None:
        """Stop waiting for the end of the run after this time, if nothing comes any more."""
        if self._deadline is None:
            self._deadline = time.monotonic() + seconds

    def carry(self) -> None:
        """Until mpiexec has ended and all output has been shown, or until time is up."""
        while self._selector.get_map():
            ready = self._selector.select(self._timeout())
            for key, _ in ready:
                data = os.read(key.fd, _PIECE)
                self._show(key.data, self._filters[key.data].feed(data))
                if not data:
                    self._selector.unregister(key.fileobj)
            if not ready:
                self._show_held()
            self._look_at_clock()
            self._look_after()
            if self._time_is_up() and (self._stopping or not ready):
                break
        self._show_held()
        for descriptor in (1, 2):
            self._show(descriptor, self._lines.finish(descriptor))
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(times.TIME_FOR_WORKERS_TO_END)

    def _look_at_clock(self) -> None:
        """Have the outcome hear of what has not happened for too long."""
        now = time.monotonic()
        gap = now - self._looked
        if gap < times.LOOK_AT_CLOCK:
            return
        self._looked = now
        if gap > times.GAP_OF_STOPPED_COMMAND:  # or nobody has read its output
            self._started += gap
            self._outcome.forgive(gap)
            self._stalls.forgive(gap)
        self._outcome.hear_early_end(times.TIME_TO_END_TOGETHER)
        if (warning := self._stalls.warning()) is not None:
            say(warning, "tarantella WARNING: ")
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
        return times.OUTPUT_PAUSE if waiting or held else times.LOOK_AT_CLOCK

    def _time_is_up(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _look_after(self) -> None:
        """End what has to end, as far as the ranks and mpiexec have come."""
        now = time.monotonic()
        for news in self._outcome.last_words():
            # Its place is beside the message, wherever the rank has printed it.
            self._show(2, self._lines.add(replace(news, stream=2)))
        if self._outcome.failure is not None and self._deadline is None:
            self._give_up_after(times.TIME_FOR_RANKS_TO_END)
            if not self._outcome.all_ended:
                # MPI_Abort or the launcher may do so as well; a rank that fails before MPI has
                # started is of no interest to them.
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
        """Whether there is time to write; if we do not have to stop, a reader may take his."""
        if self._deadline is None or not self._stopping:
            return True
        left = max(0.0, self._deadline - time.monotonic())
        return bool(select.select([], [descriptor], [], left)[1])

    def _show(self, descriptor: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and self._can_write(descriptor):
                # No more than a pipe takes without waiting for its reader, if we must not wait.
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
        self._outcome.hear(news)
        self._stalls.hear(news)
        if news.kind == LEAVES and self._stopping and self._deadline is not None:
            # The last of a rank's time is not the last of ours: it is killed then.
            patience = news.status + times.TIME_FOR_RANKS_TO_END
            self._deadline = max(self._deadline, time.monotonic() + patience)
        if news.kind == PRINTED:
            self._show(news.stream, self._lines.add(news))

    def _error_filter(self, words: LauncherWords, hidden: Sequence[bytes]) -> StreamFilter:
        def announced(line: bytes) -> bytes:
            with suppress(ValueError):  # torn, by a launcher
                self._hear(parse(line, self._run_id))
            return b""

        passages = [Passage(mark(self._run_id), b"\n", announced), *words.in_errors()]
        passages += [Passage(start, b"\n", lambda _: b"") for start in hidden]
        return StreamFilter(passages)


def _enlarge(pipe: int) -> None:
    """Give a launcher room: Intel MPI's tears lines apart when it finds a pipe full."""
    if sys.platform == "linux":
        with suppress(OSError):  # no more for this user
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _ROOM)


def say(text: str, start: str = "tarantella: ") -> None:
    with suppress(OSError):
        os.write(2, f"{start}{text}\n".encode(errors="replace"))
