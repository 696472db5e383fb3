"""Batch normalization on several ranks.

With `synchronized=True` a layer normalizes with mean and variance of the global batch: each rank
has those of its micro-batch, and one message combines them. The backward pass is another message:
the gradient of a sum over the ranks is the sum of the ranks' gradients.

Without it each rank normalizes with the statistics of its micro-batch, which are poor if that is
small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella.errors import InputError
from tarantella.graph.engine import channel
from tarantella.graph.ordering import in_program_order
from tarantella.internals import keras as internals
from tarantella.keras import hooks
from tarantella.keras.hooks import Handler, Hook


class GlobalMoments:
    """Means and variances over the samples of all ranks.

    Args:
        share: Returns this rank's share of the global batch; 0 if it computes on a sample that
            does not count.
        loss_has_share: Tells, when gradients are computed, whether the loss was multiplied by
            the share already. If not, the gradients will be.
    """

    def __init__(self, share: Callable[[], tf.Tensor], loss_has_share: Callable[[], bool]) -> None:
        self._share = share
        self._loss_has_share = loss_has_share

    def handlers(self) -> dict[Hook, Handler]:
        """The handlers for the hooks in Keras."""
        return {
            hooks.SYNCHRONIZED_MOMENTS: self._synchronized,
            hooks.LAYER_MOMENTS: self._of_layer,
        }

    def _synchronized(self, moments: Handler, x: Any, axes: Any, keepdims: bool) -> Any:
        own_mean, own_variance = tf.nn.moments(x, axes, keepdims=True)
        count = tf.size(x, tf.int64) / tf.size(own_mean, tf.int64)
        mean, variance = self._of_all(count, own_mean, own_variance)
        return [value if keepdims else tf.squeeze(value, axes) for value in (mean, variance)]

    def _of_layer(self, moments: Handler, layer: Any, inputs: Any, mask: Any) -> Any:
        if mask is None or not layer.synchronized:
            return moments(layer, inputs, mask)
        axes = internals.reduction_axes(layer)
        count, mean, variance = _masked_moments(inputs, mask, axes)
        mean, variance = self._of_all(count, mean, variance, keras.config.epsilon())
        return tf.squeeze(mean, axes), tf.squeeze(variance, axes)

    def _of_all(
        self, count: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor, epsilon: float = 0.0
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Mean and variance of all ranks' values, from this rank's.

        In float64, in which a variance survives the subtraction of large squares. `epsilon` is
        what Keras adds to the number of values.
        """
        counted = tf.cast(self._share() > 0, tf.float64) * tf.cast(count, tf.float64)
        wide_mean, wide_variance = tf.cast(mean, tf.float64), tf.cast(variance, tf.float64)
        values, total, squares = _sum_over_ranks(
            self._sum_gradients,
            counted,
            tf.math.multiply_no_nan(wide_mean, counted),
            tf.math.multiply_no_nan(wide_variance + tf.square(wide_mean), counted),
        )
        divisor = tf.stop_gradient(values) + epsilon
        mean_of_all = total / divisor
        deviations = squares - mean_of_all * (2.0 * total - mean_of_all * tf.stop_gradient(values))
        variance_of_all = tf.maximum(deviations / divisor, 0.0)
        return tf.cast(mean_of_all, mean.dtype), tf.cast(variance_of_all, variance.dtype)

    def _sum_gradients(self, *gradients: tf.Tensor) -> list[tf.Tensor]:
        """The gradients of the losses of all ranks.

        A rank without samples contributes nothing. If gradients are multiplied by this rank's
        share later, the ranks' are weighted by their shares here, and divided by this rank's.
        """
        if self._loss_has_share():
            weight = tf.cast(self._share() > 0, tf.float64)
            weighted = [tf.math.multiply_no_nan(g, weight) for g in gradients]
            return _sum_over_ranks(_refuse_gradients_of_gradients, *weighted)
        weighted = [tf.math.multiply_no_nan(g, self._share()) for g in gradients]
        sums = _sum_over_ranks(_refuse_gradients_of_gradients, *weighted)
        return [tf.math.divide_no_nan(total, self._share()) for total in sums]


def _sum_over_ranks(gradient: Callable[..., Any], *tensors: tf.Tensor) -> list[tf.Tensor]:
    """The sums over the ranks, with a function for their gradient."""

    @tf.custom_gradient
    def summed(*tensors: tf.Tensor) -> Any:
        return _sums(tensors), gradient

    results: list[tf.Tensor] = summed(*tensors)
    return results


def _refuse_gradients_of_gradients(*gradients: tf.Tensor) -> Any:
    raise InputError(
        "Gradients of gradients, as in a gradient penalty, cannot be computed through "
        "`BatchNormalization(synchronized=True)` on several ranks. Make the layers with "
        "`synchronized=False`, or use `LayerNormalization`."
    )


def _sums(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    everything = np.iinfo(np.int64).max
    return in_program_order(
        "statistics", lambda: channel("statistics").allreduce(tensors, everything)
    )


def _masked_moments(
    inputs: tf.Tensor, mask: tf.Tensor, axes: list[int]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """How many values there are that the mask does not hide, their mean and variance."""
    visible = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
    count = tf.reduce_sum(tf.cast(visible, tf.float64), axes, keepdims=True)
    divisor = tf.cast(tf.maximum(count, 1.0), inputs.dtype)
    zeros = tf.zeros_like(inputs)
    mean = tf.reduce_sum(tf.where(visible, inputs, zeros), axes, keepdims=True) / divisor
    squares = tf.where(visible, tf.square(inputs - mean), zeros)
    return count, mean, tf.reduce_sum(squares, axes, keepdims=True) / divisor


# Which layers do what


def synchronized_layers(model: keras.Model) -> list[str]:
    """The names of layers that communicate when the model is trained."""
    return [layer.name for layer in _trained_layers(model) if layer.synchronized]


def local_layers(model: keras.Model, written: Sequence[Any]) -> list[str]:
    """The names of layers that have normalized with the statistics of this rank's micro-batch."""
    ids = {id(variable) for variable in written}
    return [
        layer.name
        for layer in _trained_layers(model)
        if not layer.synchronized and id(layer.moving_mean) in ids
    ]


def _trained_layers(model: keras.Model) -> list[Any]:
    return [
        layer
        for layer in internals.flat_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ]
