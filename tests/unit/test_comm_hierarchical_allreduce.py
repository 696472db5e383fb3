"""Which ranks exchange 16-bit numbers with which."""

from __future__ import annotations

import pytest

from tarantella.comm.hierarchical_allreduce import Peers


@pytest.mark.parametrize(
    ("hosts", "rank", "neighbours", "leaders", "counterparts"),
    [
        ("ab", 1, (1,), (1,), (0, 1)),
        ("aabb", 3, (2, 3), (2, 3), (1, 3)),
        ("abab", 2, (0, 2), (0, 2), (2, 3)),
        ("aaab", 0, (0, 1, 2), (0,), (0, 3)),  # as many segments as the smallest host has ranks
        ("aaab", 2, (0, 1, 2), (0,), ()),
        ("aaab", 3, (3,), (3,), (0, 3)),
        ("baaccb", 4, (3, 4), (3, 4), (5, 2, 4)),
        ("aa", 1, (0, 1), (0, 1), (1,)),
        ("a", 0, (0,), (0,), (0,)),
    ],
)
def test_peers(
    hosts: str,
    rank: int,
    neighbours: tuple[int, ...],
    leaders: tuple[int, ...],
    counterparts: tuple[int, ...],
) -> None:
    assert Peers.of(rank, hosts) == Peers(rank, neighbours, leaders, counterparts)
