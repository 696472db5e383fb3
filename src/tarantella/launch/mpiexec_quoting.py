"""A colon alone as an argument: every mpiexec takes it as the start of a second program.

Such an argument travels with a backslash in front, and so does one that would be mistaken for it
then. Standard library only.
"""

from __future__ import annotations

import re


def escaped(arguments: list[str]) -> list[str]:
    """The arguments as mpiexec can carry them."""
    return ["\\" + text if re.fullmatch(r"\\*:", text) else text for text in arguments]


def unescaped(arguments: list[str]) -> list[str]:
    """The arguments as they were."""
    return [text[1:] if re.fullmatch(r"\\+:", text) else text for text in arguments]
