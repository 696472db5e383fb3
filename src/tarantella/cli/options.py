"""The command line: what it offers, and what the user has asked for with it."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from tarantella.errors import InputError
from tarantella.runtime.configuration import LOG_LEVELS, log_level

# Far beyond what any machine can run, and few enough to plan for at once.
MOST_RANKS = 1024
USAGE = "tarantella [options] -- script.py [script args]"
_EPILOG = """\
Without options, one rank is started on each GPU of this machine, or of each host that a scheduler
(Slurm, PBS, LSF) has given to the job.
Ctrl+C ends all ranks. The exit status is 0 only if every rank ended well.
"""


@dataclass(frozen=True)
class Options:
    """What the user has asked for; None where it is left to Tarantella.

    Attributes:
        program: the script and its arguments
        notes: how something was understood that has another meaning elsewhere
        ranks: how many ranks on this machine
        hostfile: the file that names the hosts
        ranks_per_host: how many ranks on each host
        no_gpu: use the CPU
        log_level: the least important of the library's messages to be shown
        log_on_all_devices: messages of every rank
        output_on_all_devices: progress and callback output of every rank
        output_dir: the folder for all that each rank prints
        fusion_threshold_kb: tensor fusion threshold
        timeline: the file for a trace of what each rank does when
        stall_seconds: how long a rank waits for others until there is a warning
        grace_seconds: how long ranks may take to end after SIGTERM
        max_restarts: how often a run that has failed is started again
        allow_fewer_hosts: leave out hosts that do not answer any more then
        environment: variables for every rank, in the order given
        interpreter: what runs the script, and its arguments; empty: the program runs by itself
        pin_to_socket: bind each rank to a NUMA domain
        pin_memory_to_socket: bind its memory, too
        network_interface: the interface that ranks of several hosts communicate by
        cleanup: end the runs of the script
        force: kill them
        dry_run: only say what would be run
    """

    program: tuple[str, ...]
    notes: tuple[str, ...] = ()
    ranks: int | None = None
    hostfile: str | None = None
    ranks_per_host: int | None = None
    no_gpu: bool = False
    log_level: str | None = None
    log_on_all_devices: bool = False
    output_on_all_devices: bool = False
    output_dir: str | None = None
    fusion_threshold_kb: int | None = None
    timeline: str | None = None
    stall_seconds: int | None = None
    grace_seconds: int | None = None
    max_restarts: int = 0
    allow_fewer_hosts: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    interpreter: tuple[str, ...] | None = None
    pin_to_socket: bool = False
    pin_memory_to_socket: bool = False
    network_interface: str | None = None
    cleanup: bool = False
    force: bool = False
    dry_run: bool = False

    @property
    def runs_script(self) -> bool:
        """Whether the program is a script for an interpreter."""
        return self.interpreter != ()


def parse(arguments: Sequence[str]) -> Options:
    """Understand a command line; an InputError says what is wrong with it."""
    parser = _parser()
    own, program = _split(parser, arguments)
    found, unknown = parser.parse_known_args(own)
    if unknown:
        raise InputError(_unknown_option(parser, unknown[0]))
    options = Options(
        program=tuple(program),
        ranks=found.n,
        hostfile=found.hostfile,
        ranks_per_host=found.n_per_node,
        no_gpu=found.no_gpu,
        log_level=found.log_level,
        log_on_all_devices=found.log_on_all_devices,
        output_on_all_devices=found.output_on_all_devices,
        output_dir=found.output_dir,
        fusion_threshold_kb=found.fusion_threshold,
        timeline=found.timeline,
        stall_seconds=found.stall_timeout,
        grace_seconds=found.grace_period,
        max_restarts=found.max_restarts,
        allow_fewer_hosts=found.allow_fewer_hosts,
        environment=tuple(found.x),
        interpreter=found.python_interpreter,
        pin_to_socket=found.pin_to_socket or found.pin_memory_to_socket,
        pin_memory_to_socket=found.pin_memory_to_socket,
        network_interface=found.network_interface,
        cleanup=found.cleanup,
        force=found.force,
        dry_run=found.dry_run,
    )
    options = _ranks_of_each_host(options)
    _check_together(options)
    _check_program(options)
    return options


class _Parser(argparse.ArgumentParser):
    """Knows its options by name, and reports what is wrong as an error for the command to show."""

    def offer(self, *names: str, **description: Any) -> None:
        action = self.add_argument(*names, **description)
        self.known.update(dict.fromkeys(names, action))

    def __init__(self, **description: Any) -> None:
        super().__init__(**description)
        self.known: dict[str, argparse.Action] = {}

    def error(self, message: str) -> NoReturn:
        raise InputError(message.removeprefix("argument "))


def _parser() -> _Parser:
    parser = _Parser(
        prog="tarantella",
        usage=USAGE,
        description="Train a Keras model on several devices with one rank each.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.offer
    add(
        "-n",
        metavar="N",
        type=_ranks,
        help="number of ranks on this machine; with --hostfile, on each host",
    )
    add("--hostfile", metavar="FILE", help="file with the names of the hosts, one a line")
    add(
        "--n-per-node",
        "--devices-per-node",
        metavar="N",
        type=_ranks,
        help="number of ranks on each host",
    )
    add("--no-gpu", "--no-gpus", action="store_true", help="use the CPU, even if there are GPUs")
    add(
        "--log-level",
        metavar="LEVEL",
        type=_log_level,
        help="show messages of the library from this level on: " + ", ".join(LOG_LEVELS),
    )
    add(
        "--log-on-all-devices",
        action="store_true",
        help="show messages of every rank, not only of the master rank",
    )
    add(
        "--output-on-all-devices",
        action="store_true",
        help="show what every rank prints, marked with its rank, not only the master rank",
    )
    add(
        "--output-dir",
        metavar="DIR",
        type=_file,
        help="keep all that each rank prints, in a file a rank",
    )
    add(
        "-x",
        metavar="K=V",
        nargs="+",
        type=_variable,
        action="extend",
        default=[],
        help="environment variables for every rank",
    )
    add(
        "--fusion-threshold",
        metavar="KB",
        type=_kilobytes,
        help="gradients up to this size are sent together; 0 sends each alone",
    )
    add(
        "--timeline",
        metavar="FILE",
        type=_file,
        help="write down what each rank does when, for Perfetto or chrome://tracing",
    )
    add(
        "--stall-timeout",
        metavar="SECONDS",
        type=_seconds,
        help="warn if ranks wait for others for so long, and end the run after ten times that; "
        "0 waits for ever, without a warning (60)",
    )
    add(
        "--grace-period",
        metavar="SECONDS",
        type=_seconds,
        help="how long ranks that save something when SIGTERM comes may take for it (30)",
    )
    add(
        "--max-restarts",
        metavar="N",
        type=_restarts,
        default=0,
        help="start the run again if it fails, at most N times",
    )
    add(
        "--allow-fewer-hosts",
        action="store_true",
        help="with --max-restarts: go on without hosts that cannot take part any more",
    )
    add(
        "--python-interpreter",
        metavar="CMD",
        type=_interpreter,
        help="another interpreter, or a tool in front of one; "
        "an empty string runs the program as it is",
    )
    add(
        "--pin-to-socket",
        action="store_true",
        help="bind each rank to the cores of one NUMA domain",
    )
    add(
        "--pin-memory-to-socket",
        action="store_true",
        help="the same, and bind its memory to the domain as well",
    )
    add(
        "--network-interface",
        metavar="NAME",
        help="network interface for the ranks, such as ib0; chosen by itself otherwise",
    )
    add("--cleanup", action="store_true", help="end the running processes of this script")
    add("--force", action="store_true", help="with --cleanup: kill them, and at once")
    add("--dry-run", action="store_true", help="say what would be run, and run nothing")
    add("--version", action="version", version=f"tarantella {_version()}")
    add("-h", "--help", action="help", help="show this help")
    return parser


def _split(parser: _Parser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own arguments, and the program with its arguments.

    The program starts behind `--`, or, as with Python, at the first word that belongs to no option.
    """
    words = list(arguments)
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] != "--":
        word = words[position]
        position += 1
        action = parser.known.get(word)
        if action is None or action.nargs == 0:
            continue
        if position < len(words) and words[position] != "--":
            position += 1
        if action.nargs == "+":
            until_program = "--" in words[position:]
            while position < len(words) and not words[position].startswith("-"):
                if not until_program and "=" not in words[position]:
                    break
                position += 1
    program = words[position:]
    return words[:position], program[1:] if program[:1] == ["--"] else program


