"""The options of the command as keyword arguments of `tnt.run`, by the same table."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from tarantella.cli.keywords import COMMAND_LINE_ONLY, OTHER_NAMES, by_keyword
from tarantella.errors import InputError
from tarantella.runtime.settings import Option


def arguments_for(options: Mapping[str, Any], others: tuple[str, ...]) -> list[str]:
    """The arguments of the command that stand for keyword arguments.

    Args:
        options: the keyword arguments
        others: the names of further ones, for a user who has mistyped one
    """
    known = by_keyword()
    arguments: list[str] = []
    for keyword, value in options.items():
        if keyword in COMMAND_LINE_ONLY:
            raise InputError(f"{keyword} is an option of the command only, not of tnt.run.")
        if keyword not in known:
            close = difflib.get_close_matches(keyword, [*known, *others], 1)
            hint = f"Did you mean {close[0]}?" if close else "See tarantella --help."
            raise InputError(f"{keyword} is not an option of tnt.run. {hint}")
        if keyword in OTHER_NAMES:
            raise InputError(f"{keyword} is not an option of tnt.run: use {OTHER_NAMES[keyword]}.")
        if value is not None:
            arguments += _words(keyword, *known[keyword], value)
    return arguments


def _words(keyword: str, name: str, option: Option, value: Any) -> list[str]:
    if not option.metavar:
        if not isinstance(value, bool):
            raise InputError(f"{keyword}={value!r}: {keyword} is either True or False.")
        return [name] if value else []
    if option.repeats:
        if not isinstance(value, Mapping):
            raise InputError(
                f"{keyword}={value!r}: give a dictionary, as in {keyword}={{'NAME': 'value'}}."
            )
        return [name, *(f"{key}={text}" for key, text in value.items())] if value else []
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return [f"{name}={text}"] if name.startswith("--") else [name, str(text)]
