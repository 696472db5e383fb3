"""Micro-batches in the memory of a GPU, copied there while the step before is computed.

Without this, each step would begin with the copy. The ranks of a GPU that is shared, and the GPUs
of a host, would all copy at the same time, and then all compute.

`tf.data.experimental.prefetch_to_device` does the same, except for two things. It traces six
functions for each dataset, and keeps them. And it makes the dataset's iterator only when the first
element is asked for. In each epoch Keras makes one iterator that it never reads, and `shuffle`
draws seeds for that one, too: ranks on GPUs would shuffle differently from plain Keras.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import tensorflow as tf

from tarantella.data.micro_batch import MicroBatch, fingerprint_of

# Micro-batches in the memory of the GPU, besides the one that is used and the one that is copied.
_WAITING = 1
_HOST = "/cpu:0"


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


def prefetched(micro_batches: tf.data.Dataset) -> tf.data.Dataset | Prefetched:
    """The micro-batches in the memory of this rank's GPU, if it has one and they can be there.

    Whoever reads them must be able to take an `OnDevice`.
    """
    target = device()
    if not target or not _can_be_copied(micro_batches.element_spec.data):
        return micro_batches

    @tf.autograph.experimental.do_not_convert
    def with_numbers_as_shape(one: MicroBatch) -> OnDevice:
        shape = [0, one.count, one.total, fingerprint_of(one)]
        return OnDevice(tf.zeros(shape, tf.bool), one.data)

    return Prefetched(micro_batches.map(with_numbers_as_shape), target)


class Prefetched:
    """A dataset that can only be iterated over. Its elements are copied to a device.

    Args:
        dataset: A dataset of dense tensors, in host memory.
        target: The device.
    """

    def __init__(self, dataset: tf.data.Dataset, target: str) -> None:
        self._dataset = dataset
        self._target = target
        leaves = tf.nest.flatten(dataset.element_spec)
        self._types = tuple(leaf.dtype for leaf in leaves)
        self._shapes = tuple(leaf.shape for leaf in leaves)

    @property
    def element_spec(self) -> Any:
        return self._dataset.element_spec

    def __iter__(self) -> Iterator[Any]:
        structure = {"output_types": self._types, "output_shapes": self._shapes}
        with tf.device(_HOST):
            source = tf.raw_ops.AnonymousIterator(**structure)
            variant = tf.data.experimental.to_variant(self._dataset)
            tf.raw_ops.MakeIterator(dataset=variant, iterator=source)
            handle = tf.raw_ops.IteratorToStringHandle(resource_handle=source)
        begin, read, end = _functions(self._types, self._shapes)
        with tf.device(self._target):
            copied = tf.raw_ops.GeneratorDataset(
                init_func_other_args=[handle, *begin.captured_inputs],
                next_func_other_args=read.captured_inputs,
                finalize_func_other_args=end.captured_inputs,
                init_func=begin,
                next_func=read,
                finalize_func=end,
                **structure,
            )
        dataset = tf.data.experimental.from_variant(copied, self.element_spec)
        iterator = iter(dataset.prefetch(_WAITING))
        weakref.finalize(iterator, _destroy, source, self._dataset).atexit = False
        return iterator


@cache
def _functions(types: tuple[tf.DType, ...], shapes: tuple[tf.TensorShape, ...]) -> tuple[Any, ...]:
    """What the dataset on the device calls to begin, to read an element, and at the end.

    Each takes the handle of the iterator in host memory, and does its work there.
    """
    handle = tf.TensorSpec([], tf.string)
    with tf.device(_HOST):
        host = tf.constant(_HOST)

    def on_host(
        function: Callable[[tf.Tensor], Any], results: Sequence[tf.DType], **options: Any
    ) -> Any:
        traced = tf.function(function, autograph=False).get_concrete_function(handle)

        @tf.function(autograph=False, **options)
        def call(handle: tf.Tensor) -> Any:
            return tf.raw_ops.RemoteCall(target=host, args=[handle], Tout=results, f=traced)

        return call.get_concrete_function(handle)

    def read(handle: tf.Tensor) -> list[tf.Tensor]:
        structure = {"output_types": types, "output_shapes": shapes}
        iterator = tf.raw_ops.IteratorFromStringHandleV2(string_handle=handle, **structure)
        return list(tf.raw_ops.IteratorGetNext(iterator=iterator, **structure))

    return (
        on_host(tf.identity, [tf.string]),
        # Otherwise, integers would stay in host memory.
        on_host(read, types, experimental_attributes={"experimental_ints_on_device": True}),
        on_host(lambda handle: tf.constant(0, tf.int64), [tf.int64]),
    )


def _destroy(iterator: tf.Tensor, dataset: tf.data.Dataset) -> None:
    """Destroys the iterator of a dataset, which it has needed until now."""
    del dataset
    with tf.init_scope():  # garbage may be collected while a function is traced
        tf.raw_ops.DestroyResourceOp(resource=iterator, ignore_lookup_error=True)


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
