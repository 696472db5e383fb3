"""What the environment says about how this process was started.

Every MPI launcher sets variables for the processes that it starts. They tell a rank of a parallel
run from a plain `python script.py` without initializing MPI. Ranks, supervisors and the command
read them. Standard library only, because supervisors never import the package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_OPEN_MPI = "Open MPI"
MPI_VARIABLES = (
    # launcher, variable with the rank, variable with the number of ranks
    (_OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI (MPICH, Intel MPI or Slurm)", "PMI_RANK", "PMI_SIZE"),
    ("PMIx", "PMIX_RANK", ""),
)
RANK_PROCESS = "TNT_RANK_PROCESS"


@dataclass(frozen=True)
class Launch:
    """A start of this process by an MPI launcher, as far as the environment tells."""

    launcher: str
    rank: int | None
    size: int | None


def find_launch(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """The launch this process is part of; None for a plain, serial start."""
    for launcher, rank, size in MPI_VARIABLES:
        if rank in environ or size in environ:
            return Launch(launcher, _number(environ, rank), _number(environ, size))
    # Slurm sets its variables for a single task too, and in the shell of an allocation: only a
    # step of several tasks is a parallel start.
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks is not None and tasks > 1:
        return Launch("Slurm", _number(environ, "SLURM_PROCID"), tasks)
    return None


def is_open_mpi() -> bool:
    """Whether Open MPI has started this process."""
    launch = find_launch()
    return launch is not None and launch.launcher == _OPEN_MPI


def rank_by_launcher() -> int:
    """The rank that the launcher gave to this process; 0 in a serial run."""
    launch = find_launch()
    return 0 if launch is None or launch.rank is None else launch.rank


def rank_of_parent(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Rank and size of the rank that started this process; None if no rank did.

    A process that a rank starts (a data worker, another program) inherits the launcher's
    variables, but it is not a rank, and it must not touch MPI.
    """
    pid, _, numbers = environ.get(RANK_PROCESS, "").partition(":")
    if not pid.isdigit() or int(pid) == os.getpid():
        return None
    rank, _, size = numbers.partition("/")
    return int(rank), int(size)


def declare_rank(rank: int, size: int) -> None:
    """Tells the processes that this rank starts that they are not ranks."""
    os.environ[RANK_PROCESS] = f"{os.getpid()}:{rank}/{size}"


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdigit() else None


def is_command() -> bool:
    """Whether this process is the `tarantella` command, and not a rank."""
    return Path(sys.argv[0]).name == "tarantella" or "tarantella.cli" in sys.orig_argv[1:3]
