"""From a plan to what is run: the command line of mpiexec, and the variables of the ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tarantella.cli.host import format_list
from tarantella.cli.mpi import Mpiexec, Placement
from tarantella.cli.options import Options
from tarantella.cli.plan import Plan, Rank
from tarantella.cli.processes import RUN_VARIABLES
from tarantella.cli.program import identity_of
from tarantella.cli.schedulers import Allocation
from tarantella.launch import entry
from tarantella.launch.mpiexec_quoting import escaped
from tarantella.runtime import configuration as variables
from tarantella.runtime import trackers

TENSORFLOW_LOG = "TF_CPP_MIN_LOG_LEVEL"
LESS_FROM_TENSORFLOW = "1"  # hides how it was built
ALL_FROM_TENSORFLOW = ("", "0")


@dataclass(frozen=True)
class MpiexecCommand:
    """How the ranks are started.

    Attributes:
        argv: the command line
        environment: the variables that are added to the environment, in order
        not_on_master: those that are set on ranks other than the master, by their supervisors
        hosts: the host of each rank
        script: the text that identifies their script
        allocation: the hosts; None: this machine only
        runs_script: whether it is a Python script
        quiet_tensorflow: hide what TensorFlow prints on every rank when it starts, whatever
            its log level; only a user who wants all of its log sees it
    """

    argv: tuple[str, ...]
    environment: dict[str, str]
    not_on_master: dict[str, str]
    hosts: tuple[str, ...]
    script: str
    allocation: Allocation | None = None
    runs_script: bool = True
    quiet_tensorflow: bool = True


def make_mpiexec_command(
    plan: Plan,
    options: Options,
    mpiexec: Mpiexec,
    environ: Mapping[str, str],
    placement: Placement,
    terminal: bool = False,
) -> MpiexecCommand:
    """What starts the ranks of a plan from a process with this environment.

    Args:
        plan: The ranks.
        options: What the user has asked for.
        mpiexec: What starts them.
        environ: The environment of this process.
        placement: Where they run.
        terminal: Whether what they print is shown by a terminal.
    """
    environment = mpiexec.environment(placement, environ) | _environment(
        plan, options, environ, placement.interfaces, terminal
    )
    supervised = [sys.executable, "-I", "-S", entry.__file__, "launch.supervisor"]
    program = supervised + escaped(_program(options))
    tensorflow_log = dict(options.environment).get(
        TENSORFLOW_LOG, environ.get(TENSORFLOW_LOG, LESS_FROM_TENSORFLOW)
    )
    return MpiexecCommand(
        tuple(mpiexec.command(placement, [*{**environ, **environment}, *RUN_VARIABLES], program)),
        environment,
        _not_on_master(plan, {**environ, **environment}),
        tuple(rank.host for rank in plan.ranks),
        identity_of(options),
        placement.allocation,
        runs_script=options.runs_script,
        quiet_tensorflow=tensorflow_log not in ALL_FROM_TENSORFLOW,
    )


def _program(options: Options) -> list[str]:
    """The command line of one rank."""
    if not options.runs_script:
        return list(options.program)
    interpreter = options.interpreter or (sys.executable,)
    flag = ["-m"] if options.module else []
    return [*interpreter, entry.__file__, "launch.script", *flag, *options.program]


def _environment(
    plan: Plan,
    options: Options,
    environ: Mapping[str, str],
    interfaces: Mapping[str, str],
    terminal: bool,
) -> dict[str, str]:
    added: dict[str, str] = {}
    if terminal and variables.TERMINAL not in environ:
        added[variables.TERMINAL] = "true"  # the output of a rank is a pipe
    added |= options.variables
    if plan.uses_gpus:
        added[variables.GPUS] = _by_rank(plan, lambda rank: str(rank.gpu), ",")
        if variables.NO_GPU in environ:
            added[variables.NO_GPU] = "false"  # --gpu takes precedence
    else:
        added[variables.NO_GPU] = "true"
        if variables.GPU in environ:
            added[variables.GPU] = "false"  # --no-gpu takes precedence
    if len(plan.ranks) > 1 and variables.THREADS not in environ:
        added[variables.THREADS] = _by_rank(plan, lambda rank: str(rank.threads), ",")
    shared = max(plan.counts.values()) > 1 and variables.CORES not in environ
    if options.pin_to_socket or (shared and not plan.shares_cores):
        added[variables.CORES] = _by_rank(plan, lambda rank: format_list(rank.cores), ":")
    wanted = options.network_interface is not None
    if interfaces and (wanted or variables.NETWORK_INTERFACE not in environ):
        added[variables.NETWORK_INTERFACE] = _by_rank(plan, lambda rank: interfaces[rank.host], ",")
    if options.pin_memory_to_socket:
        added[variables.MEMORY] = _by_rank(plan, lambda rank: str(rank.domain), ",")
    if TENSORFLOW_LOG not in environ:
        added[TENSORFLOW_LOG] = LESS_FROM_TENSORFLOW
    for name, value in options.environment:
        added.pop(name, None)  # the order is that of the command line, and the last one counts
        added[name] = value
    return added


def _not_on_master(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that one of the other ranks gets, if there are any."""
    settings = variables.read_configuration(environ)
    return trackers.variables_of_rank(1, settings) if len(plan.ranks) > 1 else {}


def _by_rank(plan: Plan, value: Callable[[Rank], str], separator: str) -> str:
    """The values of all ranks; fewer if they repeat from host to host, or are all the same."""
    values = plan.by_rank({rank.number: value(rank) for rank in plan.ranks})
    return separator.join(values if len(set(values)) > 1 else values[:1])
