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
        own = _moments(x, axes)
        count = tf.size(x, tf.int64) / tf.size(own[0], tf.int64)
        mean_and_variance = self._of_all(count, *own, x.dtype)
        return [value if keepdims else tf.squeeze(value, axes) for value in mean_and_variance]

    def _of_layer(self, moments: Handler, layer: Any, inputs: Any, mask: Any) -> Any:
        if mask is None or not layer.synchronized:
            return moments(layer, inputs, mask)
        axes = internals.reduction_axes(layer)
        count, mean, variance = _masked_moments(inputs, mask, axes)
        epsilon = keras.config.epsilon()
        mean, variance = self._of_all(count, mean, variance, inputs.dtype, epsilon)
        return tf.squeeze(mean, axes), tf.squeeze(variance, axes)

    def _of_all(
        self,
        count: tf.Tensor,
        mean: tf.Tensor,
        variance: tf.Tensor,
        dtype: tf.DType,
        epsilon: float = 0.0,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Mean and variance of all ranks' values, from this rank's in float64.

        In float64 a variance survives the subtraction of large squares. `epsilon` is what Keras
        adds to the number of values.
        """
        counted = tf.cast(self._share() > 0, tf.float64) * tf.cast(count, tf.float64)
        values, total, squares = _sum_over_ranks(
            self._sum_gradients,
            counted,
            tf.math.multiply_no_nan(mean, counted),
            tf.math.multiply_no_nan(variance + tf.square(mean), counted),
        )
        divisor = tf.stop_gradient(values) + epsilon
        mean_of_all = total / divisor
        deviations = squares - mean_of_all * (2.0 * total - mean_of_all * tf.stop_gradient(values))
        variance_of_all = tf.maximum(deviations / divisor, 0.0)
        return tf.cast(mean_of_all, dtype), tf.cast(variance_of_all, dtype)

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


def _moments(x: tf.Tensor, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of values, in float64."""
    if x.dtype.size < tf.float32.size:
        x = tf.cast(x, tf.float32)
    rounded = tf.stop_gradient(tf.reduce_mean(x, axes, keepdims=True))
    rest = tf.reduce_mean(x - rounded, axes, keepdims=True)
    square = tf.reduce_mean(tf.math.squared_difference(x, rounded), axes, keepdims=True)
    return _unrounded(rounded, rest, square)


def _masked_moments(
    inputs: tf.Tensor, mask: tf.Tensor, axes: list[int]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """How many values the mask does not hide, their mean and variance, in float64."""
    visible = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
    count = tf.reduce_sum(tf.cast(visible, tf.float64), axes, keepdims=True)
    divisor = tf.cast(tf.maximum(count, 1.0), inputs.dtype)
    zeros = tf.zeros_like(inputs)

    def mean(values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.where(visible, values, zeros), axes, keepdims=True) / divisor

    rounded = tf.stop_gradient(mean(inputs))
    rest, square = mean(inputs - rounded), mean(tf.math.squared_difference(inputs, rounded))
    return count, *_unrounded(rounded, rest, square)


def _unrounded(
    rounded: tf.Tensor, rest: tf.Tensor, square: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance in float64, from the mean of values of a smaller type.

    Far from zero, the rounding of the ranks' means would show in the variance of all values.

    Args:
        rounded: The mean, as precise as that type is. Gradients do not go through it.
        rest: The mean of what the values differ from it.
        square: The mean of the squares of that.
    """
    wide_rest = tf.cast(rest, tf.float64)
    mean = tf.cast(rounded, tf.float64) + wide_rest
    return mean, tf.cast(square, tf.float64) - tf.square(wide_rest)


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
