"""Whether this host has lost the one that the run was started from. Standard library only.

The launcher's process on this host keeps a connection to the one that started the run, and sends
what ranks print through it. When the network is gone, nobody closes the connection: but the
kernel sends the same data again and again, waits twice as long each time, and keeps count.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tarantella.runtime import times


def is_cut_off(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether nobody has confirmed for long what a process has sent; False where nobody can tell.

    Args:
        pid: the launcher's process on this host, which must have sent something lately
        proc: where the kernel tells about processes
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
    """For each TCP connection its number, and how often its oldest data were sent again."""
    found = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                found.append((words[9], int(words[6], 16)))
    return found
