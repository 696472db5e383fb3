"""The process that has called `tnt.run`, if one did: it started this command, and listens to it.

The function to run is in a file, our standard input: pieces of it go to the master rank when that
asks for them. What the function returns or raises, and what failed, goes back through a pipe.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from tarantella.cli.keywords import in_keywords
from tarantella.cli.outcome import Failure
from tarantella.errors import InputError
from tarantella.launch.supervisor import die_with
from tarantella.runtime.announce import CALLER, FAILED, LONGEST_PIECE, Announcement
from tarantella.runtime.failure import BAD_INPUT

REFUSED = "refused"  # there is no run, because of bad input


def is_there() -> bool:
    """Whether this command was started by `tnt.run`."""
    return CALLER in os.environ


def end_with_it() -> None:
    """Have this command ended when the caller ends, whatever becomes of it."""
    if is_there():
        die_with(_numbers()[0], signal.SIGTERM)


def function_of(program: Sequence[str]) -> str:
    """The name of the function that it runs by this program; empty if nobody has called."""
    return program[1] if is_there() else ""


def in_its_words(message: str) -> str:
    """A message about options as the user has written them: as keywords, if there is a caller."""
    return in_keywords(message) if is_there() else message


def send_piece(launcher: subprocess.Popen[bytes], start: int) -> None:
    """Send the master rank the next piece of the function, through the launcher."""
    if launcher.stdin is not None:
        with suppress(BrokenPipeError):  # it is ending
            launcher.stdin.write(os.pread(0, LONGEST_PIECE, start))


def tell(news: Announcement) -> None:
    """Tell the caller something, if there is one."""
    if is_there():
        line = memoryview(json.dumps(asdict(news)).encode() + b"\n")
        with suppress(OSError):  # it is gone
            while line:
                line = line[os.write(_numbers()[1], line) :]


def tell_failure(failure: Failure, message: str) -> None:
    """Tell the caller which rank failed, and what the command says about it."""
    rank = -1 if failure.rank is None else failure.rank
    told = in_its_words(message)
    tell(Announcement(FAILED, rank, failure.host, os.getpid(), failure.status, told))


def tell_refusal(error: InputError) -> bool:
    """Tell the caller why nothing was run; False if nobody has called."""
    tell(Announcement(REFUSED, -1, "", os.getpid(), BAD_INPUT, in_its_words(str(error))))
    return is_there()


def _numbers() -> tuple[int, int]:
    """The process of the caller, and our descriptor of the pipe to it."""
    process, _, descriptor = os.environ[CALLER].partition(":")
    return int(process), int(descriptor)
