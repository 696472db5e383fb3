"""Runs a command of a shell on a host, as ssh does, but by the scheduler whose job this is.

For launchers that know ssh, and may be told of another program in its place. Standard library only.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from tarantella.cli.schedulers import find_allocation
from tarantella.runtime import times


def main(arguments: list[str]) -> NoReturn:
    """Become the program that runs it: the first word is the host, the others are the command."""
    host, *words = arguments
    allocation = find_allocation(os.environ)
    if allocation is None:
        sys.exit(f"tarantella: there is no job to reach host {host} in.")
    command = allocation.on_host(host, ["/bin/sh", "-c", " ".join(words)], times.TIME_TO_REACH_HOST)
    os.execvp(command[0], command)
