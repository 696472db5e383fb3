"""How a rank ends: with all others, or, after a failure, at once and for all of them.

Under the command, `launch.script` runs the user's script and sees how it ends; here only MPI is
finalized. With `mpiexec -n 2 python script.py` Python itself runs the script, and hooks tell us how
it ends: one for uncaught exceptions, one in `sys.exit`, and one at shutdown.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from tarantella.runtime import failure

# `launch.script` is in `sys.modules` under this name while it runs a script for the command.
RUN_BY_COMMAND = "_tarantella_script"

_pid = 0
_uncaught_exit: int | None = None
_last_things: list[tuple[Callable[[], None], bool]] = []


class Exit(SystemExit):
    """A SystemExit that notices when nobody catches it.

    Python ends on it without calling any hook that knows the status, and the other ranks would
    wait forever. But it deletes the exception after the last frame of the program and before the
    functions of `atexit`: deleted without a frame below, it was not caught. One that was caught,
    as many programs do with the exit of a command-line parser, is deleted inside some function. A
    bare `raise SystemExit(3)` goes unnoticed.
    """

    def __del__(self) -> None:
        global _uncaught_exit
        if sys._getframe().f_back is None:
            _uncaught_exit = failure.exit_status(self)


def install() -> None:
    """From now on, this process ends with all other ranks, or takes them down with it."""
    global _pid
    if _pid:
        return
    _pid = os.getpid()
    atexit.register(_finalize)
    if RUN_BY_COMMAND in sys.modules:
        return
    _install_exception_hook()
    _install_exit_hook()


def before_end(function: Callable[[], None], by_mpi: bool = True) -> None:
    """Registers a function to call on every rank when all end normally, before MPI ends.

    Args:
        function: The function.
        by_mpi: Whether it communicates; it is not called if the script has finalized MPI itself.
    """
    _last_things.append((function, by_mpi))


def _install_exception_hook() -> None:
    shown_before = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # With a frame below, a library only prints an error, like h5py if it cannot close a file.
        # A Python shell goes on after an error.
        is_shell = hasattr(sys, "ps1") or sys.flags.interactive
        uncaught = sys._getframe().f_back is None and not is_shell
        ours = failure.running_mpi() or failure.is_ours(error)
        if uncaught and ours and os.getpid() == _pid:
            sys.excepthook = shown_before  # which `fail` calls
            sys.exit(failure.fail(error))
        shown_before(kind, error, trace)  # a serial run, or a forked process

    sys.excepthook = report


def _install_exit_hook() -> None:
    def leave(status: object = None, /) -> NoReturn:
        raise Exit(status)

    leave.__doc__ = sys.exit.__doc__
    sys.exit = leave
    with suppress(ImportError):  # `exit` and `quit`, where Python has them
        from _sitebuiltins import Quitter

        Quitter.__call__ = lambda _, code=None: leave(code)  # type: ignore[method-assign, assignment]


def _finalize() -> None:
    """Finalize MPI together with the others; after `sys.exit(3)`, abort at once."""
    if os.getpid() != _pid:
        return  # a forked process must not touch MPI
    if _uncaught_exit:
        failure.abort(_uncaught_exit)
    mpi = failure.running_mpi()
    for function, by_mpi in _last_things:
        if mpi is not None or not by_mpi:
            function()
    if mpi is not None:
        mpi.Finalize()
