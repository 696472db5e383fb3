"""Slurm: hosts in lists with brackets, reached by srun."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tarantella.cli.schedulers.allocation import Allocation, each_once
from tarantella.errors import InputError

# In a step started from outside of the job, the first one has only the hosts of the step.
_HOSTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")

# What each task of a job gets. We start one task per host, for all its ranks: it gets everything.
_FOR_ONE_OF_MANY_TASKS = ("SLURM_EXACT", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK")
_GPUS_BY_TASK = ("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")
_GPUS_OF_TASK = ("SLURM_GPU_BIND", "SLURM_TRES_BIND", "SLURM_NTASKS_PER_GPU")

# Where Slurm assigns GPUs, each host has its own list. Hydra would pass on that of the first.
_GIVES_GPUS = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
_GPUS_OF_HOST = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

# A program other than srun; the number of the task before each line of output.
_OTHER_WAYS = ("HYDRA_LAUNCHER_EXEC", "SLURM_LABELIO")

# Since 23.11, srun then takes nothing away from other tasks; hydra does the same.
_AS_HYDRA = "SLURM_EXTERNAL_LAUNCHER=1"

# What srun prints in a job that has ended, or is being cancelled.
_OVER = ("has expired", "already completing or completed", "Invalid job id")

_PART = r"(?:[^\[\],\s]|\[[^\[\]\s]+\])"
_NAME = re.compile(rf"(?!-){_PART}+")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


@dataclass(frozen=True)
class Slurm(Allocation):
    """The hosts of a Slurm job.

    Attributes:
        gpus: how many GPUs to ask for on each host; 0: srun gives us all of the job anyway
    """

    gpus: int = 0

    name = "Slurm"
    launcher = "slurm"
    address_variable = "SLURM_LAUNCH_NODE_IPADDR"
    launcher_ignores = (*_FOR_ONE_OF_MANY_TASKS, *_GPUS_BY_TASK, *_GPUS_OF_TASK, *_OTHER_WAYS)

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> Slurm | None:
        """The allocation that a process with this environment is in, if any."""
        lists = [expand(environ[name], name) for name in _HOSTS if environ.get(name)]
        return cls(max(lists, key=len), _gpus(environ)) if lists else None

    @property
    def launcher_options(self) -> tuple[str, ...]:
        # Beside whatever else runs in the job, with all its cores and memory, and not as a rank.
        gpus = [f"--gpus-per-node={self.gpus}"] if self.gpus else []
        return ("--overlap", "--mem=0", "--cpu-bind=none", "--mpi=none", *gpus)

    def on_host(self, host: str, command: Sequence[str], seconds: int) -> list[str]:
        ignore = [f"--unset={name}" for name in self.launcher_ignores]
        one = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", f"--immediate={seconds}"]
        plain = ["--export=ALL", "--quiet"]
        srun = ["srun", *self.launcher_options, *one, *plain, "--", *_without_colons(command)]
        return ["env", *ignore, _AS_HYDRA, *srun]

    def launcher_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        gone = _GPUS_OF_HOST if any(environ.get(name) for name in _GIVES_GPUS) else ()
        changed = super().launcher_environment(environ)
        return {name: value for name, value in changed.items() if name not in gone}

    def is_over(self, said: str) -> bool:
        return any(words in said for words in _OVER)


def expand(text: str, variable: str = _HOSTS[0]) -> tuple[str, ...]:
    """The names in a list like `login,node[1-3,07-10],rack[1-2]gpu[01-16]-ib`."""
    names = _NAME.findall(text)
    if ",".join(names) != text:
        raise _malformed(text, variable)
    try:
        return each_once(host for name in names for host in _hosts(name))
    except ValueError:
        raise _malformed(text, variable) from None


def _hosts(name: str) -> Iterator[str]:
    """The names that one with brackets stands for; the last bracket changes fastest."""
    parts = re.split(r"\[(.*?)\]", name)
    choices = [_numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def _numbers(text: str) -> list[str]:
    """The numbers in a list like `1-3,07-10`, with their leading zeros."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(part)
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise ValueError(part)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _gpus(environ: Mapping[str, str]) -> int:
    """The GPUs on each host, if the job has them by task or for all hosts together.

    A single task would get those of one task, or an error. The other hosts are expected to have as
    many as the first.
    """
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    by_task = any(environ.get(name) for name in _GPUS_BY_TASK)
    return int(count) if by_task and count.isdecimal() else 0


def _malformed(text: str, variable: str) -> InputError:
    return InputError(
        f"The list of hosts that Slurm gives in {variable} makes no sense: {text!r}. Name the "
        "hosts with --hostfile."
    )


def _without_colons(command: Sequence[str]) -> list[str]:
    """A command with no argument that is a single colon: srun takes it as a separator."""
    if ":" not in command:
        return list(command)
    return ["/bin/sh", "-c", shlex.join(["exec", *command])]
