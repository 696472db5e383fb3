"""From a plan to what is run: the environment of the ranks, and the command line of mpiexec."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from tarantella.cli.mpi import Mpiexec
from tarantella.cli.options import Options
from tarantella.cli.plan import Plan
from tarantella.runtime import configuration as variables
from tarantella.runtime import entry
from tarantella.runtime.colons import escaped

TENSORFLOW_LOG = "TF_CPP_MIN_LOG_LEVEL"


@dataclass(frozen=True)
class Launch:
    """How the ranks are started.

    Attributes:
        command: the command line
        environment: the variables that are added to the environment for it, in order
        ranks: how many ranks it starts
        quiet_tensorflow: hide what TensorFlow says on its way up, and would say on every rank
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    ranks: int
    quiet_tensorflow: bool = True


def make_launch(
    plan: Plan,
    options: Options,
    mpiexec: Mpiexec,
    environ: Mapping[str, str],
    terminal: bool = False,
) -> Launch:
    """What starts the ranks of a plan from a process with this environment.

    Args:
        plan: The ranks.
        options: What the user has asked for.
        mpiexec: What starts them.
        environ: The environment of this process.
        terminal: Whether what they print is shown by a terminal.
    """
    supervised = [sys.executable, "-I", "-S", entry.__file__, "supervisor"]
    command = mpiexec.command(len(plan.ranks), supervised + escaped(_program(options)))
    user_decides = TENSORFLOW_LOG in environ or TENSORFLOW_LOG in dict(options.environment)
    return Launch(
        tuple(command),
        _environment(plan, options, environ, terminal),
        len(plan.ranks),
        quiet_tensorflow=not user_decides,
    )


def _program(options: Options) -> list[str]:
    """The command line of one rank."""
    if options.interpreter == ():
        return list(options.program)
    interpreter = options.interpreter or (sys.executable,)
    return [*interpreter, entry.__file__, "script", *options.program]


def _environment(
    plan: Plan, options: Options, environ: Mapping[str, str], terminal: bool
) -> dict[str, str]:
    added: dict[str, str] = {}
    if terminal and variables.TERMINAL not in environ:
        added[variables.TERMINAL] = "true"  # between it and the ranks there are pipes
    if options.log_level is not None:
        added[variables.LOG_LEVEL] = options.log_level
    if options.log_on_all_devices:
        added[variables.LOG_ON_ALL_DEVICES] = "true"
    if options.output_on_all_devices:
        added[variables.OUTPUT_ON_ALL_DEVICES] = "true"
    if options.fusion_threshold_kb is not None:
        added[variables.FUSION_THRESHOLD] = str(options.fusion_threshold_kb)
    if plan.uses_gpus:
        added[variables.GPUS] = ",".join(str(rank.gpu) for rank in plan.ranks)
    else:
        added[variables.NO_GPU] = "true"
    if len(plan.ranks) > 1:
        added[variables.THREADS] = str(min(rank.threads for rank in plan.ranks))
    if TENSORFLOW_LOG not in environ:
        added[TENSORFLOW_LOG] = "1"  # once is too often to be told how it was built
    for name, value in options.environment:
        added.pop(name, None)  # the order is that of the command line, and the last one counts
        added[name] = value
    return added
