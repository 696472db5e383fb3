"""Reads the command line into `Options`, and says what is wrong with it."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any, NoReturn

from tarantella.cli.habits import (
    Late,
    Words,
    is_subcommand,
    one_of_both,
    refuse_habits,
    refuse_subcommand,
    values_of,
    written,
)
from tarantella.cli.options import Options
from tarantella.cli.program import USAGE, check_program
from tarantella.errors import InputError
from tarantella.runtime.settings import Group, Option, Setting, TextFormat, settings_of

_USAGE = f"{USAGE}\n       tarantella [options] -m module [module args]"
_EPILOG = """\
examples:
  tarantella -- train.py                       one rank for each GPU here
  tarantella -n 4 --no-gpu -- train.py         four ranks on the CPU
  tarantella -n 2 -m package.train             like python -m, on two ranks
  tarantella --hostfile hosts -- train.py      all GPUs of several hosts
  tarantella --n-per-node 4 -- train.py        in a Slurm, PBS or LSF job
  tarantella -n 2 --dry-run -- train.py        what would run, and where
  tarantella --cleanup -- train.py             end all runs of train.py

Without options, one rank starts on each GPU of this machine, or of each host
that a scheduler (Slurm, PBS, LSF) has given to the job. Ctrl+C ends all ranks.
The exit status is 0 only if every rank succeeded.
"""


def parse(arguments: Sequence[str]) -> Options:
    """Read a command line; an InputError says what is wrong with it."""
    parser = make_parser()
    own, program, has_dashes = _split(parser, arguments)
    if program and not has_dashes and is_subcommand(program[0]):
        _refuse_subcommand(parser, own, program)
    is_module = program[:1] == ["-m"]
    late = _late_options(parser, own, program, has_dashes)
    refuse_habits(own, program, late)
    namespace, unknown = parser.parse_known_args([word for words in own for word in words])
    if unknown:
        raise InputError(_unknown_option(parser, unknown[0]))
    if is_module and len(program) == 1:
        raise InputError("-m needs the name of a module, as in `tarantella -n 2 -m package.train`.")
    _refuse_late_options(own, program, late)
    rows = settings_of(Options)
    found: dict[str, Any] = {
        name: tuple(chain.from_iterable(value)) if isinstance(value, list) else value
        for name, value in vars(namespace).items()
    }
    given = frozenset(name for name in found if rows[name].variable)
    options = Options(program=tuple(program[is_module:]), module=is_module, given=given, **found)
    if options.pin_memory_to_socket:
        options = replace(options, pin_to_socket=True)
    options = _ranks_of_each_host(options)
    _check_together(options)
    if options.completion is None:
        check_program(options)
    return options


class _Parser(argparse.ArgumentParser):
    """Knows its options by name, and reports what is wrong as an error for the command to show."""

    def __init__(self, **description: Any) -> None:
        super().__init__(**description)
        self.known: dict[str, argparse.Action] = {}
        self.about_ranks: set[str] = set()  # those that say how many ranks there are, and where

    def add(self, group: Group, *names: str, **description: Any) -> None:
        action = self._titled(group).add_argument(*names, **description)
        self.known.update(dict.fromkeys(names, action))
        if group in (Group.HOSTS, Group.DEVICES):
            self.about_ranks.update(names)

    def _titled(self, group: Group) -> argparse._ArgumentGroup:
        """The section of the help for a group."""
        for section in self._action_groups:
            if section.title == group.value:
                return section
        return self.add_argument_group(group.value)

    def error(self, message: str) -> NoReturn:
        raise InputError(message.removeprefix("argument "))


def make_parser() -> _Parser:
    """A parser of all options in the table; what is not given is not in its result."""
    parser = _Parser(
        prog="tarantella",
        usage=_USAGE,
        description="Train a Keras model in several processes, called ranks, on GPUs or CPUs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    for group in Group:
        for name, row in settings_of(Options).items():
            if row.option is not None and row.option.group == group:
                _add_option(parser, name, row, row.option)
    last = Group.OTHER
    parser.add(
        last,
        "--version",
        action="version",
        version=f"tarantella {_version()}",
        help="show the version",
    )
    parser.add(last, "-h", "--help", action="help", help="show this help")
    return parser


def _add_option(parser: _Parser, name: str, row: Setting, option: Option) -> None:
    description: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    if option.metavar:
        description |= {"metavar": option.metavar, "type": _reader(row.kind)}
    else:
        description["action"] = "store_true"
    if option.repeats:
        description |= {"action": "extend", "nargs": "+"}
    parser.add(option.group, *option.names, help=row.help, **description)


def _reader(kind: TextFormat[Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind.read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind.expected}") from None

    return read


def _split(parser: _Parser, arguments: Sequence[str]) -> tuple[list[Words], list[str], bool]:
    """The command's own options, each with its values, the program with its arguments, and
    whether `--` stands between them.

    The program starts after `--`, or, as with Python, at the first word that belongs to no option,
    or with `-m`.
    """
    words = list(arguments)
    options: list[Words] = []
    position = 0
    while position < len(words) and _is_option(words[position]):
        end = position + 1 + _count_values(parser, words[position:])
        options.append(tuple(words[position:end]))
        position = end
    program = words[position:]
    has_dashes = program[:1] == ["--"]
    return options, program[has_dashes:], has_dashes


def _is_option(word: str) -> bool:
    return word.startswith("-") and word not in ("--", "-m")


def _count_values(parser: _Parser, words: Sequence[str]) -> int:
    """How many of the words after the first one, an option, are its values."""
    option, *others = words
    if "--" in others:
        others = others[: others.index("--")]
        until_program = True
    else:
        until_program = False
    action = parser.known.get(option)
    if action is None or action.nargs == 0:
        return min(values_of(option) or 0, len(others)) if action is None else 0
    count = min(1, len(others))
    if action.nargs == "+":
        while count < len(others) and not others[count].startswith("-"):
            if not until_program and "=" not in others[count]:
                break
            count += 1
    return count


def _refuse_subcommand(
    parser: _Parser, options: Sequence[Words], program: Sequence[str]
) -> NoReturn:
    """Raises an InputError with our spelling of what is around the subcommand, options included."""
    word, *others = program
    more, script, has_dashes = _split(parser, others)
    own = [*options, *more]
    late = _late_options(parser, own, script, has_dashes)
    refuse_habits(own, script, late)
    refuse_subcommand(word, own, script, late)


def _late_options(
    parser: _Parser, options: Sequence[Words], program: Sequence[str], has_dashes: bool
) -> Late:
    """The options that say where ranks run and follow the script, unless `--` is before it."""
    if has_dashes or program[:1] == ["-m"]:
        return Late((), tuple(program))
    late: list[Words] = []
    rest = list(program[:1])
    given = {words[0].partition("=")[0] for words in options}
    words = list(program[1:])
    while words:
        name = words[0].partition("=")[0]
        if name in parser.about_ranks and name not in given:
            end = 1 + _count_values(parser, words)
            late.append(tuple(words[:end]))
        else:
            end = 1
            rest.append(words[0])
        del words[:end]
    return Late(tuple(late), tuple(rest))


def _refuse_late_options(options: Sequence[Words], program: Sequence[str], late: Late) -> None:
    """Raises an InputError if there are such options.

    They would be arguments of the script, and the run another one than was asked for.
    """
    if late.options:
        own, after = list(chain(*options)), list(chain(*late.options))
        line, moved = written(own, program), written([*own, *after], late.program)
        raise InputError(
            f"{shlex.join(after)} after {program[0]} would be for the script: write "
            f"{one_of_both(line, moved, late, 'it')}."
        )


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


def _version() -> str:
    try:
        return version("tarantella")
    except PackageNotFoundError:
        return "(not installed)"
