"""What a rank announces to the command that started it: special lines on its error stream.

The error stream is the one channel that every MPI launcher forwards from every host. The command
takes these lines out of it, so that nobody sees them. Ranks and supervisors write them, the command
reads them. Standard library only.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys
import termios
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from tarantella.runtime import times

RUN_ID = "TNT_RUN_ID"
RESTARTS = "TNT_RESTARTS"  # how often the run was restarted
HEARTBEAT = "TNT_HEARTBEAT"  # seconds between two heartbeats, in runs on several hosts
CALLER = "TNT_CALLER"  # the process that has called `tnt.run`, and the descriptor it listens at
ONE_BY_ONE = "TNT_ONE_BY_ONE"  # set for launchers that tear lines apart

STARTED = "started"  # a rank's process runs
ALIVE = "alive"  # it still does
PRINTED = "printed"  # output to be shown, with the rank in front
PRINTED_LAST = "printed last"  # output to be shown if this rank turns out to have failed
ON_CPU = "on cpu"  # TensorFlow does not find the GPU that is planned for it
JOINS = "joins"  # it waits for all the others for the first time
JOINED = "joined"  # they have arrived
WAITS = "waits"  # it has waited for other ranks for too long
ELSEWHERE = "elsewhere"  # it has kept the others waiting for too long, and says where it is
TRAINS_ALONE = "trains alone"  # it trains the plain model of a tnt.Model
ASKS = "asks"  # it asks for the next piece of the function that `tnt.run` sends
REPLIES = "replies"  # a piece of what that function has returned or raised
STOPPED = "stopped"  # a signal has stopped it
RESUMED = "resumed"  # another one lets it continue
LEAVES = "leaves"  # it was asked to end, and takes some time for it
SHORT_OF_MEMORY = "short of memory"  # it is about to end, and memory is the likely cause
FAILED = "failed"  # its script ended with an error
FINISHED = "finished"  # its script reached its end
ENDED = "ended"  # its process has ended, in whatever way
WARNED = "warned"  # it has shown a warning
DESCRIBED = "described"  # the versions that it uses, and what sums
MEASURED = "measured"  # what it has done since its start, in numbers
EPOCH = "epoch"  # an epoch has ended, and what its logs say

# These keep a line short enough to be written to a pipe in one piece.
_LONGEST_CAUSE = 500
_LONGEST_PRINT = 2700
LONGEST_DATA = 3000  # in characters of JSON
# What a rank gets when it asks, in bytes. It has to fit into the pipe to the rank: MPICH's launcher
# gives up otherwise.
LONGEST_PIECE = 1 << 15


@dataclass(frozen=True)
class Announcement:
    """One announcement of a rank.

    Attributes:
        kind: one of the words above
        rank: the rank
        host: the name of its host
        pid: the process that this is about
        status: its exit status; the number of the signal that ended it, negated, or that stopped
            it; the seconds that it has waited, or will take to leave; the number of GPUs that
            TensorFlow finds; how many bytes of a function it has
        cause: why it failed, in one line; why it ended, if the reason lies elsewhere; what
            it waits in; the name of the model that it trains; what it warns of;
            why memory is the likely cause
        place: where it is in its script, and in which call
        launcher: the identity of the launcher's process that started it
        stream: where it printed something: 1 or 2
        text: what it has printed, or replies, in base64
        data: numbers and words, by name
    """

    kind: str
    rank: int
    host: str
    pid: int
    status: int = 0
    cause: str = ""
    launcher: str = ""
    stream: int = 0
    text: str = ""
    place: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def printed(self) -> bytes:
        return b64decode(self.text)


def say(text: str, descriptor: int) -> None:
    """Show a line to the user, on a stream that the script can neither close nor redirect."""
    with suppress(OSError):  # nobody listens any more
        os.write(descriptor, f"{text}\n".encode(errors="replace"))


def trained_alone(model: str, place: str, ranks: int) -> str:
    """What to say about ranks that train the plain model of a tnt.Model."""
    return (
        f"{place} trains the plain model '{model}', not the one that tnt.Model returned: each of "
        f"the {ranks} ranks trains on all of the data by itself. Use what tnt.Model returns, "
        "`model = tnt.Model(model)`; to train one on each rank on purpose, use a copy, "
        "`keras.models.clone_model(model)`."
    )


def line_start(run_id: str) -> bytes:
    """How the announcements of a run begin."""
    return b"\x1etarantella:" + run_id.encode() + b":"


def prints(kind: str, rank: int, host: str, stream: int, printed: bytes) -> Iterator[Announcement]:
    """The announcements that carry what a rank has printed."""
    for start in range(0, len(printed), _LONGEST_PRINT):
        text = b64encode(printed[start : start + _LONGEST_PRINT]).decode()
        yield Announcement(kind, rank, host, os.getpid(), stream=stream, text=text)


def is_run_by_command() -> bool:
    """Whether the command started this process, and listens to it."""
    return bool(os.environ.get(RUN_ID))


def announce(announcement: Announcement, descriptor: int = 2) -> None:
    """Tell the command; does nothing in a run that it did not start."""
    run_id = os.environ.get(RUN_ID)
    if not run_id:
        return
    content = asdict(announcement)
    content["cause"] = announcement.cause[:_LONGEST_CAUSE]
    content["place"] = announcement.place[-_LONGEST_CAUSE:]
    send(line_start(run_id) + json.dumps(content).encode() + b"\n", descriptor)


def send(line: bytes, descriptor: int = 2) -> None:
    """Write an announcement so that it arrives in one piece.

    Some launchers forward what they find in the pipe in pieces of a few kilobytes, and a piece
    from another rank may come in between. A line that is alone in the pipe is one piece.
    """
    with suppress(OSError):  # nobody listens any more
        deadline = time.monotonic() + (
            times.TIME_FOR_EMPTY_PIPE if os.environ.get(ONE_BY_ONE) else 0
        )
        while _unread(descriptor) and time.monotonic() < deadline:
            time.sleep(times.PIPE_CHECK_INTERVAL)
        os.write(descriptor, line)


def parse(line: bytes, run_id: str) -> Announcement:
    """The announcement in a line."""
    return Announcement(**json.loads(line[len(line_start(run_id)) :]))


def _unread(descriptor: int) -> int:
    """How many bytes are in a pipe; 0 for what is not a pipe."""
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return 0
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
