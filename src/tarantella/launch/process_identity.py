"""A name for a process that no other one gets on this machine, as numbers are used again."""

from __future__ import annotations

from pathlib import Path


def stat_of(pid: int, proc: Path = Path("/proc")) -> list[bytes]:
    """What the kernel tells of a process after its name, which, in brackets, may be anything."""
    return (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()


def identity(pid: int, proc: Path = Path("/proc")) -> str:
    """The number of a process and the time it was started at; empty if there is no such process."""
    try:
        return f"{pid}:{int(stat_of(pid, proc)[19])}"
    except (OSError, IndexError, ValueError):
        return ""
