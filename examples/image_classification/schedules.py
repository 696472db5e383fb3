"""The learning rate of "Accurate, Large Minibatch SGD" (Goyal et al., 2017).

- Linear scaling: the rate is proportional to the global batch size, so a step with twice as many
  samples is twice as large.
- Gradual warm-up: the full rate is too large for an untrained model, so the rate rises from
  that of a batch of 256 to its full value in the first 5 of 90 epochs.
- Decay: the rate is divided by 10 after 30, 60 and 80 of 90 epochs, or follows a cosine.

Shorter and longer trainings do all of this at the same fractions of their length.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

REFERENCE_BATCH_SIZE = 256
EPOCHS = 90  # the following numbers refer to a training of this length
WARM_UP = 5
DECAYS = (30, 60, 80)
KINDS = ("step", "cosine")


@keras.saving.register_keras_serializable("image_classification")
class ScaledRate(keras.optimizers.schedules.LearningRateSchedule):
    """Warm-up to a rate that scales with the batch size, then decay.

    Args:
        base_rate: The rate for batches of 256.
        batch_size: The global batch size.
        total_steps: The number of steps of the whole training.
        kind: How the rate decays: "step" or "cosine".

    Example:
        >>> rate = ScaledRate(0.1, batch_size=1024, total_steps=900)
        >>> [round(float(rate(step)), 3) for step in (0, 25, 50, 299, 300, 600, 800)]
        [0.1, 0.25, 0.4, 0.4, 0.04, 0.004, 0.0]
    """

    def __init__(
        self, base_rate: float, batch_size: int, total_steps: int, kind: str = "step"
    ) -> None:
        self.base_rate = base_rate
        self.batch_size = batch_size
        self.total_steps = total_steps
        self.kind = kind

    def __call__(self, step: Any) -> tf.Tensor:
        peak = self.base_rate * self.batch_size / REFERENCE_BATCH_SIZE
        start = min(self.base_rate, peak)
        # In float64: float32 would round a decay to the wrong step.
        epoch = EPOCHS * tf.cast(step, tf.float64) / self.total_steps
        warming = start + (peak - start) * epoch / WARM_UP
        decayed = peak * (cosine(epoch) if self.kind == "cosine" else steps_down(epoch))
        return tf.cast(tf.where(epoch < WARM_UP, warming, decayed), tf.float32)

    def get_config(self) -> dict[str, Any]:
        return {
            "base_rate": self.base_rate,
            "batch_size": self.batch_size,
            "total_steps": self.total_steps,
            "kind": self.kind,
        }


def steps_down(epoch: tf.Tensor) -> tf.Tensor:
    """1, divided by 10 at each of the decays."""
    decays = sum(tf.cast(epoch >= decay, tf.float64) for decay in DECAYS)
    return tf.pow(tf.constant(0.1, tf.float64), decays)


def cosine(epoch: tf.Tensor) -> tf.Tensor:
    """From 1 at the end of the warm-up to 0 at the end of the training."""
    progress = (epoch - WARM_UP) / (EPOCHS - WARM_UP)
    return (1 + tf.cos(math.pi * progress)) / 2
