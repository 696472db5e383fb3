"""Ends the processes of a run on one host, and says how many are left.

The command runs this on every host: for `--cleanup`, and after a run that did not end by itself.
Standard library only.
"""

from __future__ import annotations

import signal
import socket
import time
from typing import Any

from tarantella.cli import processes
from tarantella.cli.processes import Process
from tarantella.cli.remote import answer
from tarantella.launch.mpi_leftovers import remove_leftovers
from tarantella.runtime import times

HOST_CLEANUP = "cli.host_cleanup"  # the name of this module for `entry`


def main(arguments: list[str]) -> int:
    return answer(clean_up_host)


def clean_up_host(question: dict[str, Any]) -> int:
    """End the processes of a run, given by its `run_id` and its `launchers`, or its `script`.

    The `action` is "ask" to ask them to end, and give them some time, "kill", or "count". Files
    that the MPI library has left are removed if they are not older than `seconds`.

    Returns:
        How many there are now.
    """

    def find() -> list[Process]:
        if "run_id" in question:
            launchers = question["launchers"].get(socket.gethostname(), [])
            return processes.of_run(question["run_id"]) + processes.known_as(launchers)
        return processes.of_script(question["script"])

    found = find()
    if question["action"] == "kill":
        processes.kill_until_gone(find)
    elif question["action"] == "ask":
        # The command of a run ends everything that it has started.
        processes.send_signal(processes.to_signal(found), signal.SIGTERM)
        deadline = time.monotonic() + times.TIME_TO_CLEAN_UP
        while find() and time.monotonic() < deadline:
            time.sleep(times.CLEANUP_CHECK_INTERVAL)
    else:
        return len(found)
    remain = find()
    if not remain:
        remove_leftovers(question["seconds"])
    return len(remain)
