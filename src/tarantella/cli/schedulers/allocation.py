"""Hosts to run on, and how to run something there: what all schedulers have in common."""

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
    """The hosts of a run, and the way to them.

    Attributes:
        hosts: their names, each once, in the order of the scheduler or the hostfile
        name: what the scheduler is called, in messages
        launcher: what hydra, the mpiexec of MPICH, calls the way to the hosts
        launcher_ignores: variables that would spoil that way
    """

    hosts: tuple[str, ...]

    name: ClassVar[str]
    launcher: ClassVar[str]
    launcher_ignores: ClassVar[tuple[str, ...]] = ()

    @property
    def launcher_options(self) -> tuple[str, ...]:
        """What hydra's command line for the way to the hosts needs in addition."""
        return ()

    @abstractmethod
    def on_host(self, host: str, command: Sequence[str], seconds: int) -> list[str]:
        """The command line that runs a command on one of the hosts.

        The command gets its words as they are, and has our standard streams. Nobody is ever asked
        for a password.

        Args:
            host: One of the hosts.
            command: What to run there.
            seconds: For how long to try to reach the host, as far as the scheduler lets us say so.
        """

    def is_over(self, said: str) -> bool:
        """Whether the hosts are not ours any more, by what a command line of `on_host` has said.

        The scheduler then ends by itself what still runs there.
        """
        return False

    def launcher_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """This environment, changed so that hydra's mpiexec reaches all that is ours on the hosts.

        The ranks get it as well, and so do without what is ignored.
        """
        options = " ".join(filter(None, [environ.get(_EXTRA_OPTIONS), *self.launcher_options]))
        kept = {name: value for name, value in environ.items() if name not in self.launcher_ignores}
        return {**kept, _EXTRA_OPTIONS: options} if options else kept


def each_once(names: Iterable[str]) -> tuple[str, ...]:
    """The names, in the order in which they come first."""
    return tuple(dict.fromkeys(names))


def read_hosts(variable: str, file: str) -> tuple[str, ...]:
    """The hosts in a file that a scheduler has written, with a line for every core or rank."""
    try:
        hosts = each_once(Path(file).read_text().split())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text"
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
