"""Collectives as operations of a TensorFlow graph.

Each purpose has a communicator of its own, on which every rank issues the same collectives
in the same order: control dependencies make that order part of the graph. Purposes are
independent of each other, so that a small exchange never waits behind a large one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella.comm import shared_memory
from tarantella.comm.buckets import Bucket, TensorSpec, fuse
from tarantella.comm.waiting import barrier, wait_aside
from tarantella.graph.host_call import host_call
from tarantella.graph.result_buffers import ReusedMemory
from tarantella.runtime import world
from tarantella.runtime.timeline import Timeline, now, timeline

# Not every MPI can add these; booleans are true in sum if one of them is.
_ADDED_AS = {tf.float16: tf.float32, tf.bfloat16: tf.float32, tf.bool: tf.int32}


class Channel:
    """The collectives of one purpose in one graph, in one fixed order."""

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self._communicator = world.communicator(purpose)
        self._buckets = 0

    def allreduce(self, tensors: Sequence[tf.Tensor], threshold: int) -> list[tf.Tensor]:
        """The sums over all ranks of tensors whose static shapes are known.

        Args:
            tensors: In the order in which they become ready, the same on all ranks.
            threshold: Tensors of fewer bytes are fused into messages of at least that many.
        """
        wide = to_wide(tensors)
        sums: list[Any] = [None] * len(wide)
        for bucket in fuse(specs_of(wide), threshold):
            results = self._in_order(
                _bucket_sum(bucket, self._purpose),
                [wide[member] for member in bucket.members],
                [wide[member].dtype for member in bucket.members],
                self._lane(bucket),
            )
            for member, result in zip(bucket.members, results, strict=True):
                result.set_shape(wide[member].shape)
                sums[member] = result
        return from_wide(sums, tensors)

    def concatenate(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """The slices of all ranks behind each other, in the order of the ranks."""
        values = slices.values
        dtype = values.dtype
        values = tf.cast(values, _ADDED_AS.get(dtype, dtype))  # a type that MPI knows
        all_indices, all_values = self._in_order(
            _gather_rows(self._communicator),
            [slices.indices, values],
            [slices.indices.dtype, values.dtype],
        )
        all_indices.set_shape([None])
        all_values.set_shape([None, *values.shape[1:]])
        return tf.IndexedSlices(tf.cast(all_values, dtype), all_indices, slices.dense_shape)

    def _in_order(
        self,
        function: Callable[..., Any],
        tensors: list[tf.Tensor],
        dtypes: list[tf.DType],
        lane: str = "",
    ) -> list[tf.Tensor]:
        """Calls a function that communicates, after those before it.

        Args:
            function: A function of arrays.
            tensors: Its arguments.
            dtypes: The types of its results.
            lane: Where it is in a timeline; by default, under the purpose of the channel.
        """
        ready: list[tf.Tensor] = []
        if (notes := timeline()) is not None:
            function, ready = self._noted(function, tensors, lane or self._purpose, notes)
        with tf.control_dependencies([*self._last("call"), *ready]):
            results = self._call(function, tensors, dtypes)
        self._keep_last("call", results)
        return results

    def _last(self, kind: str) -> list[tf.Tensor]:
        """The results of the last operation of a kind for this purpose, in the graph being made."""
        known = getattr(tf.compat.v1.get_default_graph(), "_tnt_last", {})
        return [] if tf.executing_eagerly() else known.get((self._purpose, kind), [])

    def _keep_last(self, kind: str, results: list[tf.Tensor]) -> None:
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            graph._tnt_last = getattr(graph, "_tnt_last", {}) | {(self._purpose, kind): results[:1]}

    def _noted(
        self, function: Callable[..., Any], tensors: list[tf.Tensor], lane: str, notes: Timeline
    ) -> tuple[Callable[..., Any], list[tf.Tensor]]:
        """The function, in a timeline; and what notes that its arguments are there."""
        ready: deque[int] = deque()

        def note() -> bool:
            ready.append(now())
            return True

        def call(*arrays: np.ndarray) -> Any:
            wait_aside(self._communicator.Ibarrier(), self._purpose)
            met = now()
            results = function(*arrays)
            size = sum(array.nbytes for array in arrays)
            notes.add(lane, "waiting", ready.popleft(), met, bytes=size)
            notes.add(lane, "reducing", met, now(), bytes=size)
            return results

        with tf.control_dependencies([] if tf.executing_eagerly() else tensors):
            return call, self._call(note, [], [tf.bool])

    def _lane(self, bucket: Bucket) -> str:
        """Where a bucket is in a timeline."""
        self._buckets += 1
        return f"{self._purpose} {self._buckets} ({bucket.nbytes / 1e6:.2f} MB)"

    def _call(
        self, function: Callable[..., Any], tensors: list[tf.Tensor], dtypes: list[tf.DType]
    ) -> list[tf.Tensor]:
        # Run eagerly, a single result comes without a list.
        return tf.nest.flatten(host_call(function, tensors, dtypes, independent=True))


def to_wide(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors in types that every MPI can add."""
    return [tf.cast(t, _ADDED_AS.get(t.dtype, t.dtype)) for t in tensors]


def from_wide(sums: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums in the types of what was summed."""
    return [tf.cast(s, t.dtype) for s, t in zip(sums, tensors, strict=True)]


def specs_of(tensors: Sequence[tf.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(tuple(t.shape), np.dtype(t.dtype.as_numpy_dtype)) for t in tensors]


def _bucket_sum(bucket: Bucket, purpose: str) -> Callable[..., list[np.ndarray]]:
    """A function of the bucket's arrays that returns their sums over the ranks."""
    memory = ReusedMemory(bucket)
    communicator = world.communicator(purpose)

    def total(*arrays: np.ndarray) -> list[np.ndarray]:
        source, target, views = memory.load(arrays)
        barrier(communicator)
        shared_memory.allreduce(source, target, purpose)
        return views

    return total


def _gather_rows(communicator: Any) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    size = communicator.Get_size()

    def gather(indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        barrier(communicator)
        counts = np.empty(size, np.int64)
        communicator.Allgather(np.array([len(indices)], np.int64), counts)
        total = int(counts.sum())
        width = int(np.prod(values.shape[1:], dtype=np.int64))
        all_indices = np.empty(total, indices.dtype)
        all_values = np.empty((total, *values.shape[1:]), values.dtype)
        communicator.Allgatherv(indices, (all_indices, counts))
        communicator.Allgatherv(np.ascontiguousarray(values), (all_values, counts * width))
        return all_indices, all_values

    return gather
