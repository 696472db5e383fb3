"""Padding to the longest sample of the global batch, which may lie on another rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class Padding:
    """What a `padded_batch` does to axes whose length it was not told.

    Attributes:
        free: For each tensor of an element, the axes of its batch that are as long as the longest
            sample.
        values: For each tensor, the value that it is padded with.
    """

    free: tuple[tuple[int, ...], ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, padded_shapes: list[Any], values: list[Any]) -> Padding | None:
        """The padding for shapes in which -1 stands for the longest sample; None if none does."""
        free = tuple(
            tuple(axis + 1 for axis, extent in enumerate(tf.get_static_value(shape)) if extent < 0)
            for shape in padded_shapes
        )
        return cls(free, tuple(values)) if any(free) else None

    @property
    def count(self) -> int:
        """How many free axes there are."""
        return sum(map(len, self.free))

    def sizes(self, batch: Any) -> tf.Tensor:
        """The lengths of the free axes of a batch."""
        return tf.stack(
            [
                tf.shape(leaf, out_type=tf.int64)[axis]
                for leaf, axes in zip(tf.nest.flatten(batch), self.free, strict=True)
                for axis in axes
            ]
        )

    def fill_up(self, batch: Any, sizes: tf.Tensor) -> Any:
        """The batch with its free axes as long as `sizes` says."""
        wanted = iter(tf.unstack(sizes, num=self.count))
        filled = []
        for leaf, axes, value in zip(tf.nest.flatten(batch), self.free, self.values, strict=True):
            missing = [[0, 0] for _ in range(leaf.shape.rank)]
            for axis in axes:
                missing[axis][1] = next(wanted) - tf.shape(leaf, out_type=tf.int64)[axis]
            padded = tf.pad(leaf, missing, constant_values=value) if axes else leaf
            shape = enumerate(leaf.shape)
            padded.set_shape([None if axis in axes else extent for axis, extent in shape])
            filled.append(padded)
        return tf.nest.pack_sequence_as(batch, filled)
