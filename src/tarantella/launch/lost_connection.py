"""Whether this host has lost its connection to the one that started the run.

Then the command cannot end the ranks here, and they would block the host forever. The launcher's
process on this host sends their output over a TCP connection, which stays open when the network is
gone; but the kernel counts how often it retransmits what is not acknowledged. Standard library
only.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tarantella.runtime import times


def is_cut_off(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether nothing that a process sends has been acknowledged for long; False without a /proc.

    Args:
        pid: the launcher's process on this host, which must have sent something recently
        proc: where the kernel shows processes
    """
    sockets = set()
    with suppress(OSError):
        for descriptor in (proc / str(pid) / "fd").iterdir():
            with suppress(OSError):
                sockets.add(str(descriptor.readlink()))
    return any(
        f"socket:[{inode}]" in sockets and repeats >= times.REPEATS_UNTIL_CUT_OFF
        for inode, repeats in _repeats(proc)
    )


def _repeats(proc: Path) -> list[tuple[str, int]]:
    """For each TCP connection its inode, and how often its oldest data were retransmitted."""
    found = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                found.append((words[9], int(words[6], 16)))
    return found
