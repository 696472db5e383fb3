"""Losses of one step, as contributions to the loss of the global batch.

- A rank holds n of the N samples of the global batch. What its code computes as a mean over
  its samples counts n/N, its share; a loss is multiplied by it before the gradients are
  taken, so that the plain sum of the ranks' gradients is the gradient of the global loss.
- What Keras computes as a sum over samples is divided by the share first; what Keras divides
  by something other than N (a mask's valid entries, the sum of the sample weights) gets the
  divisor of the global batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tarantella.graph.phases import end_phase
from tarantella.internals import keras as internals
from tarantella.keras import hooks
from tarantella.keras.global_numbers import GlobalNumbers
from tarantella.keras.hooks import Handler, Hook
from tarantella.keras.step_share import StepShare

_SUMMING_REGULARIZERS = (
    keras.regularizers.L1,
    keras.regularizers.L2,
    keras.regularizers.L1L2,
)


class Losses:
    """The losses of one step.

    Args:
        model: The model.
        share: This rank's share of the global batch.
        numbers: The numbers in the user's code, over all ranks.
        nested: The handlers within a call that is handled here.
    """

    def __init__(
        self,
        model: Any,
        share: StepShare,
        numbers: GlobalNumbers,
        nested: Mapping[Hook, Handler | None],
    ) -> None:
        self._share = share
        self._numbers = numbers
        self._nested = nested
        self._scaled_for: set[int] = set()  # optimizers that have not applied gradients yet
        self._regularizers = {
            id(layer.activity_regularizer)
            for layer in internals.flat_layers(model)
            if isinstance(layer.activity_regularizer, _SUMMING_REGULARIZERS)
        }

    def handlers(self) -> dict[Hook, Handler]:
        """The handlers for the hooks in Keras."""
        handlers: dict[Hook, Handler] = {
            hooks.REDUCE_LOSS: self._reduce,
            hooks.SCALE_LOSS: self._scale,
            hooks.TAKE_GRADIENTS: self._gradient,
        }
        # Other versions of Keras divide what a regularizer sums up over the batch.
        if self._regularizers and internals.activity_losses_are_sums():
            handlers[hooks.REGULARIZE] = self._regularize
        return handlers

    def is_scaled(self) -> bool:
        """Whether a loss whose gradients are not applied yet was multiplied by the share."""
        return bool(self._scaled_for)

    def is_scaled_for(self, optimizer: Any) -> bool:
        """Whether the gradients that an optimizer applies next are those of a scaled loss."""
        return id(optimizer) in self._scaled_for

    def take_scaled(self, optimizer: Any) -> bool:
        """Whether the gradients that an optimizer applies now are those of a scaled loss."""
        is_scaled = self.is_scaled_for(optimizer)
        self._scaled_for.discard(id(optimizer))
        return is_scaled

    def _reduce(
        self,
        reduce: Handler,
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        loss = reduce(values, sample_weight, mask, reduction, dtype)
        values = keras.ops.convert_to_tensor(values, dtype=dtype)
        if values.shape.rank == 0:  # reduced by the user's loss function already
            return self._numbers.as_mean(loss, is_own_loss=True)
        if reduction in (None, "none"):
            return loss
        if reduction == "sum":
            return self._numbers.note_mean(self._share.divide(loss))
        if reduction == "mean_with_sample_weight":
            weights = internals.merged_sample_weight(values, sample_weight, mask, dtype)
            epsilon = 0.0
        else:
            weights = mask
            epsilon = internals.mask_epsilon()
        if weights is not None:
            loss = loss * tf.cast(self._correction(weights, epsilon), loss.dtype)
        return self._numbers.note_mean(loss)

    def _correction(self, weights: Any, epsilon: float) -> tf.Tensor:
        """Exchanges the divisor of this micro-batch, the sum of `weights`, for the global one."""
        own = tf.reduce_sum(tf.cast(keras.ops.convert_to_tensor(weights), tf.float64))
        own = tf.stop_gradient(own)
        counted = tf.where(self._share.has_samples(), own, tf.zeros_like(own))
        (everyones,) = self._numbers.sums_over_ranks([counted])
        return tf.math.divide_no_nan((own + epsilon) * self._share.inverse(), everyones + epsilon)

    def _regularize(self, regularize: Handler, regularizer: Any, *args: Any, **kwargs: Any) -> Any:
        """What a regularizer sums up over the outputs of a layer; weights are left alone."""
        is_of_weight = bool(args) and isinstance(args[0], internals.AnyVariable)
        if id(regularizer) not in self._regularizers or is_of_weight:
            return regularize(regularizer, *args, **kwargs)
        with hooks.suspended(hooks.REGULARIZE):
            return self._share.divide(regularize(regularizer, *args, **kwargs))

    def _scale(self, scale_loss: Handler, optimizer: Any, loss: Any) -> Any:
        self._scaled_for.add(id(optimizer))
        loss = keras.ops.convert_to_tensor(loss)
        end_phase("forward", loss)
        loss = self._share.times(self._numbers.as_mean(loss))
        with hooks.handling(self._nested):
            loss = scale_loss(optimizer, loss)
        return self._numbers.note_sum(loss)

    def _gradient(
        self,
        gradient: Handler,
        tape: tf.GradientTape,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # With an optimizer's `scale_loss`, the loss has the share of this rank already.
        trains = any(map(_is_variable, keras.tree.flatten(sources)))
        if trains and not self._scaled_for:
            target, output_gradients = self._numbers.targets_as_means(target, output_gradients)
        return gradient(tape, target, sources, output_gradients, *args, **kwargs)


def _is_variable(source: Any) -> bool:
    return isinstance(source, (tf.Variable, keras.Variable))
