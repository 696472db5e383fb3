"""The plan in words, for `--dry-run`."""

from __future__ import annotations

import shlex

from tarantella.cli.host import Host, format_list
from tarantella.cli.mpiexec_command import MpiexecCommand
from tarantella.cli.plan import Plan, Rank


def describe(plan: Plan, command: MpiexecCommand) -> str:
    """Hosts and ranks, the variables that are added, and a command line to paste into a shell."""
    lines: list[str] = []
    if command.allocation is not None:
        lines += [
            "The hosts were not checked: they are assumed to be like this machine, with as many",
            "GPUs as ranks if --n-per-node is given.",
        ]
    for host in plan.hosts:
        lines.append(f"host {host.name}: {_count(len(host.cores), 'core')}, {_gpus(host)}")
        lines += [f"  rank {rank.number}: {_devices(rank, host)}" for rank in plan.ranks_of(host)]
    variables = [shlex.quote(f"{name}={value}") for name, value in command.environment.items()]
    lines += ["environment:", *(f"  {variable}" for variable in variables)]
    if command.not_on_master:
        others = [shlex.quote(f"{name}={value}") for name, value in command.not_on_master.items()]
        lines += [
            "environment of ranks other than the master, which opens the run of a tracker:",
            *(f"  {variable}" for variable in others),
        ]
    lines += ["command:", "  " + " ".join(["env", *variables, shlex.join(command.argv)])]
    return "\n".join(lines) + "\n"


def _gpus(host: Host) -> str:
    return _count(len(host.gpus), "GPU") if host.gpus else "no GPU"


def _devices(rank: Rank, host: Host) -> str:
    device = "CPU" if rank.gpu is None else f"GPU {rank.gpu} ({host.gpus[rank.gpu].name})"
    cores = ("core " if len(rank.cores) == 1 else "cores ") + format_list(rank.cores)
    return f"{device}, {cores}, {_count(rank.threads, 'thread')}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
