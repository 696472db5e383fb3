"""Sums over hosts that have several ranks. The ranks of these tests are all on one host."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

import tarantella as tnt
from tarantella.comm.background_allreduce import BackgroundAllreduce, Message
from tarantella.runtime import world

LAYOUTS = {  # the host of each rank, by the number of ranks
    2: ["aa", "ab"],
    3: ["aaa", "aab", "abb", "aba", "abc"],
    4: ["aabb", "abba", "abbb", "aabc", "bcaa", "abcd"],
}
RANKS = pytest.mark.ranks(2, 3, 4)
TYPES = pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.int64])
SHORT = 1000
LENGTHS = [0, 1, 2, 3, 7, SHORT, 10_000, 2_500_001]  # the last one is more than one piece


@pytest.fixture
def layouts() -> Iterator[list[tuple[str, BackgroundAllreduce]]]:
    """What sums, for each layout."""
    communicator = world.communicator("gradients")
    yield [(each, BackgroundAllreduce(communicator, each)) for each in LAYOUTS[tnt.get_size()]]
    tnt.barrier()


def expected_sum(values: list[np.ndarray], hosts: str) -> np.ndarray:
    """Each host adds up, and rounds if it has several ranks; so does the sum of the hosts."""
    sums = []
    for host in dict.fromkeys(hosts):
        own = [each for each, name in zip(values, hosts, strict=True) if name == host]
        sums.append(rounded_sum(own) if len(own) > 1 else own[0])
    return rounded_sum(sums)


def rounded_sum(values: list[np.ndarray]) -> np.ndarray:
    dtype = values[0].dtype
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    total = np.zeros(len(values[0]), wide)
    for each in values:
        total += each.astype(wide)
    return total.astype(dtype)


@RANKS
@TYPES
@pytest.mark.parametrize("in_place", [False, True])
def test_all_ranks_have_the_sum_of_the_hosts(
    dtype: type, in_place: bool, layouts: list[tuple[str, BackgroundAllreduce]]
) -> None:
    random = np.random.default_rng(tnt.get_rank())
    sources = [(9 * random.normal(size=length)).astype(dtype) for length in LENGTHS]
    everyones = [tnt.allgather(source.view(np.uint8)) for source in sources]
    for hosts, background in layouts:
        own = [source.copy() for source in sources]
        targets = own if in_place else [np.empty_like(source) for source in sources]
        messages = [Message(s, t) for s, t in zip(own, targets, strict=True)]
        for message in messages:
            background.send(message)
        for message, target, values in zip(messages, targets, everyones, strict=True):
            background.wait(message)
            expected = expected_sum([each.view(dtype) for each in values], hosts)
            if len(target) <= SHORT and dtype is np.float32:  # MPI adds in an order of its own
                np.testing.assert_allclose(target, expected, rtol=1e-4)
            else:
                np.testing.assert_array_equal(
                    target.view(np.uint8), expected.view(np.uint8), f"{hosts}, {len(target)}"
                )
        if not in_place:
            for source, unchanged in zip(own, sources, strict=True):
                np.testing.assert_array_equal(source, unchanged)


@RANKS
def test_a_sum_does_not_wait_for_a_rank_that_sends_the_next_one_later(
    layouts: list[tuple[str, BackgroundAllreduce]],
) -> None:
    """It would wait forever for one that waits for this sum before it sends the next one."""
    for _, background in layouts:
        for early in range(tnt.get_size()):
            first, second = np.full(50, 1, np.float16), np.full(50, 2, np.float16)
            messages = [Message(first, first), Message(second, second)]
            background.send(messages[0])
            if tnt.get_rank() == early:
                background.send(messages[1])
            background.wait(messages[0])
            if tnt.get_rank() != early:
                background.send(messages[1])
            background.wait(messages[1])
            assert set(first) == {tnt.get_size()}
            assert set(second) == {2 * tnt.get_size()}
