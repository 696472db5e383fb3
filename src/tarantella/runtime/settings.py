"""What a row in a table of settings is: one field of a dataclass says everything about a setting.

`runtime.configuration` is the table of what ranks read, `cli.options` adds what the command alone
reads. From a row come the option of the command with its help, the environment variable that
carries the value to the ranks, and how a rank reads it. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Generic, TypeVar, cast

from tarantella.errors import InputError

Value = TypeVar("Value")
Default = TypeVar("Default")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")
_AUTO = "auto"


@dataclass(frozen=True)
class TextFormat(Generic[Value]):
    """The texts that a setting may have, and what they mean.

    Attributes:
        expected: what a text should be, for messages
        read: the value that a text stands for; a ValueError if it stands for none
        write: the text that stands for a value
        choices: all texts, as users write them, if these are few
        path: whether a text is the path of a "file", of a "folder", or of neither
        empty_is_unset: an empty variable is like none
        keeps_spaces: spaces around the text belong to the value
    """

    expected: str
    read: Callable[[str], Value]
    write: Callable[[Value], str] = str
    choices: tuple[str, ...] = ()
    path: str = ""
    empty_is_unset: bool = False
    keeps_spaces: bool = False


class Group(Enum):
    """Options that stand together in `--help`, under this title, in the order of the groups."""

    HOSTS = "where the ranks run"
    DEVICES = "GPUs or the CPU"
    OUTPUT = "output"
    TRAINING = "training"
    FAILURES = "failures"
    PROCESSES = "processes"
    OTHER = "other"


@dataclass(frozen=True)
class Option:
    """An option of the command.

    Attributes:
        names: what users type, the usual name first
        group: where it stands in `--help`
        help: what `--help` says; `{default}` stands for the default value
        metavar: what `--help` calls its value; empty: it has none, and switches something on
        repeats: it may be given several times, each time with several texts; its value is the
            sum of the tuples that they stand for
    """

    names: tuple[str, ...]
    group: Group
    help: str
    metavar: str = ""
    repeats: bool = False


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Attributes:
        default: the value where nobody sets it
        kind: the texts that it may have
        variable: the environment variable that ranks read; empty: only the command knows it
        option: how users set it on the command line; None: by the variable alone
        planned: the command sets the variable anew for each run, and a run that a rank starts
            must not inherit it
    """

    default: Any
    kind: TextFormat[Any]
    variable: str = ""
    option: Option | None = None
    planned: bool = False

    @property
    def help(self) -> str:
        """What `--help` says about its option."""
        assert self.option is not None
        return self.option.help.format(default=self.kind.write(self.default))

    def read_variable(self, text: str) -> Any:
        """The value that the variable has with this text; an InputError if it makes no sense."""
        meant = text if self.kind.keeps_spaces else text.strip()
        if self.kind.empty_is_unset and not meant:
            return self.default
        try:
            return self.kind.read(meant)
        except ValueError:
            raise InputError(
                f"The environment variable {self.variable} is {text!r}: "
                f"set it to {self.kind.expected}, or unset it."
            ) from None


def setting(
    default: Default,
    kind: TextFormat[Value],
    variable: str = "",
    option: Option | None = None,
    planned: bool = False,
) -> Default | Value:
    """A field of a dataclass that is a row of the table; see `Setting` for the arguments."""
    row = Setting(default, kind, variable, option, planned)
    return cast("Default | Value", field(default=default, metadata={"setting": row}))


def settings_of(table: type) -> dict[str, Setting]:
    """The rows of a table, by the name of their field."""
    return {
        each.name: each.metadata["setting"] for each in fields(table) if "setting" in each.metadata
    }


def whole_number(expected: str, smallest: int = 0, largest: int | None = None) -> TextFormat[int]:
    """Numbers from the smallest to the largest."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < smallest:
            raise ValueError(text)
        if largest is not None and int(text) > largest:
            raise ValueError(text)
        return int(text)

    return TextFormat(expected, read)


def whole_numbers(expected: str, smallest: int = 0) -> TextFormat[tuple[int, ...]]:
    """Numbers that are separated by commas."""
    one = whole_number(expected, smallest)
    return TextFormat(
        expected, lambda text: tuple(one.read(part.strip()) for part in text.split(","))
    )


def or_auto(one: TextFormat[Value]) -> TextFormat[Value | None]:
    """What another format takes, or the word "auto", which stands for None."""

    def read(text: str) -> Value | None:
        return None if text.lower() == _AUTO else one.read(text)

    def write(value: Value | None) -> str:
        return _AUTO if value is None else one.write(value)

    return TextFormat(f"{one.expected}, or {_AUTO}", read, write)


def one_of(choices: Sequence[str], other_names: Mapping[str, str] | None = None) -> TextFormat[str]:
    """One of these texts, in upper or lower case.

    Args:
        choices: the texts
        other_names: texts that are understood as well, and which of those they stand for
    """
    understood = {each.lower(): each for each in choices} | dict(other_names or {})

    def read(text: str) -> str:
        if text.lower() not in understood:
            raise ValueError(text)
        return understood[text.lower()]

    return TextFormat("one of " + ", ".join(choices), read, choices=tuple(choices))


def _read_switch(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


def _read_path(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


SWITCH = TextFormat("true or false", _read_switch, lambda value: "true" if value else "false")
PATH = TextFormat(
    "the name of a file or folder", _read_path, path="file", empty_is_unset=True, keeps_spaces=True
)
