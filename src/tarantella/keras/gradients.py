"""From the gradients of the ranks' micro-batches to those of the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella.graph.channel import Channel
from tarantella.graph.engine import channel
from tarantella.graph.ordering import in_program_order
from tarantella.graph.phases import end_phase
from tarantella.internals.tensorflow import CALLS, called_graph
from tarantella.keras.batch_reductions import (
    arguments_for,
    depends_on_samples,
    differs_inside,
)
from tarantella.runtime import world
from tarantella.runtime.configuration import configuration
from tarantella.runtime.timeline import timeline


def end_update(variables: Sequence[Any]) -> None:
    """Notes for a timeline when variables have been updated."""
    if timeline() is not None:
        end_phase("update", [tf.identity(variable) for variable in variables])


def give_shapes(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Gives gradients the shapes of their variables, which loops in a graph can lose."""
    for gradient, variable in zip(gradients, variables, strict=True):
        if isinstance(gradient, tf.Tensor):
            gradient.set_shape(variable.shape)
        elif isinstance(gradient, tf.IndexedSlices):
            gradient.values.set_shape([None, *variable.shape[1:]])


def weighted(gradients: Sequence[Any], share: tf.Tensor) -> list[Any]:
    """The gradients of means over a micro-batch, as its contribution to those of a global mean."""
    return [None if gradient is None else _scaled(gradient, share) for gradient in gradients]


def _scaled(gradient: Any, share: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = _scaled(gradient.values, share)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    # A rank without samples contributes zeros, whatever it computed on another rank's sample.
    return tf.math.multiply_no_nan(gradient, tf.cast(share, gradient.dtype))


def sum_over_ranks(
    gradients: Sequence[Any], channel: Channel, forward_was_noted: bool = False
) -> list[Any]:
    """The sums over the ranks, requested in the order in which backpropagation ends.

    Args:
        gradients: Tensors, slices or None.
        channel: What sums them.
        forward_was_noted: Whether a timeline has the forward pass already.
    """
    dense = [i for i in reversed(range(len(gradients))) if isinstance(gradients[i], tf.Tensor)]
    lookups = {
        i: _lookups_of(g) for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)
    }
    end_phase("backward" if forward_was_noted else "forward and backward", list(gradients))
    of_lookups = [one for each in lookups.values() for one in each]
    added = [one for one in of_lookups if one.is_added]
    gathered = [one for one in of_lookups if not one.is_added]
    totals, everyones = channel.allreduce_with_slices(
        [*(gradients[i] for i in dense), *(one.slices.values for one in added)],
        [one.slices for one in gathered],
        configuration().fusion_threshold_bytes,
    )
    sums = list(gradients)
    for i, total in zip(dense, totals[: len(dense)], strict=True):
        sums[i] = total
    found = {
        one: one.with_values(total) for one, total in zip(added, totals[len(dense) :], strict=True)
    }
    found |= {one: one.of_all_ranks(own) for one, own in zip(gathered, everyones, strict=True)}
    for i, each in lookups.items():
        sums[i] = _joined([found[one] for one in each], gradients[i].dense_shape)
    end_phase("waiting for sums", sums)
    return sums


@dataclass(frozen=True, eq=False)
class _Lookup:
    """The slices of one lookup of a variable, as this rank has them.

    One process has the slices of each sample, one after the other, but those of a lookup that
    depends on no sample, such as one of positions, only once. This matters to an optimizer: Keras
    does not add up slices of the same index, so it squares each slice and not their sum.

    Attributes:
        slices: The slices.
        depends: Whether their indices depend on the samples.
    """

    slices: tf.IndexedSlices
    depends: bool

    @property
    def is_added(self) -> bool:
        """Whether their sum over the ranks is one of tensors whose shape is known."""
        return not self.depends and bool(self.slices.values.shape.is_fully_defined())

    def with_values(self, values: tf.Tensor) -> tf.IndexedSlices:
        return tf.IndexedSlices(values, self.slices.indices, self.slices.dense_shape)

    def of_all_ranks(self, everyones: tf.IndexedSlices) -> tf.IndexedSlices:
        """What one process would have, of the slices of all ranks."""
        if tf.executing_eagerly():
            return _folded(everyones, world.get_size())
        if self.depends:
            return everyones
        shape = tf.concat([[world.get_size()], tf.shape(self.slices.values)], 0)
        return self.with_values(tf.reduce_sum(tf.reshape(everyones.values, shape), axis=0))


