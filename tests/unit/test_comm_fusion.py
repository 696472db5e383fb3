"""Which fusion threshold costs least."""

from __future__ import annotations

import numpy as np
import pytest

from tarantella.comm.buckets import TensorSpec, fuse
from tarantella.comm.fusion import best_threshold

FLOAT = np.dtype(np.float32)


def _specs(*kilobytes: float) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec((int(256 * each),), FLOAT) for each in kilobytes)


def _messages(hosts: int, *kilobytes: float) -> list[tuple[int, ...]]:
    specs = _specs(*kilobytes)
    return [bucket.members for bucket in fuse(specs, best_threshold(specs, hosts))]


@pytest.mark.parametrize("hosts", [1, 2, 64])
def test_small_tensors_share_a_message(hosts: int) -> None:
    assert _messages(hosts, *[0.1] * 300) == [tuple(range(300))]


@pytest.mark.parametrize("hosts", [1, 2, 64])
def test_large_tensors_are_not_copied(hosts: int) -> None:
    assert _messages(hosts, 20_000, 1, 20_000, 1) == [(0,), (2,), (1, 3)]


def test_more_hosts_get_fewer_messages() -> None:
    sizes = [300.0] * 100
    counts = [len(_messages(hosts, *sizes)) for hosts in (1, 4, 64)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_there_may_be_no_tensors() -> None:
    assert fuse([], best_threshold((), 1)) == []
