"""More ranks than cores on a host: what the user is told. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable

from tarantella.runtime.words import count


def core_warnings(hosts: Iterable[tuple[str, int, int]]) -> tuple[str, ...]:
    """One warning if ranks that compute on the CPU have to share cores, otherwise none.

    Args:
        hosts: the name of each host, and how many cores and how many ranks it has
    """
    lacking: dict[tuple[int, int], list[str]] = {}
    for name, cores, ranks in hosts:
        if ranks > cores:
            lacking.setdefault((cores, ranks), []).append(name)
    if not lacking:
        return ()
    reasons = ", and ".join(_reason(names, *numbers) for numbers, names in lacking.items())
    return (
        f"{reasons[0].upper()}{reasons[1:]}: ranks that share a core take turns, and the others "
        "wait for them. Start at most one rank for each core.",
    )


def _reason(names: list[str], cores: int, ranks: int) -> str:
    has = count(cores, "core")
    if len(names) == 1:
        return f"host {names[0]} has {has} for {count(ranks, 'rank')}"
    return f"hosts {', '.join(names)} have {has} each for {count(ranks, 'rank')}"
