"""Processes of a run that are still there when it is over, found by a mark in their environment."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from tarantella.runtime.announce import RUN_ID

_PATIENCE = 2.0  # seconds until a killed process is gone


def find_processes(run_id: str, except_launcher: int | None = None) -> list[int]:
    """The processes of a run on this machine; none where there is no /proc to look into.

    Args:
        run_id: the mark of the run
        except_launcher: leave out this process and its children
    """
    mark = f"{RUN_ID}={run_id}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if pid == os.getpid():
            continue
        with suppress(OSError):  # gone, or of another user
            variables = (folder / "environ").read_bytes().split(b"\0")
            if mark in variables and except_launcher not in (pid, _parent(folder)):
                found.append(pid)
    return found


def _parent(folder: Path) -> int:
    """The parent of a process; its name, in brackets, may contain anything."""
    return int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])


def kill_processes(run_id: str, except_launcher: int | None = None) -> None:
    """Kill the processes of a run, and those they start meanwhile, and wait until they are gone."""
    deadline = time.monotonic() + _PATIENCE
    while (found := find_processes(run_id, except_launcher)) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
