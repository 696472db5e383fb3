"""The schedulers of clusters, and which of them has given us hosts.

A new scheduler is a file here, with a class that is an `Allocation` and has a `find`, and its entry
in `SCHEDULERS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tarantella.cli.schedulers.allocation import Allocation
from tarantella.cli.schedulers.lsf import Lsf
from tarantella.cli.schedulers.pbs import Pbs
from tarantella.cli.schedulers.slurm import Slurm
from tarantella.cli.schedulers.ssh import Ssh

__all__ = ["ADDRESS_VARIABLES", "SCHEDULERS", "Allocation", "Ssh", "find_allocation"]

SCHEDULERS: tuple[type[Allocation], ...] = (Slurm, Pbs, Lsf)

# The variables that tell a program on a host the address from which it was started.
_ALL: tuple[type[Allocation], ...] = (Ssh, *SCHEDULERS)
ADDRESS_VARIABLES = tuple(
    dict.fromkeys(kind.address_variable for kind in _ALL if kind.address_variable)
)


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The hosts that a scheduler has given to a process with this environment, if one has."""
    found = (scheduler.find(environ) for scheduler in SCHEDULERS)
    return next((allocation for allocation in found if allocation is not None), None)
