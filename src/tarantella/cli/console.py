"""What the command itself tells its user, on the error stream."""

from __future__ import annotations

import os
from contextlib import suppress

from tarantella.cli import caller


def show(text: str) -> None:
    """Show a message of the command."""
    _write(f"tarantella: {text}")


def warn(text: str) -> None:
    """Show a warning; callers respect the log level."""
    _write(f"tarantella WARNING: {text}")


def _write(text: str) -> None:
    with suppress(OSError):  # nobody reads it any more
        os.write(2, f"{caller.in_its_words(text)}\n".encode(errors="replace"))
