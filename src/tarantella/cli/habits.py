"""What people type who come from another launcher, and how to say the same to this command."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain
from pathlib import Path
from typing import NoReturn

from tarantella.errors import InputError

Words = tuple[str, ...]  # an option with its values


class Meaning(Enum):
    """What an option of another launcher stands for."""

    RANKS = auto()  # how many in all
    RANKS_PER_HOST = auto()
    HOSTS = auto()  # their names, and perhaps numbers of ranks
    HOSTFILE = auto()
    VARIABLE = auto()
    CPU = auto()
    GPU = auto()
    GPUS = auto()  # how many in all, or which
    GPUS_PER_HOST = auto()
    HOST_COUNT = auto()
    NOTHING = auto()  # there is no need for it


@dataclass(frozen=True)
class Habit:
    """Options of other launchers that mean the same.

    Attributes:
        meaning: what that is
        names: what users type
        values: how many words follow
    """

    meaning: Meaning
    names: tuple[str, ...]
    values: int = 1


# mpiexec (MPICH, Open MPI), horovodrun, torchrun, deepspeed, accelerate, srun
_HABITS = (
    Habit(
        Meaning.RANKS,
        (
            *("-np", "--np", "--n", "--num-proc", "--num_processes", "--nproc", "--ntasks"),
            "--ranks",
        ),
    ),
    Habit(
        Meaning.RANKS_PER_HOST,
        (
            *("--nproc_per_node", "--nproc-per-node", "-ppn", "--ppn", "-perhost", "-npernode"),
            *("--npernode", "--ntasks-per-node", "--ranks-per-node", "--n_per_node"),
            "--devices_per_node",
        ),
    ),
    Habit(Meaning.HOSTS, ("-H", "--hosts", "-hosts", "--host", "-host", "--nodelist")),
    Habit(
        Meaning.HOSTFILE,
        (
            *("-hostfile", "--host-file", "--host_file", "--hosts-file", "-f"),
            *("--machinefile", "-machinefile", "--machine-file"),
        ),
    ),
    Habit(Meaning.VARIABLE, ("-genv", "-env"), values=2),
    Habit(Meaning.VARIABLE, ("--env", "--genv")),
    Habit(Meaning.CPU, ("--cpu", "-cpu", "--use-cpu", "--use_cpu", "--cpu-only"), values=0),
    Habit(Meaning.GPU, ("--use-gpu", "--use_gpu"), values=0),
    Habit(Meaning.GPUS, ("--gpus", "-gpus", "-G", "--num-gpus", "--num_gpus", "--ngpus")),
    Habit(Meaning.GPUS_PER_HOST, ("--gpus-per-node", "--gpus_per_node", "--gres")),
    Habit(
        Meaning.HOST_COUNT,
        ("--nnodes", "--nodes", "--num-nodes", "--num_nodes", "--num_machines"),
    ),
    Habit(
        Meaning.NOTHING,
        (
            *("--node_rank", "--node-rank", "--machine_rank", "--master_addr", "--master-addr"),
            *("--master_port", "--master-port", "--main_process_port", "--rdzv_backend"),
            *("--rdzv-backend", "--rdzv_endpoint", "--rdzv-endpoint", "--rdzv_id", "--rdzv-id"),
            *("--bind-to", "--map-by"),
        ),
    ),
    Habit(Meaning.NOTHING, ("--standalone", "--oversubscribe", "--allow-run-as-root"), values=0),
)
# Words in front of the script that other commands need, and the option of ours that they stand for.
SUBCOMMANDS = {
    **dict.fromkeys(("run", "launch", "start", "exec"), ""),
    "help": "--help",
    "version": "--version",
}
_SHOWN_ALONE = ("--help", "-h", "--version")
_ABOUT_HOSTS = (Meaning.HOSTS, Meaning.HOSTFILE, Meaning.HOST_COUNT)
_COUNTS = (Meaning.RANKS, Meaning.RANKS_PER_HOST)
_NUMBER_OF_RANKS = {"-n", "--n-per-node", "--devices-per-node"}  # our options for it
_DEVICES = {"--gpu", "--no-gpu"}
HABITS: Mapping[str, Habit] = {name: habit for habit in _HABITS for name in habit.names}


@dataclass(frozen=True)
class Late:
    """Options that follow the script, without `--`: they may be for it, or have come too late.

    Attributes:
        options: those that say where ranks run
        program: the script and its arguments without them
    """

    options: tuple[Words, ...]
    program: tuple[str, ...]


@dataclass(frozen=True)
class _Foreign:
    """An option of another launcher on the command line."""

    meaning: Meaning
    words: Words

    @property
    def value(self) -> str:
        """Its value; empty if it is missing."""
        _, equals, value = self.words[0].partition("=")
        return value if equals else "=".join(self.words[1:])  # two of them are a variable

    def meant(self) -> list[tuple[Meaning, str]]:
        """What it stands for, each with a value: to ask for GPUs is to ask for a rank on each."""
        if self.meaning not in (Meaning.GPUS, Meaning.GPUS_PER_HOST):
            return [(self.meaning, self.value)]
        if re.fullmatch(r"\d+(,\d+)+", self.value):
            return [(Meaning.VARIABLE, f"CUDA_VISIBLE_DEVICES={self.value}"), (Meaning.GPU, "")]
        # Slurm has the kind of GPU in front, as in v100:2, and several kinds with commas.
        number = "N" if "," in self.value else self.value.rpartition(":")[2]
        if number == "0":
            return [(Meaning.CPU, "")]
        if number in ("all", "auto", "-1"):
            return [(Meaning.GPU, "")]
        ranks = Meaning.RANKS if self.meaning is Meaning.GPUS else Meaning.RANKS_PER_HOST
        return [(ranks, number), (Meaning.GPU, "")]


@dataclass(frozen=True)
class _Hosts:
    """A list of hosts, as in `a:4,b:4`.

    Attributes:
        names: their names
        ranks: how many ranks each has; empty where that is not said, N if not the same on all
    """

    names: tuple[str, ...]
    ranks: str

    @classmethod
    def of(cls, text: str) -> _Hosts:
        pairs = [part.strip().partition(":")[::2] for part in text.split(",") if part.strip()]
        numbers = {number for _, number in pairs}
        ranks = "N" if len(numbers) > 1 else next(iter(numbers), "")
        return cls(tuple(dict.fromkeys(name for name, _ in pairs)), ranks)

    @property
    def are_here(self) -> bool:
        return set(self.names) <= {"localhost", "127.0.0.1", socket.gethostname()}


def values_of(word: str) -> int | None:
    """How many words follow an option of another launcher; None if it is not known as one."""
    name, equals, _ = word.partition("=")
    return None if name not in HABITS else 0 if equals else HABITS[name].values


def refuse_habits(options: Sequence[Words], program: Sequence[str], late: Late) -> None:
    """Raises an InputError with our spelling if there are options of other launchers.

    Args:
        options: the options on the command line, each with its values
        program: the script and its arguments
        late: what may be options among these
    """
    typed = [shlex.join(words) for words in options if _is_foreign(words)]
    if not typed:
        return
    ours, remarks = _in_our_words(options)
    line = written(ours, program)
    moved = written(_in_our_words([*options, *late.options])[0], late.program)
    listed = " and ".join(filter(None, [", ".join(typed[:-1]), typed[-1]]))
    verb = "is not an option" if len(typed) == 1 else "are not options"
    remark = "".join(f", {remark}" for remark in remarks)
    raise InputError(
        f"{listed} {verb} of tarantella: write {one_of_both(line, moved, late)}{remark}."
    )


def one_of_both(line: str, moved: str, late: Late, name: str = "") -> str:
    """What to write, in a message; there are two ways if options may have come too late.

    Args:
        line: the command line if they are for the script
        moved: the command line if they are not
        late: these options
        name: what the message calls them
    """
    if not late.options:
        return f"`{line}`"
    name = name or shlex.join(chain(*late.options))
    return f"`{moved}` if {name} is for tarantella, and `{line}` if it is not"


def _in_our_words(options: Sequence[Words]) -> tuple[list[str], list[str]]:
    """Options without those of other launchers, and what else there is to say."""
    foreign = [_Foreign(_habit(words).meaning, words) for words in options if _is_foreign(words)]
    own = [words for words in options if not _is_foreign(words)]
    # Elsewhere, -n is the number of all ranks, also with hosts; here, of those on each host.
    names_hosts = any(each.meaning in _ABOUT_HOSTS for each in foreign)
    total = [words for words in own if words[0] == "-n" and names_hosts]
    kept = [words for words in own if words not in total]
    told, remarks = _translated(
        [*foreign, *(_Foreign(Meaning.RANKS, words) for words in total)],
        {words[0].partition("=")[0] for words in kept},
    )
    return _on_one_device(told, list(chain(*kept))), remarks


def is_subcommand(word: str) -> bool:
    """Whether a word in the place of the script is a subcommand of other commands."""
    return word in SUBCOMMANDS and not Path(word).exists() and shutil.which(word) is None


def refuse_subcommand(
    word: str, options: Sequence[Words], program: Sequence[str], late: Late
) -> NoReturn:
    """Raises an InputError with the command line that does without a subcommand.

    Args:
        word: the subcommand
        options: the options around it
        program: the script and its arguments
        late: what may be options among these
    """
    given = list(chain(*options))
    asked = SUBCOMMANDS[word] or next((each for each in given if each in _SHOWN_ALONE), "")
    if asked:
        line = f"`tarantella {asked}`"
    else:
        moved = [*given, *chain(*late.options)]
        line = one_of_both(written(given, program), written(moved, late.program), late)
    raise InputError(f"tarantella has no subcommand `{word}`: write {line}.")


def _is_foreign(words: Words) -> bool:
    return words[0].partition("=")[0] in HABITS


def _habit(words: Words) -> Habit:
    return HABITS[words[0].partition("=")[0]]


def is_python(word: str) -> bool:
    """Whether a word names the interpreter, which the command starts itself."""
    return re.fullmatch(r"python[\d.]*", Path(word).name) is not None


def written(options: Sequence[str], program: Sequence[str]) -> str:
    """A command line of ours, for a message."""
    if program and is_python(program[0]):
        program = program[1:]  # the command starts it
    if list(program[:1]) != ["-m"]:
        program = ["--", *(program or ["script.py"])]
    return shlex.join(["tarantella", *options, *program])


def _on_one_device(told: Sequence[str], ours: Sequence[str]) -> list[str]:
    """Both, with the device named once; the CPU wins."""
    words = [*(word for word in told if word not in _DEVICES or word not in ours), *ours]
    return [word for word in words if word != "--gpu" or "--no-gpu" not in words]


def _translated(foreign: Sequence[_Foreign], own: Set[str]) -> tuple[list[str], list[str]]:
    """The words that this command has for all of them, and what else there is to say.

    Args:
        foreign: options of other launchers
        own: the names of our options next to them; these decide where both say the same
    """
    given: dict[Meaning, list[str]] = {}
    counts = any(each.meaning in _COUNTS for each in foreign)
    for each in foreign:
        for meaning, value in each.meant():
            # A number of ranks counts more than one of GPUs.
            if meaning not in _COUNTS or each.meaning in _COUNTS or not counts:
                given.setdefault(meaning, []).append(value)

    def last(meaning: Meaning) -> str:
        return given.get(meaning, [""])[-1]

    hosts = _Hosts.of(last(Meaning.HOSTS))
    words: list[str] = []
    remarks: list[str] = []
    if "--hostfile" not in own:
        words, remarks = _where(hosts, last(Meaning.HOSTFILE), last(Meaning.HOST_COUNT))
    says_ranks = hosts.ranks or any(meaning in given for meaning in _COUNTS)
    if says_ranks and not own & _NUMBER_OF_RANKS:
        more, remark = _how_many(
            last(Meaning.RANKS),
            last(Meaning.RANKS_PER_HOST) or hosts.ranks,
            len(hosts.names) if words or "--hostfile" in own else None,
        )
        words += more
        remarks += remark
    for text in given.get(Meaning.VARIABLE, []):
        words += ["-x", text or "NAME=VALUE"]
    words += ["--no-gpu"] if Meaning.CPU in given else []
    words += ["--gpu"] if Meaning.GPU in given else []
    if Meaning.NOTHING in given and not remarks:
        remarks.append("as the ranks find their hosts, and each other, without it")
    return words, remarks


def _where(hosts: _Hosts, hostfile: str, count: str) -> tuple[list[str], list[str]]:
    """Our words for the hosts.

    Args:
        hosts: those that are named
        hostfile: the file that names them, if any
        count: how many there are, if that is said
    """
    if hostfile:
        return ["--hostfile", hostfile], []
    if hosts.names and not hosts.are_here:
        remark = f"with a file hosts that lists {', '.join(hosts.names)}, one per line"
        return ["--hostfile", "hosts"], [remark]
    if count not in ("", "1"):
        remark = (
            "with a file hosts that lists them, one per line; in a Slurm, PBS or LSF job, leave "
            "out --hostfile"
        )
        return ["--hostfile", "hosts"], [remark]
    return [], ["as one host needs no option"] if count else []


def _how_many(ranks: str, per_host: str, hosts: int | None) -> tuple[list[str], list[str]]:
    """Our words for the number of ranks.

    Args:
        ranks: how many in all
        per_host: how many on each host
        hosts: how many hosts there are, 0 if only the hostfile knows; None: this machine only
    """
    if per_host in ("auto", "gpu"):  # as torchrun has it
        return [], ["as there is one rank for each GPU without a number"]
    if hosts is None and not per_host:
        return ["-n", ranks or "N"], []
    if not per_host and hosts and ranks.isascii() and ranks.isdecimal() and not int(ranks) % hosts:
        per_host = str(int(ranks) // hosts)
    remark = (
        [] if per_host.isdecimal() else ["where N, the number of ranks, is the same on each host"]
    )
    return ["--n-per-node", per_host or "N"], remark
