"""Whether memory has run out, and what may have limited it. Standard library only."""

from __future__ import annotations

import errno
import resource
import signal
import traceback
from pathlib import Path

# What libraries say. Some have other causes as well, and count only where memory is limited.
_CLEAR_WORDS = ("OOM when allocating", "out of memory", "Out of memory", "std::bad_alloc")
_VAGUE_WORDS = (
    "Cannot allocate memory",
    "failed to map segment from shared object",  # of a library
    "can't start new thread",
)
# How processes end that do not get the memory that they ask for.
_GIVING_UP = (signal.SIGABRT, signal.SIGSEGV)
_LIMITS = (("-v", resource.RLIMIT_AS), ("-d", resource.RLIMIT_DATA))
_COUNTERS = Path("/proc/vmstat")


def limit_in_words() -> str:
    """What `ulimit` allows a process; empty if there is no limit."""
    for flag, kind in _LIMITS:
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            return f"`ulimit {flag}` allows each process {limit / 1e9:.1f} GB"
    return ""


def shortage_in(error: BaseException) -> str:
    """In words, which memory has run out if an exception says so; empty if it says something else.

    TensorFlow's exception is known by its name, as TensorFlow may not be loaded.
    """
    text = "".join(traceback.format_exception_only(type(error), error))  # never fails
    limit = limit_in_words()
    ran_out = (
        isinstance(error, MemoryError)
        or type(error).__name__ == "ResourceExhaustedError"
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or any(words in text for words in _CLEAR_WORDS)
        or (limit and any(words in text for words in _VAGUE_WORDS))
    )
    if not ran_out:
        return ""
    if "device:GPU" in text:
        return "GPU memory ran out"
    return f"memory ran out, as {limit}" if limit else "memory ran out"


def oom_kills() -> int:
    """How many processes the kernel has killed on this host because memory ran out."""
    try:
        lines = _COUNTERS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def shortage_at_end(status: int, kills_before: int) -> str:
    """In words, why memory is the likely cause of a process's end; empty if it is not.

    Args:
        status: its exit status; the number of the signal that ended it, negated
        kills_before: `oom_kills()` before it was started
    """
    if -status == signal.SIGKILL and oom_kills() > kills_before:
        return "memory ran out, and the kernel killed a process on this host"
    if -status in _GIVING_UP and (limit := limit_in_words()):
        return f"probably because memory ran out, as {limit}"
    return ""
