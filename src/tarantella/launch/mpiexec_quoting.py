"""Quotes an argument that is a single colon: every mpiexec takes it for the start of a program.

It gets a backslash in front, and so does an argument that would be mistaken for a quoted one.
Standard library only.
"""

from __future__ import annotations

import re


def escaped(arguments: list[str]) -> list[str]:
    """The arguments, safe for mpiexec."""
    return ["\\" + text if re.fullmatch(r"\\*:", text) else text for text in arguments]


def unescaped(arguments: list[str]) -> list[str]:
    """The arguments as they were."""
    return [text[1:] if re.fullmatch(r"\\+:", text) else text for text in arguments]
