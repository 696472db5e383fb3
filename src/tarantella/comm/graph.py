"""Collectives as operations of a TensorFlow graph.

Each channel is a communicator of its own, on which every rank issues the same collectives
in the same order: control dependencies make that order part of the graph. Channels are
independent of each other, so that a small exchange never waits behind a large one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella.comm.buckets import Bucket, TensorSpec, aligned_zeros, fuse
from tarantella.comm.buffers import MESSAGE_BYTES
from tarantella.comm.calls import call_python
from tarantella.comm.waiting import meet
from tarantella.runtime import world

# Not every MPI can add these; booleans are true in sum if one of them is.
_ADDED_AS = {tf.float16: tf.float32, tf.bfloat16: tf.float32, tf.bool: tf.int32}


class Channel:
    """The collectives of one purpose in one graph, in one fixed order."""

    def __init__(self, purpose: str) -> None:
        self._communicator = world.communicator(purpose)
        self._previous: list[tf.Operation] = []

    def allreduce(self, tensors: Sequence[tf.Tensor], threshold: int) -> list[tf.Tensor]:
        """The sums over all ranks of tensors whose static shapes are known.

        Args:
            tensors: In the order in which they become ready, the same on all ranks.
            threshold: Tensors of fewer bytes are fused into messages of at least that many.
        """
        wide = [tf.cast(t, _ADDED_AS.get(t.dtype, t.dtype)) for t in tensors]
        specs = [TensorSpec(tuple(t.shape), np.dtype(t.dtype.as_numpy_dtype)) for t in wide]
        sums: list[Any] = [None] * len(wide)
        for bucket in fuse(specs, threshold):
            results = self._in_order(
                _bucket_sum(bucket, self._communicator),
                [wide[member] for member in bucket.members],
                [wide[member].dtype for member in bucket.members],
            )
            for member, result in zip(bucket.members, results, strict=True):
                result.set_shape(wide[member].shape)
                sums[member] = result
        return [tf.cast(s, t.dtype) for s, t in zip(sums, tensors, strict=True)]

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
    ) -> list[tf.Tensor]:
        with tf.control_dependencies(self._previous):
            results = call_python(function, tensors, dtypes)
        results = tf.nest.flatten(results)  # run eagerly, a single result comes without a list
        if not tf.executing_eagerly():
            self._previous = [results[0].op]
        return results


def _bucket_sum(bucket: Bucket, communicator: Any) -> Callable[..., list[np.ndarray]]:
    """A function of the bucket's arrays that returns their sums over the ranks."""
    from mpi4py import MPI

    memory = _ReusedMemory(bucket)

    def alone(array: np.ndarray) -> list[np.ndarray]:
        _, views = memory.take()
        meet(communicator)
        _sum_over_ranks(np.ascontiguousarray(array).reshape(-1), views[0].reshape(-1), communicator)
        return views

    def fused(*arrays: np.ndarray) -> list[np.ndarray]:
        whole, views = memory.take()
        for view, array in zip(views, arrays, strict=True):
            np.copyto(view, array)
        meet(communicator)
        _sum_over_ranks(MPI.IN_PLACE, whole, communicator)
        return views

    return alone if len(bucket.members) == 1 else fused


def _sum_over_ranks(source: Any, target: np.ndarray, communicator: Any) -> None:
    """Sums flat arrays over the ranks, in pieces that MPI reduces fastest."""
    piece = MESSAGE_BYTES // target.itemsize
    for start in range(0, max(len(target), 1), piece):
        end = start + piece
        part = source[start:end] if isinstance(source, np.ndarray) else source
        communicator.Allreduce(part, target[start:end])


class _ReusedMemory:
    """Where the results of a bucket lie, used again once TensorFlow has let go of it.

    Fresh memory for every step would cost a page fault for every 4 kB. TensorFlow takes the
    arrays over as they are and holds a reference to each as long as any tensor, or a variable
    that was assigned from one, needs it: the reference counts say what is free.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._blocks: list[tuple[np.ndarray, list[np.ndarray]]] = []

    def take(self) -> tuple[np.ndarray, list[np.ndarray]]:
        for block in self._blocks:
            if all(sys.getrefcount(view) <= _REFERENCES_WHEN_FREE for view in block[1]):
                return block[0], list(block[1])
        buffer = aligned_zeros(self._bucket.nbytes)
        views = [
            buffer[offset : offset + spec.nbytes].view(spec.dtype).reshape(spec.shape)
            for offset, spec in zip(self._bucket.offsets, self._bucket.specs, strict=True)
        ]
        self._blocks.append((buffer.view(self._bucket.dtype), views))
        return self._blocks[-1][0], list(views)


# The list of views, the loop's variable, and the argument of getrefcount itself.
_REFERENCES_WHEN_FREE = 3


def _gather_rows(communicator: Any) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    size = communicator.Get_size()

    def gather(indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        meet(communicator)
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
