"""The plan in words, for `--dry-run`."""

from __future__ import annotations

import shlex

from tarantella.cli.host import Host, format_list
from tarantella.cli.mpiexec_command import MpiexecCommand
from tarantella.cli.plan import Plan, Rank
from tarantella.runtime.words import count


def describe(plan: Plan, command: MpiexecCommand) -> str:
    """Hosts and ranks, the variables that are added, and a command line to paste into a shell."""
    lines: list[str] = []
    if command.allocation is not None:
        lines += [
            "The hosts were not checked: they are assumed to be like this machine. If they have",
            "GPUs and this machine does not, use --gpu and --n-per-node.",
        ]
    for host in plan.hosts:
        lines.append(f"host {host.name}: {count(len(host.cores), 'core')}, {_gpus(host)}")
        lines += [f"  rank {rank.number}: {_devices(rank, host)}" for rank in plan.ranks_of(host)]
    variables = [shlex.quote(f"{name}={value}") for name, value in command.environment.items()]
    lines += ["environment:", *(f"  {variable}" for variable in variables)]
    lines += ["command:", "  " + " ".join(["env", *variables, shlex.join(command.argv)])]
    return "\n".join(lines) + "\n"


def device_of(rank: Rank, host: Host) -> str:
    """What a rank computes on."""
    return "CPU" if rank.gpu is None else f"GPU {rank.gpu} ({host.gpus[rank.gpu].name})"


def _gpus(host: Host) -> str:
    return count(len(host.gpus), "GPU") if host.gpus else "no GPU"


def _devices(rank: Rank, host: Host) -> str:
    cores = ("core " if len(rank.cores) == 1 else "cores ") + format_list(rank.cores)
    return f"{device_of(rank, host)}, {cores}, {count(rank.threads, 'thread')}"
