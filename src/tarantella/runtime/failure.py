"""How a run ends when one of its ranks fails.

A rank that just ended would leave the others waiting in their next collective forever. So it
shows its traceback, announces the cause, and ends the run with MPI_Abort. When all ranks fail in
the same way, which is the usual case, only the first one reports: each waits a moment longer than
the rank before it, and has been ended by then. Standard library only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType, TracebackType

from tarantella.runtime import launcher, memory, script_place, times
from tarantella.runtime.announce import FAILED, Announcement, announce, is_run_by_command

INTERRUPTED = 130  # the exit status that shells give to a process ended by Ctrl+C
BAD_INPUT = 2
# An exception with this attribute is raised again where `tnt.run` was called, and shown there.
SENT_TO_CALLER = "_tnt_sent_to_caller"

_SENTENCE_END = re.compile(r"(?<!\b[A-Z])\.\s+(?=[A-Z])|\n")  # not the initial of a name
# TensorFlow starts a page of text with this, and has the cause somewhere in it.
_TENSORFLOW_SAYS = "Graph execution error:"
_ERROR = re.compile(r"\s*[\w.]*(Error|Exception): ")
_NODE = re.compile(r"\{\{function_node .*?\}\} ?")
_OPERATION = "[[{{node "  # follows right after the cause
# Keras puts this in front of the cause, which it prints in bold.
_KERAS_SAYS = "Exception encountered when calling "
_LETTERS = re.compile(r"\x1b\[\d*m")

# What TensorFlow's collectives raise when another rank has ended.
_COLLECTIVE_ABORTED = "Collective ops is aborted by"

_PACKAGE = Path(__file__).absolute().parent.parent


class Terminated(SystemExit):
    """This rank ends because SIGTERM asked it to.

    Args:
        cause: what happened, in one line
    """

    def __init__(self, cause: str) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.tnt_cause = cause


def exit_status(error: BaseException) -> int:
    """The exit status of a process that ends with this exception."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code & 0xFF if isinstance(error.code, int) else 1
    return BAD_INPUT if is_ours(error) else 1


def is_ours(error: BaseException) -> bool:
    """Whether Tarantella raised it on purpose, with a message for the user."""
    # By name: `launch.script` has loaded the classes apart from those that the script sees.
    return any(
        (kind.__module__, kind.__name__) == ("tarantella.errors", "TarantellaError")
        for kind in type(error).__mro__
    )


def describe(error: BaseException) -> str:
    """The cause in one line, for the message that names the rank."""
    shortage = memory.shortage_in(error)
    cause = _cause_in(error)
    return f"{shortage}: {cause}" if shortage else cause


def _cause_in(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        if hasattr(error, "tnt_cause"):  # its class may have been loaded twice
            return str(error.tnt_cause)
        return str(error.code) if isinstance(error.code, str) else f"sys.exit({error.code})"
    if is_ours(error):  # the advice that follows is with the traceback
        problem = _SENTENCE_END.split(str(error), maxsplit=1)[0]
        return f"{type(error).__name__}: {problem.removesuffix('.')}"
    text = traceback.format_exception_only(type(error), error)[-1]
    first, _, more = text.partition("\n")
    first = _NODE.sub("", first)
    lines = [line.strip() for line in _LETTERS.sub("", more).splitlines() if line.strip()]
    causes: list[str] = []
    if first.endswith(_TENSORFLOW_SAYS):
        causes = [line for line in lines if _ERROR.match(line)] or [
            line
            for line, next_line in itertools.pairwise(lines)
            if next_line.startswith(_OPERATION)
        ]
    elif _KERAS_SAYS in first or first.endswith(":"):
        causes = lines[:1]
    return f"{first} {causes[-1]}" if causes else first


def show(error: BaseException) -> None:
    """Print what Python would print for an uncaught exception, without our own frames."""
    if isinstance(error, KeyboardInterrupt):
        return
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif getattr(error, SENT_TO_CALLER, False):
        return
    elif is_ours(error):
        show_for_user(error)
    elif memory.shortage_in(error):
        _show_lines_of_user(error)
    else:
        error.__traceback__ = _without_start(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)


def show_for_user(error: BaseException) -> None:
    """Print the user's part of the traceback, and the message."""
    print(text_for_user(error), end="", file=sys.stderr)


def text_for_user(error: BaseException) -> str:
    """The traceback without our own frames, and the message; of our errors, the user's part."""
    if not is_ours(error):
        trace = _without_start(error.__traceback__)
        return "".join(traceback.format_exception(type(error), error, trace))
    report = traceback.TracebackException.from_exception(error)
    if not (error.__cause__ and is_ours(error.__cause__)):  # that of a rank, from `tnt.run`
        report.__cause__ = None
    report.__context__ = None
    report.stack = traceback.StackSummary.from_list(
        [frame for frame in report.stack if not _is_inside(frame.filename)]
    )
    return "".join(report.format())


def _show_lines_of_user(error: BaseException) -> None:
    """Print where in the user's code it happened, and the cause in one line."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if script_place.is_users(Path(frame.filename))
    ]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    cause = _cause_in(error) if is_run_by_command() else describe(error)
    print("".join(lines) + cause, file=sys.stderr)


def fail(error: BaseException, descriptor: int = 2) -> int:
    """Report an uncaught exception, and end all ranks with it.

    Args:
        error: the exception
        descriptor: where the command listens, if it started this rank

    Returns:
        The exit status to end with. It returns only where MPI does not run.
    """
    rank = launcher.rank_by_launcher()
    _wait_for_turn(rank, error)
    show(error)
    status = exit_status(error)
    announce(
        Announcement(
            FAILED, rank, socket.gethostname(), os.getpid(), status=status, cause=describe(error)
        ),
        descriptor,
    )
    abort(status)
    return status


def abort(status: int) -> None:
    """End all ranks, if MPI runs in this process, after what was printed has been shown."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    mpi = running_mpi()
    if mpi is not None:
        time.sleep(times.TIME_TO_READ_BEFORE_ABORT)
        mpi.COMM_WORLD.Abort(status)


def running_mpi() -> ModuleType | None:
    """The module `mpi4py.MPI`, between the start and the end of MPI in this process."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return mpi


def _wait_for_turn(rank: int, error: BaseException) -> None:
    if getattr(error, "_tnt_is_echo", False) or _COLLECTIVE_ABORTED in str(error):
        # It is the error of another rank, which should report it first.
        time.sleep(times.TURN_OF_AN_ECHO)
    if rank > 0:
        turn = times.SHORTEST_TURN + times.TURN_OF_EACH_RANK * rank
        time.sleep(min(turn, times.LONGEST_TURN))


def _is_inside(filename: str) -> bool:
    """Whether a frame belongs to Tarantella, Keras or the import system, and not to the user."""
    # Tarantella and Keras have context managers around much of what a user calls.
    if filename.startswith("<frozen ") or filename == contextlib.__file__:
        return True
    keras = sys.modules.get("keras")
    inside = [_PACKAGE]
    if keras is not None and keras.__file__:
        inside.append(Path(keras.__file__).parent)
    return any(folder in Path(filename).parents for folder in inside)


def _without_start(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's script on, without the frames that started it."""
    starting = (_PACKAGE / "launch", _PACKAGE / "calls")
    while trace and Path(trace.tb_frame.f_code.co_filename).parent in starting:
        trace = trace.tb_next
    return trace
