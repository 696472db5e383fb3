"""Runs a shell command on a host, as ssh does, but through the scheduler of this job.

For launchers that use ssh, but let us name another program. Standard library only.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from tarantella.cli.schedulers import find_allocation
from tarantella.runtime import times


def main(arguments: list[str]) -> NoReturn:
    """Become the program that runs it; the first argument is the host, the others the command."""
    host, *words = arguments
    allocation = find_allocation(os.environ)
    if allocation is None:
        sys.exit(f"tarantella: host {host} cannot be reached: this is not a scheduler job.")
    command = allocation.on_host(host, ["/bin/sh", "-c", " ".join(words)], times.TIME_TO_REACH_HOST)
    os.execvp(command[0], command)
