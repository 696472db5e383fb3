"""Hosts to run on, and how to start a command there: what all schedulers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tarantella.errors import InputError

_EXTRA_OPTIONS = "HYDRA_LAUNCHER_EXTRA_ARGS"


@dataclass(frozen=True)
class Allocation(ABC):
    """The hosts of a run, and how to reach them.

    Attributes:
        hosts: their names, each once, in the order of the scheduler or the hostfile
        name: what the scheduler is called, in messages
        launcher: the value of the option `-launcher` of hydra, the mpiexec of MPICH
        launcher_ignores: variables that would mislead it
        address_variable: the variable that tells a program on a host from which address it was
            started there, if there is one
    """

    hosts: tuple[str, ...]

    name: ClassVar[str]
    launcher: ClassVar[str]
    launcher_ignores: ClassVar[tuple[str, ...]] = ()
    address_variable: ClassVar[str] = ""

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> Allocation | None:
        """The hosts that a scheduler has given to a process with this environment, if it has."""
        return None

    @property
    def launcher_options(self) -> tuple[str, ...]:
        """Additional options for the command by which hydra reaches the hosts."""
        return ()

    @abstractmethod
    def on_host(self, host: str, command: Sequence[str], seconds: int) -> list[str]:
        """The command line that runs a command on one of the hosts.

        The command gets its arguments unchanged, and has our standard streams. It never asks for
        a password.

        Args:
            host: One of the hosts.
            command: What to run there.
            seconds: For how long to try to reach the host, if the scheduler lets us choose.
        """

    def is_over(self, said: str) -> bool:
        """Whether the job is over, by what a command line of `on_host` has printed.

        Then the scheduler itself ends what still runs on the hosts.
        """
        return False

    def launcher_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment for hydra's mpiexec, so that it can use all of the job on the hosts.

        The ranks inherit it, without the variables that would mislead the launcher.
        """
        options = " ".join(filter(None, [environ.get(_EXTRA_OPTIONS), *self.launcher_options]))
        kept = {name: value for name, value in environ.items() if name not in self.launcher_ignores}
        return {**kept, _EXTRA_OPTIONS: options} if options else kept


def each_once(names: Iterable[str]) -> tuple[str, ...]:
    """The names, in the order in which they come first."""
    return tuple(dict.fromkeys(names))


def read_hosts(variable: str, file: str) -> tuple[str, ...]:
    """The hosts in a file of a scheduler, which has a line for every core or rank."""
    try:
        hosts = each_once(Path(file).read_text().split())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise InputError(
            f"The hosts of this job should be in the file {file} that {variable} names, but it "
            f"cannot be read ({reason}): name them with --hostfile."
        ) from None
    if not hosts:
        raise InputError(
            f"The hosts of this job should be in the file {file} that {variable} names, but it is "
            "empty: name them with --hostfile."
        )
    return hosts
