"""The line that MPICH prints before it ends all ranks. Standard library only.

A supervisor finds it in what its rank prints, unless that goes to the launcher directly, as with
the master rank: then the command finds it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(rb"Abort\((?P<code>-?\d+)\) on node (?P<rank>\d+) .*?: (?P<reason>.*)\n?")


@dataclass(frozen=True)
class Abort:
    """An abort of the run by a rank, or by an error in MPICH on that rank.

    Attributes:
        line: what MPICH printed
        start: where the line starts in the text
        rank: the rank
        code: its error code
        reason: why, in MPICH's words
    """

    line: bytes
    start: int
    rank: int
    code: int
    reason: str

    @property
    def end(self) -> int:
        return self.start + len(self.line)

    @property
    def is_call(self) -> bool:
        """Whether the program called MPI_Abort, and MPICH has nothing to add."""
        return "called MPI_Abort" in self.reason


def find_abort(text: bytes) -> Abort | None:
    """The first such line in a text."""
    match = _LINE.search(text)
    if match is None:
        return None
    reason = match["reason"].decode(errors="replace")
    return Abort(match[0], match.start(), int(match["rank"]), int(match["code"]), reason)


def exit_status(code: int) -> int:
    """The exit status of a run that was aborted with an error code; never 0."""
    return code & 0xFF or 1
