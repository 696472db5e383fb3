"""Micro-batches in the memory of a GPU, copied there while the step before is computed.

Without this, each step would begin with the copy. The ranks of a GPU that is shared, and the GPUs
of a host, would all copy at the same time, and then all compute.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tarantella.data.micro_batch import MicroBatch, fingerprint_of

# Micro-batches in the memory of the GPU, besides the one that is used and the one that is copied.
_WAITING = 1


class OnDevice(NamedTuple):
    """A micro-batch whose samples are in the memory of a GPU.

    Attributes:
        numbers: A tensor without a value, whose shape holds the numbers of a `MicroBatch`: shapes
            are in host memory, where they can be read while the GPU computes.
        data: The samples.
    """

    numbers: Any
    data: Any


def device() -> str:
    """Where the samples should be; empty: in host memory."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else ""


def prefetched(micro_batches: tf.data.Dataset) -> tf.data.Dataset:
    """The micro-batches in the memory of this rank's GPU, if it has one and they can be there.

    Whoever reads the dataset must be able to take an `OnDevice`, and nothing can be done with the
    dataset but reading it.
    """
    target = device()
    if not target or not _can_be_copied(micro_batches.element_spec.data):
        return micro_batches

    @tf.autograph.experimental.do_not_convert
    def with_numbers_as_shape(one: MicroBatch) -> OnDevice:
        shape = [0, one.count, one.total, fingerprint_of(one)]
        return OnDevice(tf.zeros(shape, tf.bool), one.data)

    to_device = tf.data.experimental.prefetch_to_device(target, _WAITING)
    return micro_batches.map(with_numbers_as_shape).apply(to_device)


def micro_batch_of(element: Any) -> Any:
    """The micro-batch that an element is; anything else as it is."""
    if not isinstance(element, OnDevice):
        return element
    with tf.device(device()):
        shape = tf.shape(element.numbers, tf.int64)
    with tf.device("CPU:0"):
        _, count, total, fingerprint = tf.unstack(shape, 4)
    return MicroBatch(count, total, element.data, fingerprint)


def _can_be_copied(spec: Any) -> bool:
    return all(
        isinstance(leaf, tf.TensorSpec)
        and (leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype == tf.bool)
        for leaf in tf.nest.flatten(spec)
    )
