"""From the gradients of the ranks' parts to those of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import tensorflow as tf

from tarantella.comm.graph import Channel
from tarantella.runtime.configuration import configuration


def give_shapes(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Gives gradients the shapes of their variables, which loops in a graph can lose."""
    for gradient, variable in zip(gradients, variables, strict=True):
        if isinstance(gradient, tf.Tensor):
            gradient.set_shape(variable.shape)


def weighted(gradients: Sequence[Any], share: tf.Tensor) -> list[Any]:
    """The gradients of means over a part, as this part's contribution to a global mean."""
    return [None if gradient is None else _scaled(gradient, share) for gradient in gradients]


def _scaled(gradient: Any, share: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = _scaled(gradient.values, share)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    # A rank without samples contributes zeros, whatever it computed on a sample of another's.
    return tf.math.multiply_no_nan(gradient, tf.cast(share, gradient.dtype))


def sum_over_ranks(gradients: Sequence[Any], channel: Channel) -> list[Any]:
    """The sums over the ranks, requested in the order in which backpropagation ends."""
    dense = [i for i in reversed(range(len(gradients))) if isinstance(gradients[i], tf.Tensor)]
    sparse = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
    sums = list(gradients)
    threshold = configuration().fusion_threshold_bytes
    dense_sums = channel.allreduce([gradients[i] for i in dense], threshold)
    for i, total in zip(dense, dense_sums, strict=True):
        sums[i] = total
    for i in sparse:
        sums[i] = channel.concatenate(gradients[i])
    return sums


def sum_in_turn(gradients: Sequence[Any]) -> list[Any]:
    """The sums over the ranks, wherever in the user's functions they are asked for.

    A channel keeps the order within one graph, but a step may apply gradients several times,
    and in functions that call each other. There TensorFlow keeps the order of whatever writes
    to one variable: so do we, before and after.
    """
    if tf.executing_eagerly():
        return sum_over_ranks(gradients, Channel("gradients"))
    with tf.control_dependencies([_turn().assign_add(1)]):
        sums = sum_over_ranks(gradients, Channel("gradients"))
    received = [leaf for leaf in tf.nest.flatten(sums, expand_composites=True) if leaf is not None]
    with tf.control_dependencies(received):
        _turn().assign_add(1)
    return sums


@cache
def _turn() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int64)
