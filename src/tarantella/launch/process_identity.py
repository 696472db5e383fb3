"""A name for a process that no other process on this machine gets: numbers are reused."""

from __future__ import annotations

from pathlib import Path


def stat_of(pid: int, proc: Path = Path("/proc")) -> list[bytes]:
    """The fields of a process's stat file after its name, which may contain anything."""
    return (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()


def identity(pid: int, proc: Path = Path("/proc")) -> str:
    """The number of a process and the time that it started; empty if there is no such process."""
    try:
        return f"{pid}:{int(stat_of(pid, proc)[19])}"
    except (OSError, IndexError, ValueError):
        return ""
