"""The cores of this host that this process may use. Standard library only."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> tuple[int, ...]:
    """The numbers of the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def core_limit(
    cgroups: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """How many cores' worth of time a container grants; None where there is no limit."""
    limits = [
        limit
        for folder in _own_folders(cgroups, membership)
        if (limit := _limit_in(folder)) is not None
    ]
    return min(limits, default=None)


def parse_list(text: str) -> list[int]:
    """The numbers in a list like `0-3,8,10-11`, as Linux writes it."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def thread_share(
    mine: frozenset[int], of_all: tuple[frozenset[int], ...], limit: int | None
) -> int:
    """How many threads a rank may compute with, so that no core of the host is used twice.

    Args:
        mine: the cores this rank may run on
        of_all: the same for every rank of the host, this one included
        limit: how many cores all of them may use at a time; None: all

    Ranks that may run on the same cores share them; one that the launcher has bound to cores of
    its own uses them all.
    """
    rivals = sum(1 for cores in of_all if cores & mine)
    share = len(mine) // max(1, rivals)
    if limit is not None:
        share = min(share, limit // max(1, len(of_all)))
    return max(1, share)


def _own_folders(cgroups: Path, membership: Path) -> list[Path]:
    """The folders of the control group of this process and of those around it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), None)
    if own is not None:
        path = cgroups / own.lstrip("/")
        return [path, *(parent for parent in path.parents if cgroups in (parent, *parent.parents))]
    return [cgroups / "cpu"]  # version 1, as a container sees it


def _limit_in(folder: Path) -> int | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        if quota in ("max", "-1"):
            return None
        return max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return None
