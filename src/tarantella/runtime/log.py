"""The library's own messages: the logger "tarantella", shown on the error stream."""

from __future__ import annotations

import logging
import os
import socket
import sys

from tarantella.runtime.announce import (
    PRINTED,
    WARNED,
    Announcement,
    announce,
    is_run_by_command,
    prints,
)
from tarantella.runtime.configuration import Configuration

LOGGER = logging.getLogger("tarantella")
FORMAT = "tarantella %(levelname)s: %(message)s"


class RankPrefixFormatter(logging.Formatter):
    """Puts a prefix, such as the rank, in front of every line of a message."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__(FORMAT)
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(self._prefix + line for line in super().format(record).splitlines())


class ToCommand(logging.Handler):
    """Makes the command show a message, with the rank in front of each line.

    What a rank prints itself is shown by other rules, and perhaps not at all.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._host = socket.gethostname()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _tell_of_warning(record, self._rank)
            text = (self.format(record) + "\n").encode(errors="replace")
            for news in prints(PRINTED, self._rank, self._host, 2, text):
                announce(news)
        except Exception:
            self.handleError(record)


class ErrorStream(logging.Handler):
    """Writes to what `sys.stderr` is at the time of the message, in one call."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _tell_of_warning(record, self._rank)
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def _tell_of_warning(record: logging.LogRecord, rank: int) -> None:
    """Tells the command of a warning, which it keeps in its record of the run."""
    if record.levelno >= logging.WARNING:
        text, host = record.getMessage(), socket.gethostname()
        announce(Announcement(WARNED, rank, host, os.getpid(), cause=text))


def configure(configuration: Configuration, rank: int, size: int) -> None:
    """Shows the messages of this rank, or hides them.

    A level or a handler that the user has given the logger stays.
    """
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(configuration.log_level)
    if LOGGER.handlers:
        return
    LOGGER.propagate = False  # the user's own logging would show each message a second time
    LOGGER.addHandler(_handler(configuration, rank, size))


def _handler(configuration: Configuration, rank: int, size: int) -> logging.Handler:
    if rank != 0 and not configuration.log_on_all_devices:
        return logging.NullHandler()
    names_rank = configuration.log_on_all_devices and size > 1
    if names_rank and is_run_by_command():
        handler: logging.Handler = ToCommand(rank)
        handler.setFormatter(RankPrefixFormatter())
    else:
        handler = ErrorStream(rank)
        handler.setFormatter(RankPrefixFormatter(f"[rank {rank}] " if names_rank else ""))
    return handler
