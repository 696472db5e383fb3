"""From the gradients of the ranks' parts to those of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tarantella.comm.graph import Channel
from tarantella.comm.overlapped import OverlappedChannel
from tarantella.comm.phases import end_phase
from tarantella.comm.turns import in_turn
from tarantella.runtime import world
from tarantella.runtime.configuration import configuration
from tarantella.runtime.timeline import timeline


def channel() -> Channel:
    """What gradients are summed by.

    On one host, a sum is work for the cores that compute, and the shortest way is the best one.
    """
    if world.has_several_hosts():
        return OverlappedChannel("gradients", "sparse gradients")
    return Channel("gradients")


def end_update(variables: Sequence[Any]) -> None:
    """Notes for a timeline when variables have been updated."""
    if timeline() is not None:
        end_phase("update", [tf.identity(variable) for variable in variables])


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


def sum_over_ranks(
    gradients: Sequence[Any], channel: Channel, forward_was_noted: bool = False
) -> list[Any]:
    """The sums over the ranks, requested in the order in which backpropagation ends.

    Args:
        gradients: Tensors, slices or None.
        channel: What they are summed by.
        forward_was_noted: Whether a timeline has the forward pass already.
    """
    dense = [i for i in reversed(range(len(gradients))) if isinstance(gradients[i], tf.Tensor)]
    sparse = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
    sums = list(gradients)
    end_phase("backward" if forward_was_noted else "forward and backward", sums)
    threshold = configuration().fusion_threshold_bytes
    dense_sums = channel.allreduce([gradients[i] for i in dense], threshold)
    for i, total in zip(dense, dense_sums, strict=True):
        sums[i] = total
    for i in sparse:
        sums[i] = channel.concatenate(gradients[i])
    end_phase("waiting for sums", sums)
    return sums


def sum_in_turn(gradients: Sequence[Any]) -> list[Any]:
    """The sums over the ranks, wherever in the user's functions they are asked for."""
    return in_turn("gradients", lambda: sum_over_ranks(gradients, channel()))