def _unknown_option(parser: _Parser, word: str) -> str:
    close = difflib.get_close_matches(word.partition("=")[0], parser.known, 1)
    hint = f" Did you mean {close[0]}?" if close else " See tarantella --help."
    return f"{word} is not an option of tarantella.{hint}"


def _ranks_of_each_host(options: Options) -> Options:
    """With --hostfile, -n means --n-per-node, as in earlier versions."""
    ranks = options.ranks
    if ranks is None or options.hostfile is None:
        return options
    if options.ranks_per_host not in (None, ranks):
        raise InputError(
            f"-n {ranks} and --n-per-node {options.ranks_per_host} contradict each other: with "
            "--hostfile, both say how many ranks there are on each host. Use one of them."
        )
    note = f"-n {ranks} with --hostfile means {ranks} on each host, as --n-per-node {ranks} does."
    return replace(options, ranks=None, ranks_per_host=ranks, notes=(note,))


def _check_together(options: Options) -> None:
    """Options that exclude, or need, each other."""
    if options.ranks is not None and options.ranks_per_host is not None:
        raise InputError("-n and --n-per-node exclude each other: use one of them.")
    if options.cleanup and options.dry_run:
        raise InputError("--cleanup ends processes, and --dry-run does nothing: use one of them.")
    if options.allow_fewer_hosts and not options.max_restarts:
        raise InputError(
            "--allow-fewer-hosts belongs to --max-restarts: leave it out, or use both."
        )
    if options.force and not options.cleanup:
        raise InputError("--force belongs to --cleanup: leave it out, or use both.")


