"""An element of a dataset as a single tensor, whatever is in it, that can also be empty."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def from_value(element: Any) -> tf.Tensor:
    """An optional that holds an element."""
    leaves = [leaf for leaf in tf.nest.flatten(element) if leaf is not None]
    return tf.raw_ops.OptionalFromValue(components=tf.nest.flatten(leaves, expand_composites=True))


def empty() -> tf.Tensor:
    """An optional that holds nothing."""
    return tf.raw_ops.OptionalNone()


def has_value(optional: tf.Tensor) -> tf.Tensor:
    """Whether an optional holds an element."""
    return tf.raw_ops.OptionalHasValue(optional=optional)


def get_value(spec: Any, optional: tf.Tensor) -> Any:
    """The element of this structure that an optional holds."""
    specs = tf.nest.flatten(spec, expand_composites=True)
    tensors = tf.raw_ops.OptionalGetValue(
        optional=optional,
        output_types=[one.dtype for one in specs],
        output_shapes=[one.shape for one in specs],
    )
    return tf.nest.pack_sequence_as(spec, tensors, expand_composites=True)
