"""The processes of a run on this machine: how to find and end them.

The processes of a run have variables in their environment, which everything that they start
inherits. Without a /proc nothing is found. Only processes of this user count.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tarantella.cli.module_file import is_file, module_file
from tarantella.launch.process_identity import identity, stat_of
from tarantella.runtime import times
from tarantella.runtime.announce import HEARTBEAT, RUN_ID
from tarantella.runtime.launcher import find_launch

SCRIPT = "TNT_SCRIPT"  # what identifies the script of the run: its absolute path
COMMAND = "TNT_COMMAND"  # the process of the command that started it
RUN_VARIABLES = (RUN_ID, SCRIPT, COMMAND, HEARTBEAT)  # what identifies the processes of a run

_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A process of this user.

    Attributes:
        pid: its number
        parent: the number of its parent
        variables: its environment when it was started
    """

    pid: int
    parent: int
    variables: dict[str, str]


def own_processes() -> list[Process]:
    """All processes of this user that we can inspect, except this one and its ancestors."""
    found = {}
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError):  # gone
            if folder.stat().st_uid == os.getuid():
                variables = os.fsdecode((folder / "environ").read_bytes()).split("\0")
                pairs = dict(each.split("=", 1) for each in variables if "=" in each)
                pid = int(folder.name)
                found[pid] = Process(pid, int(stat_of(pid)[1]), pairs)
    pid = os.getpid()
    while pid in found:
        pid = found.pop(pid).parent
    return list(found.values())


def of_run(run_id: str, except_launcher: int | None = None) -> list[Process]:
    """The processes of a run.

    Args:
        run_id: the run
        except_launcher: leave out this process and its children
    """
    return [
        process
        for process in own_processes()
        if process.variables.get(RUN_ID) == run_id
        and except_launcher not in (process.pid, process.parent)
    ]


def known_as(identities: Sequence[str]) -> list[Process]:
    """Those of the processes with these identities that still run."""
    return [process for process in own_processes() if identity(process.pid) in identities]


def of_script(script: str) -> list[Process]:
    """The processes of all runs of a script, started by the command or by an MPI launcher, and
    what they have started.
    """
    everyone = own_processes()
    found = {
        process.pid: process
        for process in everyone
        if process.variables.get(SCRIPT) == script or _is_rank_of(process, script)
    }
    more = list(found.values())
    while more:
        more = [each for each in everyone if each.parent in found and each.pid not in found]
        found.update((each.pid, each) for each in more)
    return list(found.values())


def to_signal(processes: Sequence[Process]) -> list[int]:
    """Where to send a signal so that these end: to the commands that started them, if these run on
    this machine; otherwise to those that none of the others has started.
    """
    named = {process.variables.get(COMMAND, "") for process in processes}
    pids = {process.pid for process in processes}
    commands = {process.parent for process in processes if str(process.parent) in named}
    roots = {process.pid for process in processes if process.parent not in pids | commands}
    return sorted(commands | roots)


def send_signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes that may be gone."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_until_gone(find: Callable[[], list[Process]]) -> None:
    """Kill processes, and those that they still start, and wait until they are gone."""
    deadline = time.monotonic() + times.TIME_TO_BE_KILLED
    while (found := find()) and time.monotonic() < deadline:
        send_signal((process.pid for process in found), signal.SIGKILL)
        time.sleep(times.KILLED_CHECK_INTERVAL)


def _is_rank_of(process: Process, script: str) -> bool:
    """Whether an MPI launcher has started a process that runs the script."""
    if SCRIPT in process.variables or find_launch(process.variables) is None:
        return False
    folder = _PROC / str(process.pid)
    with suppress(OSError):
        words = os.fsdecode((folder / "cmdline").read_bytes()).split("\0")[1:]
        # It may have gone to another directory since it was started.
        for cwd in (process.variables.get("PWD", "/"), str((folder / "cwd").readlink())):
            first = _first_file(words, cwd, process.variables.get("PYTHONPATH", ""))
            if first and os.path.realpath(first) == script:
                return True
    return False


def _first_file(words: Sequence[str], cwd: str, python_path: str) -> str:
    """The script, or the file of the module after `-m`, whatever options the interpreter has."""
    for word, following in pairwise([*words, ""]):
        if word == "-m":
            folders = [cwd, *(Path(cwd, each) for each in python_path.split(os.pathsep) if each)]
            return module_file(following, [str(folder) for folder in folders])
        if word and is_file(Path(cwd, word)):
            return str(Path(cwd, word))
    return ""
