"""The command `tarantella`: from its arguments to its exit status."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tarantella.cli import caller, console
from tarantella.cli.check import (
    Findings,
    check,
    differences,
    find_placement,
    question_for,
    refuse,
    table,
    without_problems,
)
from tarantella.cli.cleanup import clean_up
from tarantella.cli.command_line import parse
from tarantella.cli.completion import completion_script
from tarantella.cli.description import describe, device_of
from tarantella.cli.host import assumed_hosts, this_host
from tarantella.cli.hostfile import read_hostfile
from tarantella.cli.mpi import Placement, environment_without_run, find_mpiexec
from tarantella.cli.mpiexec_command import make_mpiexec_command
from tarantella.cli.network import check_interface, find_interfaces, find_rdma_devices
from tarantella.cli.options import Options
from tarantella.cli.plan import Plan, make_plan
from tarantella.cli.remote import is_here
from tarantella.cli.report.report_file import ReportFile
from tarantella.cli.run import RunEnd, RunIdentity, run
from tarantella.cli.run_record import WARNING, Ranks, RunRecord
from tarantella.cli.schedulers import Allocation, Ssh, find_allocation
from tarantella.cli.signals import Stopped, StopSignals, handled_signals
from tarantella.cli.slow_ranks import SlowRanks
from tarantella.cli.summary import summary
from tarantella.cli.time_left import TimeLeft
from tarantella.errors import InputError
from tarantella.runtime.announce import RESTARTS, Announcement
from tarantella.runtime.configuration import (
    GPU,
    LOG_LEVELS,
    NO_GPU,
    Configuration,
    read_configuration,
)
from tarantella.runtime.failure import BAD_INPUT
from tarantella.runtime.versions import backend_problem

_BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    _open_standard_streams()
    caller.end_with_it()
    try:
        status = _main(sys.argv[1:] if arguments is None else arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except InputError as error:
        if not caller.tell_refusal(error):
            print(f"tarantella: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130
    except Stopped as stopped:
        print(f"tarantella: ended by {signal.Signals(stopped.number).name}.", file=sys.stderr)
        return 128 + stopped.number
    except BrokenPipeError:  # `tarantella --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _BROKEN_PIPE
    return status


def _main(arguments: Sequence[str]) -> int:
    _check_directory()
    options = parse(arguments)
    if options.completion is not None:
        print(completion_script(options.completion), end="")
        return 0
    given = {**dict(options.environment), **options.variables}
    settings = read_configuration({**os.environ, **given})
    options = _with_devices(options, settings, given)
    environ = environment_without_run(os.environ)
    allocation = _allocation(options, environ)
    with handled_signals() as stop_signals:
        stop_signals.arm()
        if options.cleanup:
            here = Ssh.to([socket.gethostname()], environ)
            return clean_up(options, allocation or here, settings.check_seconds)
        _check_backend(options)
        if _shows("WARNING", settings):
            for note in options.notes:
                console.show(note)
        record = RunRecord(
            options.program,
            tuple(arguments),
            files=_files(options, settings),
            function=caller.function_of(options.program),
        )
        report = None
        if options.report:
            report = ReportFile(options.report, record, lambda text: _warn([text], settings))
        return _run_with_restarts(
            options, settings, environ, allocation, stop_signals, record, report
        )


def _run_with_restarts(
    options: Options,
    settings: Configuration,
    environ: dict[str, str],
    allocation: Allocation | None,
    stop_signals: StopSignals,
    record: RunRecord,
    report: ReportFile | None,
) -> int:
    restarts = 0
    identity = RunIdentity()
    reminders: tuple[str, ...] = ()
    try:
        while True:
            environ[RESTARTS] = str(restarts)
            may_lose_hosts = options.allow_fewer_hosts and restarts > 0
            end = _run(
                options,
                settings,
                environ,
                allocation,
                stop_signals,
                may_lose_hosts,
                identity,
                record,
                report,
            )
            reminders = end.reminders
            is_final = end.status in (0, BAD_INPUT) or stop_signals.received
            if is_final or restarts == options.max_restarts:
                break
            console.show(end.message)
            record.note_restart(end.message)
            restarts += 1
            console.show(f"restart {restarts} of {options.max_restarts}.")
            stop_signals.arm()
        record.end(end.message or _stopped(end.status))
        nobody_reads = end.status == _BROKEN_PIPE and not end.message  # `| head`
        is_silent = settings.quiet or options.dry_run or nobody_reads
        if not is_silent and (text := summary(record)):
            console.show(text)
    except BaseException as error:
        by_signal = _stopped(128 + error.number) if isinstance(error, Stopped) else ""
        record.end(by_signal or str(error) or repr(error))
        raise
    finally:
        if report is not None:
            report.finish()
        _warn(reminders, settings)
    if end.message:
        console.show(end.message)  # the last line says what failed
    return end.status


def _run(
    options: Options,
    settings: Configuration,
    environ: dict[str, str],
    allocation: Allocation | None,
    stop_signals: StopSignals,
    may_lose_hosts: bool,
    identity: RunIdentity,
    record: RunRecord,
    report: ReportFile | None,
) -> RunEnd:
    """Plan the ranks and run them once."""
    mpiexec = find_mpiexec({**environ, **dict(options.environment)})
    if allocation is not None:
        environ = allocation.launcher_environment(environ)
    seen_by_ranks = {**environ, **dict(options.environment)}
    if allocation is None:
        _check_this_machine(options)
        plan = make_plan(options, [this_host(seen_by_ranks)])
        placement = Placement(None, plan.counts)
    elif options.dry_run:
        here = this_host(seen_by_ranks)
        if options.gpu and options.ranks_per_host is None and not here.gpus:
            raise InputError(
                "--dry-run contacts no host, and this machine has no GPU to judge them by: say "
                "with --n-per-node how many each of them has."
            )
        gpus = options.ranks_per_host if options.gpu else None
        plan = make_plan(options, assumed_hosts(allocation.hosts, here, gpus))
        plan = replace(plan, warnings=())  # about hosts that nobody has looked at
        wanted = options.network_interface
        interfaces = dict.fromkeys(plan.counts, wanted) if wanted else {}
        placement = Placement(allocation, plan.counts, interfaces)
    else:
        question = question_for(options, str(mpiexec.path), seen_by_ranks)
        findings = check(allocation, question, settings.check_seconds)
        plan, placement = _plan_for(allocation, findings, options, settings, may_lose_hosts)
    command = make_mpiexec_command(
        plan, options, mpiexec, environ, placement, terminal=os.isatty(1)
    )
    told = {event.text for event in record.events if event.kind == WARNING}  # before a restart
    for warning in plan.warnings:
        if warning not in told:
            _warn([warning], settings)
            record.note(WARNING, warning)
    if options.dry_run:
        if report is not None:
            report.check()
        os.write(1, os.fsencode(describe(plan, command)))
        return RunEnd(0)
    if options.output_dir:
        _make_folder(options.output_dir)
    record.begin(_ranks(plan))
    observers = _observers(options, settings, plan, record)
    if report is not None:
        report.write()
    update = report.update if report is not None else None
    end = run(command, environ, stop_signals, identity, record, observers, update)
    return replace(end, reminders=plan.reminders + end.reminders)


def _stopped(status: int) -> str:
    """What a run was ended by, given its exit status; empty if it was not."""
    return f"ended by {signal.Signals(status - 128).name}." if status > 128 else ""


def _ranks(plan: Plan) -> Ranks:
    """The planned ranks, for the record of a run."""
    hosts = {host.name: host for host in plan.hosts}
    return Ranks(
        tuple(rank.host for rank in plan.ranks),
        tuple(device_of(rank, hosts[rank.host]) for rank in plan.ranks),
        () if plan.shares_cores else tuple(len(rank.cores) for rank in plan.ranks),
    )


def _observers(
    options: Options, settings: Configuration, plan: Plan, record: RunRecord
) -> list[Callable[[Announcement], None]]:
    """What listens to the ranks while they run."""

    def warn(text: str) -> None:
        record.note(WARNING, text)
        _warn([text], settings)

    slow_ranks = SlowRanks({rank.number: rank.host for rank in plan.ranks}, warn)
    observers: list[Callable[[Announcement], None]] = [record.hear, slow_ranks.hear]
    if options.progress or (os.isatty(2) and not settings.quiet):
        observers.append(TimeLeft(console.show, always=options.progress).hear)
    return observers


def _files(options: Options, settings: Configuration) -> dict[str, str]:
    """The files that a run is to write, by the options that ask for them."""
    files = {"--timeline": settings.timeline, "--output-dir": settings.output_dir}
    files |= {"--report": options.report}
    return {option: name for option, name in files.items() if name}


def _plan_for(
    allocation: Allocation,
    findings: Findings,
    options: Options,
    settings: Configuration,
    may_lose_hosts: bool,
) -> tuple[Plan, Placement]:
    """The plan for several hosts after they were checked; an InputError if one has a problem."""
    if may_lose_hosts and 0 < len(findings.problems) < len(findings.hosts):
        problems = findings.problems.items()
        _warn((f"The run continues without host {name}: {advice}"
               for name, (_, advice) in problems), settings)  # fmt: skip
        findings = without_problems(findings)
        allocation = replace(allocation, hosts=findings.hosts)
    refuse(findings)
    if _shows("INFO", settings):
        print(table(findings), file=sys.stderr, flush=True)
    plan = make_plan(options, [each.host for each in findings.reports.values()])
    placement = find_placement(allocation, plan.counts, findings, options.network_interface)
    _warn(differences(plan.hosts), settings)
    return plan, placement


def _with_devices(options: Options, settings: Configuration, given: Mapping[str, str]) -> Options:
    """Whether GPUs are asked for; the command line takes precedence over the environment.

    Args:
        options: what is on the command line
        settings: what all variables say
        given: the variables that are set on the command line
    """
    told = read_configuration(given)
    decided = told if told.gpu != told.no_gpu else settings
    if decided.gpu and decided.no_gpu:
        raise InputError(
            f"--gpu and --no-gpu exclude each other, and so do {GPU} and {NO_GPU}: use one of them."
        )
    # What -x says comes last on the ranks.
    if decided.no_gpu and NO_GPU not in dict(options.environment) and settings.gpu_sums == "nccl":
        raise InputError(
            "--gpu-sums nccl needs GPUs, and --no-gpu leaves them out: use one of them."
        )
    return replace(options, gpu=decided.gpu, no_gpu=decided.no_gpu)


def _check_directory() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise InputError(
            f"The working directory cannot be used ({error.strerror}): change to another one."
        ) from None


def _check_backend(options: Options) -> None:
    """Refuse another backend of Keras, as far as it is known before ranks start."""
    problem = backend_problem({**os.environ, **dict(options.environment)})
    if problem and options.runs_script:
        raise InputError(problem)


def _make_folder(name: str) -> None:
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
        if not os.access(name, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise InputError(
            f"--output-dir {name} cannot be used ({error.strerror}): name a folder that you can "
            "write to, or create."
        ) from None


def _check_this_machine(options: Options) -> None:
    """What a check of hosts finds out, for a run on this machine only."""
    if options.pin_memory_to_socket and shutil.which("numactl") is None:
        raise InputError(
            "--pin-memory-to-socket needs the program numactl, which is not on the PATH: install "
            "it, or leave out the option."
        )
    if options.network_interface is not None:
        check_interface(
            "This machine", find_interfaces(), find_rdma_devices(), options.network_interface
        )


def _allocation(options: Options, environ: Mapping[str, str]) -> Allocation | None:
    """The hosts to use; None: this machine only."""
    if options.ranks is not None:
        return None
    if options.hostfile is None:
        found = find_allocation(environ)
    else:
        hosts = read_hostfile(options.hostfile)
        try:
            given = find_allocation(environ)
        except InputError:
            given = None  # the hostfile is the way out
        if given is not None and set(hosts) <= set(given.hosts):
            # The scheduler can reach them, and numbers its hosts in its own order.
            found = replace(given, hosts=tuple(host for host in given.hosts if host in hosts))
        else:
            found = Ssh.to(hosts, environ)
    if found is not None and len(found.hosts) == 1:
        [host] = found.hosts
        if host == socket.gethostname() or (not options.dry_run and is_here(host)):
            return None
    return found


def _warn(warnings: Iterable[str], settings: Configuration) -> None:
    if _shows("WARNING", settings):
        for warning in warnings:
            console.warn(warning)


def _shows(level: str, settings: Configuration) -> bool:
    """Whether messages of a level are shown."""
    return LOG_LEVELS.index(settings.log_level) <= LOG_LEVELS.index(level)


def _open_standard_streams() -> None:
    """Open /dev/null where a standard stream is closed, so that no pipe gets its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
