"""What becomes of a rank's output: shown, kept in a file, announced, or held in case it fails.

Announcements and MPICH's abort line are found in it on the way. Standard library only.
"""

from __future__ import annotations

import os
from contextlib import suppress

from tarantella.launch.mpich_abort import Abort, exit_status, find_abort
from tarantella.launch.output_tail import OutputTail
from tarantella.runtime.announce import (
    FAILED,
    PRINTED,
    PRINTED_LAST,
    RUN_ID,
    Announcement,
    announce,
    line_start,
    prints,
    send,
)
from tarantella.runtime.configuration import configuration


class RankOutput:
    """The output of a rank's program, on its way to the command.

    Args:
        rank: the rank
        host: the name of this host
        pid: the process of the program
        is_open: whether what it prints is shown unchanged
        kept: the file for all that it prints, if any
    """

    def __init__(self, rank: int, host: str, pid: int, is_open: bool, kept: int | None) -> None:
        self._rank = rank
        self._host = host
        self._pid = pid
        self._is_open = is_open
        self._kept = kept
        self._line_start = line_start(os.environ.get(RUN_ID, ""))
        self._unparsed = b""  # the start of an announcement of the program
        self._tail = OutputTail()

    def add(self, stream: int, data: bytes) -> None:
        """Take the next piece of a stream; announcements in it are always forwarded."""
        if stream == 2:
            data, self._unparsed = self._unparsed + data, b""
            while (start := data.find(self._line_start)) >= 0:
                end = data.find(b"\n", start)
                if end < 0:
                    self._unparsed = data[start:]
                    data = data[:start]
                    break
                self._show(2, data[:start])
                self._forward(data[start : end + 1])
                data = data[end + 1 :]
            if abort := find_abort(data):
                self._show(2, data[: abort.start])
                self._announce_abort(abort)
                data = data[abort.end :]
        self._show(stream, data)

    def announce_tail(self) -> None:
        """The rank has failed: announce what it has printed last, if that was not shown."""
        for stream, data in self._tail.take():
            for news in prints(PRINTED_LAST, self._rank, self._host, stream, data):
                announce(news)

    def _announce_abort(self, abort: Abort) -> None:
        """Tell of an abort at once: MPICH may end this process, too, before the rank has ended."""
        self._show(2, b"" if abort.is_call else abort.line)
        self.announce_tail()
        cause = "it called MPI_Abort" if abort.is_call else abort.reason
        status = exit_status(abort.code)
        announce(Announcement(FAILED, self._rank, self._host, self._pid, status, cause))

    def _show(self, stream: int, data: bytes) -> None:
        if self._kept is not None:
            _write(self._kept, data)  # a full disk does not end the run
        if self._is_open:
            _write(stream, data)
            return
        if not configuration().output_on_all_devices:
            self._tail.add(stream, data)
            return
        for news in prints(PRINTED, self._rank, self._host, stream, data):
            announce(news)

    def _forward(self, line: bytes) -> None:
        if f'"kind": "{FAILED}"'.encode() in line:
            self.announce_tail()
        send(line)


def _write(descriptor: int, data: bytes) -> None:
    with suppress(OSError):  # nobody reads it any more, or a disk is full
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
