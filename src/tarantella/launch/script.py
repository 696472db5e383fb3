"""Runs the user's script or module as `__main__`, as Python would, and announces how it ends."""

from __future__ import annotations

import atexit
import builtins
import os
import socket
import sys
from importlib.machinery import SourceFileLoader
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType

from tarantella.launch.module import find_module
from tarantella.runtime import ending, failure, imports, launcher, versions
from tarantella.runtime.announce import FINISHED, Announcement, announce, say
from tarantella.runtime.configuration import configuration

# Each of these is loaded when a script first uses what is in it.
_MODULES_THAT_DIVIDE_WORK = (
    "tarantella.keras.model",
    "tarantella.keras.optimizers",
    "tarantella.keras.distributed_dataset",
    "tarantella.comm.collectives",
)


def main(arguments: list[str]) -> int:
    """Run a script with its arguments; returns the exit status."""
    # The script becomes `__main__` below: this keeps our module alive, and `ending` looks for it.
    sys.modules[ending.RUN_BY_COMMAND] = sys.modules["__main__"]
    pid = os.getpid()
    descriptor = os.dup(2)  # the script may close or redirect its own
    finished = False

    def announce_end() -> None:
        if finished and os.getpid() == pid:
            rank = launcher.rank_by_launcher()
            announce(Announcement(FINISHED, rank, socket.gethostname(), pid), descriptor)

    # Registered first, called last: after the script's own functions, and after MPI has ended.
    atexit.register(announce_end)
    _print_whole_lines()
    imports.before_import("keras", versions.check_backend)
    try:
        run(arguments)
    except BaseException as error:
        if os.getpid() != pid:  # a process that the script forked
            failure.show(error)
            return failure.exit_status(error)
        if failure.exit_status(error) != 0 or not isinstance(error, SystemExit):
            return failure.fail(error, descriptor)
    _warn_of_ranks_that_work_alone(descriptor)
    finished = True
    return 0


def run(arguments: list[str]) -> None:
    """Run a script, or, after `-m`, a module, in a module of its own with the name `__main__`."""
    is_module = arguments[0] == "-m"
    # As in Python, `-m` stands for the path of a module until that is known.
    sys.argv[:] = ["-m", *arguments[2:]] if is_module else arguments
    script = Path(arguments[0])
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path.insert(0, str(Path.cwd() if is_module else script.resolve().parent))
    if is_module:
        found = find_module(arguments[1])
        sys.argv[0] = found.path
        code, attributes = found.code, found.attributes
    else:
        path = str(script.absolute())
        code = compile(script.read_bytes(), path, "exec", dont_inherit=True)
        loader = SourceFileLoader("__main__", path)
        attributes = {"__file__": path, "__loader__": loader, "__cached__": None}
    module = ModuleType("__main__")
    module.__dict__.update(__annotations__={}, __builtins__=builtins, **attributes)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _warn_of_ranks_that_work_alone(descriptor: int) -> None:
    """Warn, once, if every rank has trained on its own: one of two lines may be missing."""
    launch = launcher.find_launch()
    size = 1 if launch is None else launch.size or 1
    divides = any(name in sys.modules for name in _MODULES_THAT_DIVIDE_WORK)
    if size == 1 or divides or "keras" not in sys.modules or launcher.rank_by_launcher() != 0:
        return
    if configuration().log_level != "ERROR":
        say(
            f"tarantella WARNING: The script has not used tnt.Model: each of the {size} ranks has "
            "done all of the work by itself. To divide it, use `import tarantella as tnt` and "
            "`model = tnt.Model(model)` before `compile`.",
            descriptor,
        )


def _print_whole_lines() -> None:
    """Show each line as soon as it is complete, and in one piece.

    By default, lines of a rank would be shown late, as its output is not a terminal; unbuffered,
    they would be mixed with those of other ranks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
