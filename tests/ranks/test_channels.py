"""Collectives in graphs: those of one purpose in one order, those of different ones in none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tarantella as tnt
from tarantella.comm import shared_memory
from tarantella.graph import host_channel
from tarantella.graph.host_channel import HostChannel
from tarantella.graph.overlapped import OverlappedChannel
from tarantella.runtime import world

TWO = pytest.mark.ranks(2)


def calls_of(function: Callable[[], Any]) -> list[Any]:
    graph = tf.function(function).get_concrete_function().graph
    return [operation for operation in graph.get_operations() if operation.type == "PyFunc"]


def summed(purpose: str) -> Any:
    return HostChannel(purpose).allreduce([tf.ones(3)], threshold=0)


@TWO
def test_one_purpose_has_one_order_in_a_graph() -> None:
    first, second = calls_of(lambda: (summed("metrics"), summed("metrics")))
    assert second.control_inputs == [first]


@TWO
def test_purposes_do_not_wait_for_each_other() -> None:
    first, second = calls_of(lambda: (summed("metrics"), summed("layers")))
    assert (first.control_inputs, second.control_inputs) == ([], [])


@TWO
@pytest.mark.parametrize(("spare", "calls"), [(True, 3), (False, 1)])
def test_ranks_without_a_second_core_wait_for_the_others_once(
    spare: bool, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_channel, "ranks_have_spare_cores", lambda: spare)
    own = [tf.fill([size], float(tnt.get_rank() + size)) for size in (2, 3000, 4)]

    def sums() -> list[tf.Tensor]:
        return HostChannel("gradients").allreduce(own, threshold=0)

    assert len(calls_of(sums)) == calls
    for total, size in zip(tf.function(sums)(), (2, 3000, 4), strict=True):
        np.testing.assert_array_equal(total, np.full(size, 2 * size + 1))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_sums_through_shared_memory(dtype: Any) -> None:
    """Of arrays below and above all sizes that make a difference, of which some come in segments
    of unequal lengths, or of none."""
    communicator = world.communicator("metrics")
    assert shared_memory._ranks_share_memory(communicator)
    rng = np.random.default_rng(tnt.get_rank())
    slot = shared_memory._SLOT_BYTES // np.dtype(dtype).itemsize
    for size in (0, 1, 7, 4096, 5001, slot, slot + 1, 5 * slot + 13):
        own = rng.normal(size=size).astype(dtype) * 1000
        everyones = tnt.allgather(own)
        expected = np.sum(everyones, axis=0)
        target = np.empty_like(own)
        shared_memory.allreduce(own, target, communicator)
        np.testing.assert_array_equal(own, everyones[tnt.get_rank()])
        shared_memory.allreduce(own, own, communicator)
        np.testing.assert_array_equal(own, target)
        np.testing.assert_allclose(target, expected, rtol=1e-4, atol=1e-2)
        assert all((each == target).all() for each in tnt.allgather(target))


@TWO
def test_many_ranks_have_small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all inboxes together, so that a sum takes several pieces."""
    monkeypatch.setattr(shared_memory, "_INBOX_BYTES", 1000)
    own = np.arange(1001.0) + tnt.get_rank()
    target = np.empty_like(own)
    shared_memory.SharedMemory(world.communicator("metrics")).allreduce(own, target)
    np.testing.assert_array_equal(target, 2 * np.arange(1001.0) + 1)


@TWO
def test_sums_in_the_background_are_those_of_all_ranks() -> None:
    def in_background(*tensors: tf.Tensor) -> list[tf.Tensor]:
        channel = OverlappedChannel("gradients", "sparse gradients")
        return channel.allreduce(tensors, threshold=4096)

    shapes = [(3,), (2000, 1000), (), (0, 5), (700, 3), (40,)]  # one is larger than a piece
    arrays = [np.random.default_rng(i + 7 * tnt.get_rank()).random(s) for i, s in enumerate(shapes)]
    expected = tnt.allreduce(arrays)
    function = tf.function(in_background)
    for run in (function, function, in_background):
        sums = run(*map(tf.constant, arrays))
        assert [tuple(total.shape) for total in sums] == shapes
        for total, right in zip(sums, expected, strict=True):
            np.testing.assert_array_equal(total, right)


@TWO
def test_a_step_that_failed_on_the_way_is_not_mistaken_for_the_next() -> None:
    from tarantella.comm.background_allreduce import background_allreduce
    from tarantella.comm.buckets import Bucket, TensorSpec
    from tarantella.graph.overlapped import BucketInFlight

    spec = TensorSpec((3,), np.dtype(np.float32))
    background = background_allreduce(world.communicator("gradients"))
    bucket = BucketInFlight(Bucket.of([0], [spec]), background, "gradients 1")
    ones = np.ones(3, np.float32)
    bucket.send(ones)
    with pytest.raises(RuntimeError, match="has failed"):
        bucket.send(ones)
    np.testing.assert_array_equal(bucket.receive()[0], 2 * ones)