def _lookups_of(slices: tf.IndexedSlices) -> list[_Lookup]:
    if tf.executing_eagerly():
        return [_Lookup(slices, True)]
    lookups = _lookups(slices.indices, depends_on_samples())
    if all(depends for _, depends in lookups):
        return [_Lookup(slices, True)]
    values = tf.split(slices.values, [tf.size(indices) for indices, _ in lookups])
    found = []
    for own, (indices, depends) in zip(values, lookups, strict=True):
        if not depends:
            own.set_shape([indices.shape[0], *slices.values.shape[1:]])
        one = tf.IndexedSlices(own, tf.cast(indices, slices.indices.dtype), slices.dense_shape)
        found.append(_Lookup(one, depends))
    return found


def _joined(slices: list[tf.IndexedSlices], dense_shape: Any) -> tf.IndexedSlices:
    if len(slices) == 1:
        return slices[0]
    return tf.IndexedSlices(
        tf.concat([one.values for one in slices], 0),
        tf.concat([one.indices for one in slices], 0),
        dense_shape,
    )


def _lookups(
    indices: tf.Tensor, depends: Callable[[tf.Tensor], bool]
) -> list[tuple[tf.Tensor, bool]]:
    """The indices of each lookup of a variable, and whether they depend on samples.

    TensorFlow puts those of all lookups into one tensor.
    """
    operation = indices.op
    if operation.type == "ConcatV2":
        return [one for joined in operation.inputs[:-1] for one in _lookups(joined, depends)]
    if operation.type in ("Identity", "Cast"):
        return _lookups(operation.inputs[0], depends)
    if operation.type in CALLS and (graph := called_graph(operation)) is not None:
        inside = _lookups(
            graph.outputs[indices.value_index],
            lambda inner: (
                differs_inside(inner) or any(map(depends, arguments_for(operation, graph, inner)))
            ),
        )
        # A function's own tensors cannot be used outside it: at most one size can be unknown. That
        # of what depends on samples may be known on some ranks only, and all have to split alike.
        parts: list[tuple[int, bool]] = []
        for inner, which in inside:
            if parts and which and parts[-1][1]:
                continue  # together with the one before it
            parts.append((-1 if which or inner.shape[0] is None else inner.shape[0], which))
        sizes = [size for size, _ in parts]
        is_here = indices.graph is tf.compat.v1.get_default_graph()
        if is_here and sizes.count(-1) <= 1:
            split = tf.split(indices, sizes)
            return [(one, which) for one, (_, which) in zip(split, parts, strict=True)]
    return [(indices, depends(indices))]


def _folded(everyones: tf.IndexedSlices, ranks: int) -> tf.IndexedSlices:
    """Slices of all ranks; those that most likely depend on no sample are added up.

    In an eager step nothing shows where indices come from. Positions increase and are the same on
    all ranks; for indices of samples, this is hardly ever true.
    """
    count = len(everyones.indices) // ranks
    if count < 2 or count * ranks != len(everyones.indices):
        return everyones
    by_rank = everyones.indices.numpy().reshape(ranks, count)
    if (by_rank != by_rank[0]).any() or (np.diff(by_rank[0]) <= 0).any():
        return everyones
    shape = [ranks, count, *everyones.values.shape[1:]]
    values = tf.reduce_sum(tf.reshape(everyones.values, shape), axis=0)
    return tf.IndexedSlices(values, everyones.indices[:count], everyones.dense_shape)


def sum_in_program_order(gradients: Sequence[Any]) -> list[Any]:
    """The sums over the ranks, wherever in the user's functions they are asked for."""
    return in_program_order(
        "gradients",
        lambda: sum_over_ranks(gradients, channel("gradients", configuration().gradient_type)),
    )
