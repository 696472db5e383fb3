"""Output of progress and callbacks: of the master rank only, or of every rank with its number.

Without a terminal, as in a batch job, it comes in lines, without the control characters that make a
progress bar move. What the user prints outside of `fit`, `evaluate` and `predict` is not touched.
"""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

from tarantella.runtime import world
from tarantella.runtime.announce import is_run_by_command
from tarantella.runtime.configuration import configuration

_MOVES = re.compile(r"([\r\b])")
_CONTROL = re.compile(r"[\r\b\x1b]")
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Line:
    """A line of a terminal that is being written: new text replaces what is under the cursor."""

    def __init__(self) -> None:
        self._text = ""
        self._cursor = 0

    def write(self, text: str) -> None:
        for piece in _MOVES.split(_COLOURS.sub("", text)):
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


class Lines(io.TextIOBase):
    """Writes whole lines to another stream, one call each, with a prefix in front.

    A progress bar that rewrites its line again and again is shown as it was at the end. Without a
    prefix, text that has no control characters is written as it is.
    """

    def __init__(self, stream: TextIO, prefix: str = "") -> None:
        super().__init__()
        self._stream = stream
        self._prefix = prefix
        self._line = Line()
        self._pending = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def buffer(self) -> Any:
        """For bytes, which are written as they are."""
        return self._stream.buffer

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        if not (self._prefix or self._pending or _CONTROL.search(text)):
            return self._stream.write(text)
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
        """Shows a line that has not ended yet."""
        if self._pending:
            self._end_line()

    def _end_line(self) -> None:
        self._stream.write(f"{self._prefix}{self._line.take()}\n")
        self._stream.flush()
        self._pending = False


def shown(verbose: Any) -> Any:
    """What this rank shows of its progress if Keras is asked for `verbose`.

    "auto" is a progress bar on a terminal, and a line for each epoch elsewhere.
    """
    if not world.is_master_rank() and not configuration().output_on_all_devices:
        return 0
    if verbose != "auto":
        return verbose
    return 1 if has_terminal() and not _names_ranks() else 2


def _names_ranks() -> bool:
    return configuration().output_on_all_devices and world.get_size() > 1


def has_terminal() -> bool:
    """Whether this process prints to a terminal, or where control characters work."""
    if configuration().terminal is not None:
        return bool(configuration().terminal)
    if "ipykernel" in sys.modules or "PYCHARM_HOSTED" in os.environ:
        return True
    return sys.stdout is not None and sys.stdout.isatty()


class _Users:
    """The threads in `progress_output` with one stream as `sys.stdout`; the last one restores it.

    Args:
        restore: Undoes what was done for them.
    """

    def __init__(self, restore: ExitStack) -> None:
        self.number = 0
        self.restore = restore


_lock = threading.Lock()
_users: dict[int, _Users] = {}  # by the id of the stream


@contextmanager
def progress_output() -> Iterator[None]:
    """Shows what is printed inside only where it should be seen.

    The master rank, and a serial run, print and warn as usual. Other ranks are silent; with
    `TNT_OUTPUT_ON_ALL_DEVICES`, every rank prints with its number in front of each line.
    `sys.stdout` is that of all threads: the last one to leave restores it.
    """
    with _lock:
        if id(sys.stdout) not in _users:
            restore = ExitStack()
            restore.enter_context(_printing_where_it_is_seen())
            _users[id(sys.stdout)] = _Users(restore)
        stream = sys.stdout  # lives as long as its id is known
        users = _users[id(stream)]
        users.number += 1
    try:
        yield
    finally:
        with _lock:
            users.number -= 1
            if users.number == 0:
                del _users[id(stream)]
                users.restore.close()


@contextmanager
def _printing_where_it_is_seen() -> Iterator[None]:
    if sys.stdout is None:
        yield
    elif _names_ranks():
        # Under the command, all output of a rank gets the prefix, not only what it prints in here.
        with _printing_lines("" if is_run_by_command() else f"[rank {world.get_rank()}] "):
            yield
    elif not world.is_master_rank():
        with Silence() as silence, _printing_to(silence), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the master rank gives the same ones
            yield
    elif has_terminal():
        yield
    else:
        with _printing_lines():
            yield


@contextmanager
def _printing_lines(prefix: str = "") -> Iterator[None]:
    lines = Lines(sys.stdout, prefix)
    with _printing_to(lines):
        try:
            yield
        finally:
            lines.finish()


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
