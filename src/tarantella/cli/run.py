"""Starts mpiexec, waits until the run has ended, and leaves nothing of it behind."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tarantella.cli import caller, console, processes
from tarantella.cli.gpu_shortage import reminders_of_ranks
from tarantella.cli.host_cleanup import HOST_CLEANUP
from tarantella.cli.mpiexec_command import MpiexecCommand
from tarantella.cli.outcome import Outcome
from tarantella.cli.relay import OutputRelay
from tarantella.cli.remote import ask_all, send_to_group
from tarantella.cli.run_record import RunRecord
from tarantella.cli.schedulers import Allocation
from tarantella.cli.signals import Stopped, StopSignals
from tarantella.cli.stalls import Stalls
from tarantella.launch.mpi_leftovers import remove_leftovers
from tarantella.launch.supervisor import die_with
from tarantella.runtime import times
from tarantella.runtime.announce import HEARTBEAT, RUN_ID, Announcement
from tarantella.runtime.configuration import read_configuration


@dataclass(frozen=True)
class RunIdentity:
    """Identifies the processes and files of a run, also after restarts.

    Attributes:
        run_id: the value of a variable that all its processes have
        began: when it was first started
    """

    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    began: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class RunEnd:
    """How a run has ended.

    Attributes:
        status: the exit status for the command
        message: what failed; empty if nothing did, or if the user knows already
        reminders: what the user should know about it
    """

    status: int
    message: str = ""
    reminders: tuple[str, ...] = ()


def run(
    command: MpiexecCommand,
    environ: Mapping[str, str],
    stop_signals: StopSignals,
    identity: RunIdentity,
    record: RunRecord,
    observers: Sequence[Callable[[Announcement], None]] = (),
) -> RunEnd:
    """Start the ranks and wait until they end.

    Args:
        command: what starts them
        environ: the environment to start them in
        stop_signals: says when they have to end
        identity: of the run
        record: what is kept of it
        observers: are told all that ranks announce
    """
    settings = read_configuration({**environ, **command.environment})
    shows_warnings = settings.log_level != "ERROR"
    stalls = Stalls(dict(enumerate(command.hosts)), settings.stall_seconds, shows_warnings)
    own_pid = os.getpid()
    stop_signals.disarm()
    process = subprocess.Popen(
        command.argv,
        env={**environ, **command.environment, **_run_variables(command, identity)},
        stdin=subprocess.PIPE if caller.is_there() else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,  # Ctrl+C comes to us alone
        preexec_fn=lambda: die_with(own_pid, signal.SIGTERM),
    )
    outcome = Outcome(len(command.hosts), command.runs_script)
    relay = OutputRelay(process, outcome, identity.run_id, command, stalls, record, observers)
    status = None
    try:
        stop_signals.arm()
        relay.relay()
    except Stopped as stopped:
        stop_signals.record(stopped.number)
        status = _stop(stopped.number, process, relay, stop_signals)
    finally:
        stop_signals.disarm()
        _kill(process, identity.run_id)
        failure = outcome.end(process.wait())
        if command.allocation is not None or status is not None or failure is not None:
            _clean_up_hosts(command.allocation, identity, outcome.launchers)
    reminders = (*reminders_of_ranks(outcome.on_cpu), *outcome.warnings)
    if status is not None:
        return RunEnd(status, reminders=reminders)
    if failure is None:
        return RunEnd(0, reminders=reminders)
    caller.tell_failure(failure, outcome.message())
    return RunEnd(failure.status, outcome.message(), reminders)


def _run_variables(command: MpiexecCommand, identity: RunIdentity) -> dict[str, str]:
    """The variables that tell the processes of a run from others."""
    variables = {
        RUN_ID: identity.run_id,
        processes.SCRIPT: command.script,
        processes.COMMAND: str(os.getpid()),
    }
    if command.allocation is not None:
        variables[HEARTBEAT] = str(times.TIME_BETWEEN_HEARTBEATS)
    return variables


def _stop(
    number: int,
    process: subprocess.Popen[bytes],
    relay: OutputRelay,
    stop_signals: StopSignals,
) -> int:
    """Ask all ranks to end, as the signal has asked us, and give them a little time for it."""
    relay.stop_after(times.TIME_FOR_RANKS_TO_END)
    with suppress(ProcessLookupError, Stopped):  # a second signal: do not wait
        stop_signals.arm_again()
        # Intel MPI's launcher may hang on SIGTERM while it starts, and leave something behind.
        gently = number == signal.SIGINT or not relay.all_started
        process.send_signal(signal.SIGINT if gently else signal.SIGTERM)
        relay.relay()
    if number != signal.SIGPIPE:
        console.show(f"ended by {signal.Signals(number).name}; all ranks were ended.")
    return 128 + number


def _kill(process: subprocess.Popen[bytes], run_id: str) -> None:
    """Leave no process of the run behind on this machine."""
    send_to_group(process, signal.SIGKILL)
    processes.kill_until_gone(lambda: processes.of_run(run_id))
    process.wait()


def _clean_up_hosts(
    allocation: Allocation | None, identity: RunIdentity, launchers: Mapping[str, list[str]]
) -> None:
    """Leave nothing behind on any host, neither files nor processes that ranks have started."""
    age = time.monotonic() - identity.began
    remove_leftovers(age)
    if allocation is None:
        return
    question = {
        "run_id": identity.run_id,
        "launchers": launchers,  # on other hosts, they do not have the variables of the run
        "action": "kill",
        "seconds": age,
    }
    for host, answer in ask_all(
        allocation, HOST_CLEANUP, question, times.TIME_TO_CLEAN_UP_HOSTS
    ).items():
        if answer.content is None and not allocation.is_over(answer.errors):
            console.show(
                f"processes may still be running on host {host}, which cannot be reached: once it "
                "can, end them with `tarantella --cleanup` and the same script."
            )
