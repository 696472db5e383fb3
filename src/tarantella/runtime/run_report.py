"""What this rank reports of itself to the command: totals every few seconds, and epochs.

The command makes a summary of it, a report, and a warning if a rank is slow. A rank that the
command did not start reports nothing.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tarantella.runtime import ending, times, versions, world
from tarantella.runtime.announce import (
    DESCRIBED,
    EPOCH,
    LONGEST_DATA,
    MEASURED,
    Announcement,
    announce,
    is_run_by_command,
)
from tarantella.runtime.meter import INPUT, METER, Totals

_began, _cpu_before = time.monotonic(), time.process_time()
_descriptor: int | None = None
_reported: Totals | None = None
_epochs = 0


def start(library: str, engine: str) -> None:
    """Tells the command what this rank is, and from now on what it does.

    Args:
        library: The MPI library.
        engine: What sums over the ranks, in words.
    """
    global _descriptor
    if not is_run_by_command():
        return
    _descriptor = os.dup(2)  # the script may close or redirect its own
    ending.before_end(report, by_mpi=False)
    threading.Thread(target=_report_regularly, daemon=True, name="tnt-report").start()
    if world.is_master_rank():
        _tell(DESCRIBED, {"versions": _versions(library), "engine": engine})
    if world.get_size() == 1:
        describe(unseen=[INPUT])


def describe(**what: Any) -> None:
    """Tells the command more of what sums, and what cannot be measured."""
    if world.is_master_rank():
        _tell(DESCRIBED, what)


def is_wanted() -> bool:
    """Whether the command listens to this rank."""
    return _descriptor is not None


def report(**more: Any) -> None:
    """Tells the command what this rank has done so far, if there is anything new.

    Args:
        **more: What else to tell.
    """
    global _reported
    totals = METER.totals()
    if not more and (totals == _reported or not any(totals.parts.values())):
        return
    _reported = totals
    parts = {part: round(seconds, 4) for part, seconds in totals.parts.items()}
    data = {
        "seconds": round(time.monotonic() - _began, 4),
        "steps": totals.steps,
        "samples": totals.samples,
        "parts": parts,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "gpu_memory": _gpu_memory(),
        "cpu_seconds": round(time.process_time() - _cpu_before, 3),
    }
    _tell(MEASURED, data | more)


def report_epoch(
    fit: int, number: int, epochs: int, steps: int, seconds: float, logs: Mapping[str, Any]
) -> None:
    """Tells the command that an epoch has ended; the attributes are those of its `Epoch`."""
    global _epochs
    _epochs += 1
    report(epoch=_epochs)
    if world.is_master_rank():
        data = {"fit": fit, "number": number, "epochs": epochs, "steps": steps}
        numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        _tell(EPOCH, {**data, "seconds": round(seconds, 3), "logs": _that_fit(numbers)})


def _report_regularly() -> None:
    while True:
        time.sleep(times.TIME_BETWEEN_MEASUREMENTS)
        report()


def _that_fit(logs: dict[str, float]) -> dict[str, float]:
    """The first of the logs, as many as an announcement has room for."""
    while len(json.dumps(logs)) > LONGEST_DATA - 200:
        logs.popitem()
    return logs


def _tell(kind: str, data: dict[str, Any]) -> None:
    if _descriptor is not None:
        host, pid = socket.gethostname(), os.getpid()
        announce(Announcement(kind, world.get_rank(), host, pid, data=data), _descriptor)


def _gpu_memory() -> int | None:
    """The most memory of its GPU that this rank has used, in bytes; None without a GPU."""
    tf = sys.modules.get("tensorflow")
    if tf is None or not tf.config.list_logical_devices("GPU"):
        return None
    with suppress(Exception):  # not every allocator counts, and training is more important
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
    return None


def _versions(library: str) -> dict[str, str]:
    found = {name: versions.installed(name) for name in ("TensorFlow", "Keras")}
    ours = sys.modules["tarantella"].__version__
    return {"Tarantella": ours, "Python": platform.python_version(), **found, "MPI": library}
