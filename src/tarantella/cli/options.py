"""The command line: what it offers, and what the user has asked for with it."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from tarantella.errors import InputError
from tarantella.runtime.configuration import LOG_LEVELS

# Far beyond what any machine can run, and few enough to plan for at once.
MOST_RANKS = 1024
USAGE = "tarantella [options] -- script.py [script args]"
_EPILOG = """\
Without options, one rank is started on each GPU of this machine.
Ctrl+C ends all ranks. The exit status is 0 only if every rank ended well.
"""


@dataclass(frozen=True)
class Options:
    """What the user has asked for; None where it is left to Tarantella.

    Attributes:
        program: the script and its arguments
        ranks: how many ranks
        no_gpu: use the CPU
        log_level: the least important of the library's messages to be shown
        log_on_all_devices: messages of every rank
        output_on_all_devices: progress and callback output of every rank
        fusion_threshold_kb: tensor fusion threshold
        environment: variables for every rank, in the order given
        interpreter: what runs the script, and its arguments; empty: the program runs by itself
        dry_run: only say what would be run
    """

    program: tuple[str, ...]
    ranks: int | None = None
    no_gpu: bool = False
    log_level: str | None = None
    log_on_all_devices: bool = False
    output_on_all_devices: bool = False
    fusion_threshold_kb: int | None = None
    environment: tuple[tuple[str, str], ...] = ()
    interpreter: tuple[str, ...] | None = None
    dry_run: bool = False


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
        no_gpu=found.no_gpu,
        log_level=found.log_level,
        log_on_all_devices=found.log_on_all_devices,
        output_on_all_devices=found.output_on_all_devices,
        fusion_threshold_kb=found.fusion_threshold,
        environment=tuple(found.x),
        interpreter=found.python_interpreter,
        dry_run=found.dry_run,
    )
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
    add("-n", metavar="N", type=_ranks, help="number of ranks on this machine")
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
        help="show progress and callback output of every rank",
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
        "--python-interpreter",
        metavar="CMD",
        type=_interpreter,
        help="another interpreter, or a tool in front of one; "
        "an empty string runs the program as it is",
    )
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


def _check_program(options: Options) -> None:
    if not options.program:
        raise InputError(f"There is no script to run: {USAGE}")
    name = options.program[0]
    if options.interpreter == ():
        if shutil.which(name) is None:
            raise InputError(
                f"{name} is no program that can be run: name one that is on the PATH, "
                "or the path of an executable file."
            )
        return
    script = Path(name)
    if script.is_dir():
        raise InputError(f"{name} is a directory: give the path of a Python script.")
    try:
        script.open("rb").close()
    except FileNotFoundError:
        raise InputError(f"There is no script {name}: check its path.") from None
    except OSError as error:
        raise InputError(f"The script {name} cannot be read: {error.strerror}.") from None


def _ranks(text: str) -> int:
    ranks = _whole_number(text, 1, "a number of ranks, 1 or more")
    if ranks > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text} ranks are more than {MOST_RANKS} on one machine")
    return ranks


def _kilobytes(text: str) -> int:
    return _whole_number(text, 0, "a whole number of kilobytes, 0 or more")


def _whole_number(text: str, smallest: int, expected: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < smallest:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return int(text)


def _log_level(text: str) -> str:
    if text.upper() not in LOG_LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(LOG_LEVELS)}")
    return text.upper()


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
