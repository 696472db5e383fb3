"""The command `tarantella`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from tarantella.cli.description import describe
from tarantella.cli.host import this_host
from tarantella.cli.launch import make_launch
from tarantella.cli.mpi import describe_mpiexec, environment_without_run, find_mpiexec
from tarantella.cli.options import parse
from tarantella.cli.plan import Plan, make_plan
from tarantella.cli.run import run
from tarantella.errors import InputError
from tarantella.runtime.configuration import LOG_LEVELS, read_configuration

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
    except BrokenPipeError:  # `tarantella --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _BROKEN_PIPE
    return status


def _main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    settings = read_configuration(os.environ)
    options = replace(options, no_gpu=options.no_gpu or settings.no_gpu)
    environ = environment_without_run(os.environ)
    plan = make_plan(options, [this_host()])
    mpiexec = describe_mpiexec(find_mpiexec())
    launch = make_launch(plan, options, mpiexec, environ, terminal=os.isatty(1))
    _warn(plan, options.log_level or settings.log_level)
    if options.dry_run:
        os.write(1, os.fsencode(describe(plan, launch)))
        return 0
    return run(launch, environ)


def _warn(plan: Plan, level: str) -> None:
    if LOG_LEVELS.index(level) <= LOG_LEVELS.index("WARNING"):
        for warning in plan.warnings:
            print(f"tarantella WARNING: {warning}", file=sys.stderr, flush=True)


def _open_standard_streams() -> None:
    """Put /dev/null where a standard stream is closed, or a pipe would get its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
