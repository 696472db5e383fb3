"""The command `tarantella`."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tarantella.cli.check import (
    check,
    differences,
    find_way,
    question_for,
    refuse,
    table,
    without_problems,
)
from tarantella.cli.cleanup import clean_up
from tarantella.cli.command_line import parse
from tarantella.cli.description import describe
from tarantella.cli.host import assumed_hosts, this_host
from tarantella.cli.hostfile import read_hostfile
from tarantella.cli.mpi import Way, environment_without_run, find_mpiexec
from tarantella.cli.mpiexec_command import make_launch
from tarantella.cli.network import check_interface, find_interfaces, find_rdma_devices
from tarantella.cli.options import Options
from tarantella.cli.plan import make_plan
from tarantella.cli.remote import is_here
from tarantella.cli.run import Mark, run, say
from tarantella.cli.schedulers import Allocation, Ssh, find_allocation
from tarantella.cli.signals import Stopped, Stops, stop_signals
from tarantella.errors import InputError
from tarantella.runtime.announce import RESTARTS
from tarantella.runtime.configuration import LOG_LEVELS, Configuration, read_configuration

BAD_INPUT = 2
_BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    _open_standard_streams()
    try:
        status = _main(sys.argv[1:] if arguments is None else arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except InputError as error:
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
    given = {**dict(options.environment), **options.variables}
    settings = read_configuration({**os.environ, **given})
    options = replace(options, no_gpu=settings.no_gpu)
    environ = environment_without_run(os.environ)
    allocation = _allocation(options, environ)
    with stop_signals() as stops:
        stops.arm()
        if options.cleanup:
            here = Ssh.to([socket.gethostname()], environ)
            return clean_up(options, allocation or here, settings.check_seconds)
        _warn(options.notes, settings.log_level, "tarantella: ")
        return _run_with_restarts(options, settings, environ, allocation, stops)


def _run_with_restarts(
    options: Options,
    settings: Configuration,
    environ: dict[str, str],
    allocation: Allocation | None,
    stops: Stops,
) -> int:
    restarts = 0
    mark = Mark()
    while True:
        environ[RESTARTS] = str(restarts)
        may_lose_hosts = options.allow_fewer_hosts and restarts > 0
        status = _run(options, settings, environ, allocation, stops, may_lose_hosts, mark)
        if status in (0, BAD_INPUT) or stops.came or restarts == options.max_restarts:
            return status
        restarts += 1
        say(f"restart {restarts} of {options.max_restarts}.")
        stops.arm()


def _run(
    options: Options,
    settings: Configuration,
    environ: dict[str, str],
    allocation: Allocation | None,
    stops: Stops,
    may_lose_hosts: bool,
    mark: Mark,
) -> int:
    mpiexec = find_mpiexec({**environ, **dict(options.environment)})
    if allocation is not None:
        environ = allocation.launcher_environment(environ)
    seen_by_ranks = {**environ, **dict(options.environment)}
    level = settings.log_level
    if allocation is None:
        _check_this_machine(options)
        plan = make_plan(options, [this_host(seen_by_ranks)])
        way = Way(None, plan.counts)
    elif options.dry_run:
        here = this_host(seen_by_ranks)
        plan = make_plan(options, assumed_hosts(allocation.hosts, here, options.ranks_per_host))
        wanted = options.network_interface
        way = Way(allocation, plan.counts, dict.fromkeys(plan.counts, wanted) if wanted else {})
    else:
        question = question_for(options, str(mpiexec.path), seen_by_ranks)
        findings = check(allocation, question, settings.check_seconds)
        if may_lose_hosts and 0 < len(findings.problems) < len(findings.hosts):
            _warn([f"The run goes on without host {name}: {advice}"
                   for name, (_, advice) in findings.problems.items()], level)  # fmt: skip
            findings = without_problems(findings)
            allocation = replace(allocation, hosts=findings.hosts)
        refuse(findings)
        if _shows("INFO", level):
            print(table(findings), file=sys.stderr, flush=True)
        plan = make_plan(options, [each.host for each in findings.reports.values()])
        way = find_way(allocation, plan.counts, findings, options.network_interface)
        _warn(differences(plan.hosts), level)
    launch = make_launch(plan, options, mpiexec, environ, way, terminal=os.isatty(1))
    _warn(plan.warnings, level)
    if options.dry_run:
        os.write(1, os.fsencode(describe(plan, launch)))
        return 0
    if options.output_dir:
        _make_folder(options.output_dir)
    return run(launch, environ, stops, mark)


def _check_directory() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise InputError(
            f"The working directory cannot be used ({error.strerror}): change to another one."
        ) from None


def _make_folder(name: str) -> None:
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
        if not os.access(name, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise InputError(
            f"--output-dir {name} cannot be used ({error.strerror}): name a folder that can be "
            "written to, or made."
        ) from None


def _check_this_machine(options: Options) -> None:
    """What hosts are asked about, for a run on this machine only."""
    if options.pin_memory_to_socket and shutil.which("numactl") is None:
        raise InputError(
            "--pin-memory-to-socket needs the program numactl, which is not on the PATH: install "
            "it, or leave the option out."
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
            # The scheduler knows the way, and counts its hosts in its own order.
            found = replace(given, hosts=tuple(host for host in given.hosts if host in hosts))
        else:
            found = Ssh.to(hosts, environ)
    if found is not None and len(found.hosts) == 1:
        [host] = found.hosts
        if host == socket.gethostname() or (not options.dry_run and is_here(host)):
            return None
    return found


def _warn(warnings: Iterable[str], level: str, start: str = "tarantella WARNING: ") -> None:
    if _shows("WARNING", level):
        for warning in warnings:
            say(warning, start)


def _shows(message: str, level: str) -> bool:
    """Whether messages of a level are shown if this one is asked for."""
    return LOG_LEVELS.index(level) <= LOG_LEVELS.index(message)


def _open_standard_streams() -> None:
    """Put /dev/null where a standard stream is closed, or a pipe would get its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
