"""Sums over the ranks through the memory of the host, by MPI and NumPy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tarantella.comm import shared_memory
from tarantella.comm.buckets import Bucket
from tarantella.comm.waiting import barrier, ranks_have_spare_cores, wait_polling
from tarantella.graph.channel import Channel
from tarantella.graph.host_call import host_call
from tarantella.graph.result_buffers import ResultBuffers
from tarantella.runtime import world
from tarantella.runtime.timeline import Timeline, now, timeline


class HostChannel(Channel):
    """A channel whose collectives are host calls, each of which returns when it is done."""

    # Not every MPI can add these.
    ADDED_AS: ClassVar[dict[tf.DType, tf.DType]] = {
        tf.float16: tf.float32,
        tf.bfloat16: tf.float32,
        tf.bool: tf.int32,
    }

    def __init__(self, purpose: str) -> None:
        super().__init__(purpose)
        # Host calls run in threads of TensorFlow, so they cannot ask for it.
        self._communicator: Any = world.communicator(purpose)
        self._lanes = 0

    def _sums(self, tensors: list[tf.Tensor], buckets: list[Bucket]) -> dict[int, tf.Tensor]:
        sums: dict[int, tf.Tensor] = {}
        for group in _summed_together(buckets):
            members = [member for bucket in group for member in bucket.members]
            results = self._in_order(
                _sums_of(group, self._communicator),
                [tensors[member] for member in members],
                [tensors[member].dtype for member in members],
                self._lane(group),
            )
            sums.update(zip(members, results, strict=True))
        return sums

    def allreduce_with_slices(
        self,
        tensors: Sequence[tf.Tensor],
        slices: Sequence[tf.IndexedSlices],
        threshold: int | None,
    ) -> tuple[list[tf.Tensor], list[tf.IndexedSlices]]:
        sums = self.allreduce(tensors, threshold)
        return sums, [self._gathered(one) for one in slices]

    def _gathered(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        values = self._as_sent(slices.values)
        all_indices, all_values = self._in_order(
            _gather_rows(self._communicator),
            [slices.indices, values],
            [slices.indices.dtype, values.dtype],
        )
        all_indices.set_shape([None])
        all_values.set_shape([None, *values.shape[1:]])
        dtype = slices.values.dtype
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

    def _noted(
        self, function: Callable[..., Any], tensors: list[tf.Tensor], lane: str, notes: Timeline
    ) -> tuple[Callable[..., Any], list[tf.Tensor]]:
        """The function, noted in a timeline; and what notes that its arguments are ready."""
        ready: deque[int] = deque()

        def note() -> bool:
            ready.append(now())
            return True

        def call(*arrays: np.ndarray) -> Any:
            wait_polling(self._communicator.Ibarrier(), self._communicator.purpose)
            all_ready = now()
            results = function(*arrays)
            size = sum(array.nbytes for array in arrays)
            notes.add(lane, "waiting", ready.popleft(), all_ready, bytes=size)
            notes.add(lane, "reducing", all_ready, now(), bytes=size)
            return results

        with tf.control_dependencies([] if tf.executing_eagerly() else tensors):
            return call, self._call(note, [], [tf.bool])

    def _lane(self, buckets: Sequence[Bucket]) -> str:
        """Where buckets that are summed together are in a timeline."""
        self._lanes += 1
        megabytes = sum(bucket.nbytes for bucket in buckets) / 1e6
        return f"{self._purpose} {self._lanes} ({megabytes:.2f} MB)"

    def _call(
        self, function: Callable[..., Any], tensors: list[tf.Tensor], dtypes: list[tf.DType]
    ) -> list[tf.Tensor]:
        # Run eagerly, a single result comes without a list.
        return tf.nest.flatten(host_call(function, tensors, dtypes, independent=True))


def _summed_together(buckets: list[Bucket]) -> list[list[Bucket]]:
    """Buckets that share a host call.

    Each call waits for the slowest rank. It pays to sum a bucket while the next one is computed,
    but only on a core that has nothing else to do.
    """
    if ranks_have_spare_cores() or not buckets:
        return [[bucket] for bucket in buckets]
    return [buckets]


def _sums_of(buckets: Sequence[Bucket], communicator: Any) -> Callable[..., list[np.ndarray]]:
    """A function of the arrays of buckets that returns their sums over the ranks."""
    buffers = [ResultBuffers(bucket) for bucket in buckets]

    def total(*arrays: np.ndarray) -> list[np.ndarray]:
        each = iter(arrays)
        loaded = [
            buffer.load([next(each) for _ in bucket.members])
            for buffer, bucket in zip(buffers, buckets, strict=True)
        ]
        barrier(communicator)
        for source, target, _ in loaded:
            shared_memory.allreduce(source, target, communicator)
        return [member for _, _, members in loaded for member in members]

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
        own_bytes = np.ascontiguousarray(values).view(np.uint8)  # MPI does not know all types
        row_bytes = width * values.itemsize
        communicator.Allgatherv(own_bytes, (all_values.view(np.uint8), counts * row_bytes))
        return all_indices, all_values

    return gather
