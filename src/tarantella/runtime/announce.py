"""What a rank tells the command that started it: marked lines on its error stream.

The error stream is the one channel that every MPI launcher carries home from every host. The
command takes the marked lines out of it, so that nobody sees them. Standard library only.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass

RUN_ID = "TNT_RUN_ID"

STARTED = "started"  # a rank's process is there
FAILED = "failed"  # a script ended with an error, and says which
FINISHED = "finished"  # a script came to its end
ENDED = "ended"  # a rank's process is gone, however it went

_LONGEST_CAUSE = 500  # keeps a line short enough to be written to a pipe in one piece


@dataclass(frozen=True)
class Announcement:
    """One message of a rank.

    Attributes:
        kind: one of the words above
        rank: the rank that speaks
        host: name of its host
        pid: the process that the message is about
        status: its exit status; the number of a signal that ended it, negative
        cause: why it failed, in one line
    """

    kind: str
    rank: int
    host: str
    pid: int
    status: int = 0
    cause: str = ""


def mark(run_id: str) -> bytes:
    """How the marked lines of a run begin."""
    return b"\x1etarantella:" + run_id.encode() + b":"


def announce(announcement: Announcement, descriptor: int = 2) -> None:
    """Tell the command; does nothing in a run that was not started by it."""
    run_id = os.environ.get(RUN_ID)
    if not run_id:
        return
    content = asdict(announcement)
    content["cause"] = announcement.cause[:_LONGEST_CAUSE]
    with suppress(OSError):  # nobody listens any more
        os.write(descriptor, mark(run_id) + json.dumps(content).encode() + b"\n")


def parse(line: bytes, run_id: str) -> Announcement:
    """The announcement in a marked line."""
    return Announcement(**json.loads(line[len(mark(run_id)) :]))
