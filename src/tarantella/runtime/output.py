"""Progress and callback output: from the master rank only, or from every rank, marked.

What the user prints outside of `fit`, `evaluate` and `predict` is not touched.
"""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from tarantella.runtime import world
from tarantella.runtime.configuration import configuration

_MOVES = re.compile(r"([\r\b])")


class Line:
    """A line of a terminal that is being written: new text replaces what is under the cursor."""

    def __init__(self) -> None:
        self._text = ""
        self._cursor = 0

    def write(self, text: str) -> None:
        for piece in _MOVES.split(text):
            if piece == "\r":
                self._cursor = 0
            elif piece == "\b":
                self._cursor = max(0, self._cursor - 1)
            else:
                end = self._cursor + len(piece)
                self._text = self._text[: self._cursor] + piece + self._text[end:]
                self._cursor = end

    def take(self) -> str:
        """The text as a reader would see it; the line is empty then."""
        text = self._text
        self._text, self._cursor = "", 0
        return text


class MarkedStream(io.TextIOBase):
    """Passes whole lines on to another stream, one call each, with a mark in front.

    A progress bar that rewrites its line again and again is shown as it was at the end.
    """

    def __init__(self, stream: TextIO, mark: str) -> None:
        super().__init__()
        self._stream = stream
        self._mark = mark
        self._line = Line()
        self._pending = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        *finished, rest = text.split("\n")
        for piece in finished:
            self._line.write(piece)
            self._end_line()
        self._line.write(rest)
        self._pending = self._pending or bool(rest)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def finish(self) -> None:
        """Show a line that has no end yet."""
        if self._pending:
            self._end_line()

    def _end_line(self) -> None:
        self._stream.write(f"{self._mark}{self._line.take()}\n")
        self._stream.flush()
        self._pending = False


def shows_output() -> bool:
    """Whether this rank shows its progress and callback output."""
    return world.is_master_rank() or configuration().output_on_all_devices


@contextmanager
def rank_output() -> Iterator[None]:
    """Show what is printed inside only where it should be seen.

    The master rank, and a serial run, print and warn as ever. Other ranks do not; or, with
    `TNT_OUTPUT_ON_ALL_DEVICES`, every rank prints with its number in front of each line.
    """
    if isinstance(sys.stdout, MarkedStream | Silence) or world.get_size() == 1:
        yield
    elif configuration().output_on_all_devices:
        marked = MarkedStream(sys.stdout, f"[rank {world.get_rank()}] ")
        with _printing_to(marked):
            try:
                yield
            finally:
                marked.finish()
    elif world.is_master_rank():
        yield
    else:
        with Silence() as silence, _printing_to(silence), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the master rank gives the same ones
            yield


class Silence(io.TextIOWrapper):
    """A stream that nobody reads."""

    def __init__(self) -> None:
        nothing = open(os.devnull, "wb")  # noqa: SIM115, PTH123
        super().__init__(nothing, encoding="utf-8", errors="replace")


@contextmanager
def _printing_to(stream: io.TextIOBase) -> Iterator[None]:
    before = sys.stdout
    sys.stdout = stream
    try:
        yield
    finally:
        if sys.stdout is stream:
            sys.stdout = before
