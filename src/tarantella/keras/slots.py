"""Sparse gradients in a sum: slices of all ranks, each rank's in a place of its own.

A gather needs the numbers of slices of all ranks first. Here each rank knows how many any rank can
have, as it knows how many slices a sample adds. So all ranks make tensors of one size, with zeros
in the places of the others, and these can be part of one sum with everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from tarantella.data.row_kinds import Kind, Mixed, PerRow, Same, is_same
from tarantella.data.row_rules import RULES
from tarantella.runtime import world

# Indices are sent as two numbers, each of which float32 can hold.
_BASE = 2**20
_NUMBERS = 2
SENT_AS = (tf.float32, tf.float64)


@dataclass(frozen=True)
class Slots:
    """The places for the slices of one sparse gradient.

    Attributes:
        per_sample: How many slices a sample adds.
        value_shape: The shape of a slice.
        index_dtype: The type of indices.
        dense_shape: The shape of the gradient.
    """

    per_sample: int
    value_shape: tuple[int, ...]
    index_dtype: tf.DType
    dense_shape: tuple[int, ...]

    @classmethod
    def of(cls, slices: tf.IndexedSlices, samples: Sequence[tf.Tensor]) -> Slots | None:
        """The places for the slices of a gradient; None if their number is not known in advance.

        Args:
            slices: The gradient, in a graph.
            samples: Tensors of the same graph with the samples in their first axis.
        """
        each = slices_per_sample(slices.indices, samples)
        shape = tf.get_static_value(slices.dense_shape)
        values = slices.values.shape[1:]
        if each is None or shape is None or not values.is_fully_defined():
            return None
        if slices.values.dtype not in SENT_AS:
            return None
        return cls(each, tuple(values), slices.indices.dtype, tuple(map(int, shape)))

    @property
    def _width(self) -> int:
        return int(tf.TensorShape(self.value_shape).num_elements())

    def size(self, largest: tf.Tensor) -> tf.Tensor:
        """How many numbers are sent.

        Args:
            largest: The most samples that a rank has.
        """
        slices = world.get_size() * self.per_sample * tf.cast(largest, tf.int64)
        return slices * (self._width + _NUMBERS)

    def filled(self, slices: tf.IndexedSlices, largest: tf.Tensor) -> tf.Tensor:
        """This rank's slices in their places, with zeros in all others."""
        dtype = slices.values.dtype
        indices = tf.cast(slices.indices, tf.int64)
        numbers = tf.stack([indices % _BASE, indices // _BASE], 1)
        values = tf.reshape(slices.values, [-1, self._width])
        rows = tf.concat([values, tf.cast(numbers, dtype)], 1)
        places = self.per_sample * largest
        before = world.get_rank() * places
        after = world.get_size() * places - before - tf.shape(rows)[0]
        return tf.reshape(tf.pad(rows, [[before, after], [0, 0]]), [-1])

    def slices(self, total: tf.Tensor) -> tf.IndexedSlices:
        """The slices of all ranks; an empty place is one that adds zeros to the first row."""
        rows = tf.reshape(total, [-1, self._width + _NUMBERS])
        values, low, high = tf.split(rows, [self._width, 1, 1], 1)
        indices = tf.cast(low[:, 0], tf.int64) + _BASE * tf.cast(high[:, 0], tf.int64)
        return tf.IndexedSlices(
            tf.reshape(values, [-1, *self.value_shape]),
            tf.cast(indices, self.index_dtype),
            tf.constant(self.dense_shape, tf.int64),
        )


def slices_per_sample(indices: tf.Tensor, samples: Sequence[tf.Tensor]) -> int | None:
    """How many indices each sample has, the same for all; None if the graph does not show it."""
    while indices.op.type in ("Identity", "Cast") or _is_flat(indices):
        indices = indices.op.inputs[0]
    kind = _kind(indices, {tensor.ref(): PerRow() for tensor in samples if tensor.shape.rank})
    inner = indices.shape[1:] if indices.shape.rank else None
    if not isinstance(kind, PerRow) or kind.each is None or inner is None:
        return None
    return kind.each * inner.num_elements() if inner.is_fully_defined() else None


def _is_flat(tensor: tf.Tensor) -> bool:
    return tensor.op.type == "Reshape" and tensor.shape.rank == 1


def _kind(tensor: tf.Tensor, known: dict[object, Kind]) -> Kind:
    """How a tensor follows from the samples, as in `data.rowwise`."""
    if tensor.ref() not in known:
        operation = tensor.op
        kinds = [_kind(argument, known) for argument in operation.inputs]
        known[tensor.ref()] = _result(operation, kinds)
    return known[tensor.ref()]


def _result(operation: tf.Operation, kinds: Sequence[Kind]) -> Kind:
    if operation.type in ("Placeholder", "ReadVariableOp") or operation.op_def.is_stateful:
        return Mixed(operation.type)
    if operation.type == "Identity":
        return kinds[0]
    if all(map(is_same, kinds)):
        return Same()
    rule = RULES.get(operation.type)
    found = rule(operation, kinds) if rule else None
    return found if isinstance(found, PerRow) else Mixed(operation.type)
