"""Which ranks exchange 16-bit numbers with which."""

from __future__ import annotations

import pytest

from tarantella.comm.allreduce_16_bits import Route


@pytest.mark.parametrize(
    ("hosts", "rank", "neighbours", "carriers", "counterparts"),
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
def test_route(
    hosts: str,
    rank: int,
    neighbours: tuple[int, ...],
    carriers: tuple[int, ...],
    counterparts: tuple[int, ...],
) -> None:
    assert Route.of(rank, hosts) == Route(rank, neighbours, carriers, counterparts)
