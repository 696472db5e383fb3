"""No scheduler: hosts that the user has named, reached by ssh."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tarantella.cli.schedulers.allocation import Allocation, each_once

# Whoever would have to be asked for a password or about an unknown host is told so instead.
_NO_QUESTIONS = ("-o", "BatchMode=yes")


@dataclass(frozen=True)
class Ssh(Allocation):
    """Hosts that are reached by ssh.

    Attributes:
        program: ssh, or what the user has instead
    """

    program: str = "ssh"

    name = "ssh"
    launcher = "ssh"

    @property
    def launcher_options(self) -> tuple[str, ...]:
        return _NO_QUESTIONS

    @classmethod
    def to(cls, hosts: Sequence[str], environ: Mapping[str, str]) -> Ssh:
        """The way to these hosts for a process with this environment."""
        return cls(each_once(hosts), ssh_program(environ))

    def on_host(self, host: str, command: Sequence[str], seconds: int) -> list[str]:
        limit = ("-o", f"ConnectTimeout={seconds}")
        quoted = shlex.join(command)  # for the shell over there
        return [self.program, "-x", *_NO_QUESTIONS, *limit, "--", host, quoted]


def ssh_program(environ: Mapping[str, str]) -> str:
    """What hydra would run in this environment."""
    return environ.get("HYDRA_LAUNCHER_EXEC") or "ssh"