def _check_program(options: Options) -> None:
    if not options.program:
        raise InputError(f"There is no script to run: {USAGE}")
    if options.cleanup:  # the script may be gone meanwhile
        return
    name = options.program[0]
    if not options.runs_script:
        if shutil.which(name) is None:
            raise InputError(
                f"{name} is no program that can be run: name one that is on the PATH, "
                "or the path of an executable file."
            )
        return
    try:
        Path(name).open("rb").close()
    except FileNotFoundError:
        is_python = name.startswith("python")
        advice = "leave it out, the command starts Python" if is_python else "check its path"
        raise InputError(f"There is no script {name}: {advice}.") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a directory: give the path of a Python script.") from None
    except OSError as error:
        raise InputError(f"The script {name} cannot be read: {error.strerror}.") from None


def _ranks(text: str) -> int:
    ranks = _whole_number(text, 1, "a number of ranks, 1 or more")
    if ranks > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text} ranks are more than {MOST_RANKS} on one machine")
    return ranks


def _kilobytes(text: str) -> int:
    return _whole_number(text, 0, "a whole number of kilobytes, 0 or more")


def _seconds(text: str) -> int:
    return _whole_number(text, 0, "a whole number of seconds, 0 or more")


def _restarts(text: str) -> int:
    return _whole_number(text, 0, "a whole number, 0 or more")


def _file(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def _whole_number(text: str, smallest: int, expected: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < smallest:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return int(text)


def _log_level(text: str) -> str:
    try:
        return log_level(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(LOG_LEVELS)}") from None


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(
            f"{text!r} has no '=': write NAME=VALUE, and -- in front of the script"
        )
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise argparse.ArgumentTypeError(
            f"{name!r} is not a name for a variable: use letters, digits and _, no digit first"
        )
    return name, value


def _interpreter(text: str) -> tuple[str, ...]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be understood: {error}") from None
    if words and shutil.which(words[0]) is None:
        raise argparse.ArgumentTypeError(
            f"{words[0]!r} is no program that can be run: name one that is on the PATH, "
            "or the path of an executable file"
        )
    return tuple(words)


def _version() -> str:
    try:
        return version("tarantella")
    except PackageNotFoundError:
        return "(not installed)"
