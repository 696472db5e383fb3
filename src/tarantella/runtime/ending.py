"""The hooks that end a rank properly when it is started as `mpiexec -n 2 python script.py`.

Under the command, `script` sees how the user's script ends and none of this is needed but the
last function. Here Python itself runs the script, and lets us in at three places: before it
prints an uncaught exception, in `sys.exit`, and when it shuts down.
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

# The name under which the module is known that runs the script for the command.
RUN_BY_COMMAND = "_tarantella_script"

_pid = 0
_uncaught_exit: int | None = None
_last_things: list[tuple[Callable[[], None], bool]] = []


class Exit(SystemExit):
    """A SystemExit that notices when nobody catches it. A bare `raise SystemExit(3)` does not.

    Python ends quietly on it and gives no hook that would know the status. But it drops the
    exception only after the last frame of the program is gone, and before it runs the functions
    of `atexit`: dropped with no frame below, it went through to the top. One that was caught, as
    many programs do with the exit of a command-line parser, is dropped inside some function.
    """

    def __del__(self) -> None:
        global _uncaught_exit
        if sys._getframe().f_back is None:
            _uncaught_exit = failure.exit_status(self)


def install() -> None:
    """Make sure that this process takes the run down with it, or ends it properly."""
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
    """Has a function called on every rank when all end normally, before MPI does.

    Args:
        function: The function.
        by_mpi: Whether it communicates: not if the script has ended MPI itself.
    """
    _last_things.append((function, by_mpi))


def _install_exception_hook() -> None:
    shown_before = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # With a frame below, somebody prints an error and goes on, as h5py when it cannot close.
        uncaught = sys._getframe().f_back is None
        ours = failure.running_mpi() or failure.is_ours(error)
        if uncaught and ours and os.getpid() == _pid:
            sys.excepthook = shown_before  # what `fail` shows other errors with
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
    """Leave MPI: with the others after a normal end, at once and for all after `sys.exit(3)`."""
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
