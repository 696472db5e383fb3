"""The loss, the metrics and the learning rate of the training.

Losses and metrics are means over tokens. Each has a weight: 1 for a token, 0 for padding.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable("transformer")
class SmoothedCrossentropy(keras.losses.Loss):
    """The cross-entropy of logits, with label smoothing.

    `call` returns one value for each token, and Keras takes their weighted mean. So Tarantella
    can divide by the number of tokens on all ranks, and each token of a step counts the same,
    wherever it is. A mean taken in `call` would cover only the rank's own tokens.
    """

    def __init__(
        self,
        smoothing: float = 0.1,
        reduction: str = "mean_with_sample_weight",
        name: str = "smoothed_crossentropy",
    ) -> None:
        super().__init__(name=name, reduction=reduction)
        self.smoothing = smoothing

    def call(self, y_true: Any, y_pred: Any) -> Any:
        of_truth = token_losses(y_true, y_pred)
        of_all = ops.logsumexp(y_pred, axis=-1) - ops.mean(y_pred, axis=-1)
        return (1 - self.smoothing) * of_truth + self.smoothing * of_all

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "smoothing": self.smoothing}


class TokenMean(keras.metrics.Metric):
    """The mean of one value for each token.

    It keeps a sum and a count, which Tarantella adds up over the ranks.
    """

    def __init__(self, name: str, dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def values(self, y_true: Any, y_pred: Any) -> Any:
        raise NotImplementedError

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        values = ops.cast(self.values(y_true, ops.cast(y_pred, self.dtype)), self.dtype)
        weights = ops.ones_like(values) if sample_weight is None else sample_weight
        weights = ops.cast(weights, self.dtype)
        self.total.assign_add(ops.sum(values * weights))
        self.count.assign_add(ops.sum(weights))

    def result(self) -> Any:
        return ops.divide_no_nan(self.total, self.count)


@keras.saving.register_keras_serializable("transformer")
class TokenAccuracy(TokenMean):
    """The share of tokens that are predicted correctly."""

    def __init__(self, name: str = "accuracy", dtype: Any = None) -> None:
        super().__init__(name, dtype)

    def values(self, y_true: Any, y_pred: Any) -> Any:
        return ops.equal(ops.cast(y_true, "int64"), ops.cast(ops.argmax(y_pred, axis=-1), "int64"))


@keras.saving.register_keras_serializable("transformer")
class Perplexity(TokenMean):
    """The exponential of the mean cross-entropy, without smoothing."""

    def __init__(self, name: str = "perplexity", dtype: Any = None) -> None:
        super().__init__(name, dtype)

    def values(self, y_true: Any, y_pred: Any) -> Any:
        return token_losses(y_true, y_pred)

    def result(self) -> Any:
        return ops.exp(super().result())


def token_losses(y_true: Any, y_pred: Any) -> Any:
    """The negative logarithm of the probability of each true token."""
    truth = ops.expand_dims(ops.cast(y_true, "int32"), -1)
    logits_of_truth = ops.squeeze(ops.take_along_axis(y_pred, truth, axis=-1), -1)
    return ops.logsumexp(y_pred, axis=-1) - logits_of_truth


@keras.saving.register_keras_serializable("transformer")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that rises linearly, then falls with the square root of the steps."""

    def __init__(self, peak: float, warmup_steps: int) -> None:
        super().__init__()
        self.peak = peak
        self.warmup_steps = warmup_steps

    def __call__(self, step: Any) -> Any:
        progress = (ops.cast(step, keras.config.floatx()) + 1) / self.warmup_steps
        return self.peak * ops.minimum(progress, ops.rsqrt(progress))

    def get_config(self) -> dict[str, Any]:
        return {"peak": self.peak, "warmup_steps": self.warmup_steps}
