"""Reads the command line into `Options`, and says what is wrong with it."""

from __future__ import annotations

import argparse
import difflib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from tarantella.cli.options import Options
from tarantella.errors import InputError
from tarantella.runtime.settings import Group, Option, Setting, TextFormat, settings_of

USAGE = "tarantella [options] -- script.py [script args]"
_EPILOG = """\
Without options, one rank starts on each GPU of this machine, or of each host that a scheduler
(Slurm, PBS, LSF) has given to the job.
Ctrl+C ends all ranks. The exit status is 0 only if every rank succeeded.
"""


def parse(arguments: Sequence[str]) -> Options:
    """Read a command line; an InputError says what is wrong with it."""
    parser = make_parser()
    own, program = _split(parser, arguments)
    namespace, unknown = parser.parse_known_args(own)
    if unknown:
        raise InputError(_unknown_option(parser, unknown[0]))
    rows = settings_of(Options)
    found: dict[str, Any] = {
        name: tuple(chain.from_iterable(value)) if isinstance(value, list) else value
        for name, value in vars(namespace).items()
    }
    given = frozenset(name for name in found if rows[name].variable)
    options = Options(program=tuple(program), given=given, **found)
    if options.pin_memory_to_socket:
        options = replace(options, pin_to_socket=True)
    options = _ranks_of_each_host(options)
    _check_together(options)
    _check_program(options)
    return options


class _Parser(argparse.ArgumentParser):
    """Knows its options by name, and reports what is wrong as an error for the command to show."""

    def __init__(self, **description: Any) -> None:
        super().__init__(**description)
        self.known: dict[str, argparse.Action] = {}

    def add(self, *names: str, **description: Any) -> None:
        action = self.add_argument(*names, **description)
        self.known.update(dict.fromkeys(names, action))

    def error(self, message: str) -> NoReturn:
        raise InputError(message.removeprefix("argument "))


def make_parser() -> _Parser:
    """A parser of all options in the table; what is not given is not in its result."""
    parser = _Parser(
        prog="tarantella",
        usage=USAGE,
        description="Train a Keras model on several devices with one rank each.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    for group in Group:
        for name, row in settings_of(Options).items():
            if row.option is not None and row.option.group == group:
                _add_option(parser, name, row, row.option)
    parser.add("--version", action="version", version=f"tarantella {_version()}")
    parser.add("-h", "--help", action="help", help="show this help")
    return parser


def _add_option(parser: _Parser, name: str, row: Setting, option: Option) -> None:
    description: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    if option.metavar:
        description |= {"metavar": option.metavar, "type": _reader(row.kind)}
    else:
        description["action"] = "store_true"
    if option.repeats:
        description |= {"action": "extend", "nargs": "+"}
    parser.add(*option.names, help=option.help.format(default=row.default), **description)


def _reader(kind: TextFormat[Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind.read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind.expected}") from None

    return read


def _split(parser: _Parser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own arguments, and the program with its arguments.

    The program starts after `--`, or, as with Python, at the first word that belongs to no option.
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
            "--hostfile, both are the number of ranks on each host. Use one of them."
        )
    note = f"-n {ranks} with --hostfile means {ranks} on each host, as --n-per-node {ranks} does."
    return replace(options, ranks=None, ranks_per_host=ranks, notes=(note,))


def _check_together(options: Options) -> None:
    """Options that exclude, or need, each other."""
    if options.ranks is not None and options.ranks_per_host is not None:
        raise InputError("-n and --n-per-node exclude each other: use one of them.")
    if options.gpu and options.no_gpu:
        raise InputError("--gpu and --no-gpu exclude each other: use one of them.")
    if options.cleanup and options.dry_run:
        raise InputError("--cleanup ends processes, and --dry-run does nothing: use one of them.")
    if options.allow_fewer_hosts and not options.max_restarts:
        raise InputError("--allow-fewer-hosts needs --max-restarts: use both, or leave it out.")
    if options.force and not options.cleanup:
        raise InputError("--force needs --cleanup: use both, or leave it out.")


def _check_program(options: Options) -> None:
    if not options.program:
        raise InputError(f"There is no script to run: {USAGE}")
    if options.cleanup:  # the script may be gone by now
        return
    name = options.program[0]
    if not options.runs_script:
        if shutil.which(name) is None:
            raise InputError(
                f"{name} is not a program that can be run: give the name of one on the PATH, "
                "or the path of an executable file."
            )
        return
    try:
        Path(name).open("rb").close()
    except FileNotFoundError:
        is_python = name.startswith("python")
        advice = "leave it out, as the command starts Python" if is_python else "check its path"
        raise InputError(f"There is no script {name}: {advice}.") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a directory: give the path of a Python script.") from None
    except OSError as error:
        raise InputError(f"The script {name} cannot be read: {error.strerror}.") from None


def _version() -> str:
    try:
        return version("tarantella")
    except PackageNotFoundError:
        return "(not installed)"
