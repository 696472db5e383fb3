"""No scheduler: hosts that the user names, reached by ssh."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tarantella.cli.schedulers.allocation import Allocation, each_once

# ssh fails instead of asking for a password, or about an unknown host.
_NO_QUESTIONS = ("-o", "BatchMode=yes")


@dataclass(frozen=True)
class Ssh(Allocation):
    """Hosts that are reached by ssh.

    Attributes:
        program: ssh, or what the user has set instead
    """

    program: str = "ssh"

    name = "ssh"
    launcher = "ssh"
    address_variable = "SSH_CONNECTION"

    @property
    def launcher_options(self) -> tuple[str, ...]:
        return _NO_QUESTIONS

    @classmethod
    def to(cls, hosts: Sequence[str], environ: Mapping[str, str]) -> Ssh:
        """These hosts, for a process with this environment."""
        return cls(each_once(hosts), ssh_program(environ))

    def on_host(self, host: str, command: Sequence[str], seconds: int) -> list[str]:
        limit = ("-o", f"ConnectTimeout={seconds}")
        quoted = shlex.join(command)  # for the shell on that host
        return [self.program, "-x", *_NO_QUESTIONS, *limit, "--", host, quoted]


def ssh_program(environ: Mapping[str, str]) -> str:
    """What hydra would run in this environment."""
    return environ.get("HYDRA_LAUNCHER_EXEC") or "ssh"
