"""PBS Pro, OpenPBS and Torque: hosts in a file, reached by ssh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tarantella.cli.schedulers.allocation import read_hosts
from tarantella.cli.schedulers.ssh import Ssh, ssh_program

_VARIABLE = "PBS_NODEFILE"


@dataclass(frozen=True)
class Pbs(Ssh):
    """The hosts of a PBS job."""

    name = "PBS"

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> Pbs | None:
        """The allocation that a process with this environment is in, if any."""
        file = environ.get(_VARIABLE)
        return cls(read_hosts(_VARIABLE, file), ssh_program(environ)) if file else None
