"""`--cleanup`: ends the runs of a script, wherever they were started from."""

from __future__ import annotations

import sys
from pathlib import Path

from tarantella.cli.check import explain
from tarantella.cli.host_cleanup import HOST_CLEANUP
from tarantella.cli.options import Options
from tarantella.cli.program import identity_of
from tarantella.cli.remote import Answer, ask_all
from tarantella.cli.schedulers import Allocation
from tarantella.errors import InputError
from tarantella.runtime import times

_DAY = 24 * 60 * 60


def clean_up(options: Options, allocation: Allocation, seconds: int) -> int:
    """End the processes of all runs of a script on these hosts; returns the exit status."""
    if not Path("/proc").is_dir():
        raise InputError(
            "--cleanup needs a system with /proc to find the processes: end them by hand here."
        )
    script = identity_of(options)
    question = {"script": script, "action": "count", "seconds": _DAY}
    # All are counted before the first is ended, because a run ends on all hosts at once.
    before = ask_all(allocation, HOST_CLEANUP, question, seconds)
    question["action"] = "kill" if options.force else "ask"
    after = ask_all(allocation, HOST_CLEANUP, question, seconds + int(times.TIME_TO_CLEAN_UP))
    for host in allocation.hosts:
        line = _line(host, before[host], after[host], script, seconds, allocation.name)
        print(f"tarantella: {line}", file=sys.stderr)
    return 0 if all(answer.content == 0 for answer in after.values()) else 1


def _line(
    host: str, before: Answer, after: Answer, script: str, seconds: int, scheduler: str
) -> str:
    if before.content is None or after.content is None:
        silent = before if before.content is None else after
        return f"host {host} {explain(host, silent, seconds, scheduler)[1]}"
    if before.content == 0 and after.content == 0:
        return f"no process of {script} is running on host {host}."
    ended = f"ended {_count(max(0, before.content - after.content))} of {script} on host {host}"
    if after.content:
        return f"{ended}; {_count(after.content)} did not end: use --force to kill them."
    return f"{ended}."


def _count(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
