"""Every Keras optimizer gives on several ranks the weights and logs that it gives in one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import pytest
from oracle import assert_trains_as_in_keras, batches, classification_data, small_model

pytestmark = pytest.mark.usefixtures("float64")

ALL = sorted(
    name
    for name, cls in vars(keras.optimizers).items()
    if inspect.isclass(cls)
    and issubclass(cls, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
)

# These change each weight by its own gradients alone, as Adam and SGD do.
ALIKE = ("Adadelta", "Adagrad", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop")

VARIANTS: dict[str, Callable[[], Any]] = {
    "clipnorm": lambda: keras.optimizers.Adam(0.05, clipnorm=0.01),
    "clipvalue": lambda: keras.optimizers.Adam(0.05, clipvalue=0.01),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "weight_decay": lambda: keras.optimizers.Adam(0.05, weight_decay=0.01),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7),
    "ema_overwrite": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3
    ),
    "accumulation": lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=3),
    "loss_scale_factor": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.05), initial_scale=4.0, dynamic_growth_steps=3
    ),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
}


# These, too, change each weight by itself, as plain Adam and SGD do.
VARIANTS_ALIKE = (
    "clipvalue", "ema_overwrite", "loss_scale_factor", "momentum", "schedule", "weight_decay",
)  # fmt: skip

# Not in all versions of Keras that we support.
if hasattr(keras.optimizers, "MultiOptimizer"):
    VARIANTS["multi"] = lambda: keras.optimizers.MultiOptimizer(
        lambda variable: (
            keras.optimizers.SGD(0.1) if "bias" in variable.path else keras.optimizers.Adam(0.05)
        )
    )


def _train_with(make_optimizer: Callable[[], Any]) -> None:
    assert_trains_as_in_keras(
        small_model,
        lambda: {
            "optimizer": make_optimizer(),
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy"],
        },
        lambda: {"x": batches(*classification_data())},
        second_fit=True,
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in ALIKE else name for name in ALL]
)
def test_optimizer_gives_the_serial_result(name: str) -> None:
    _train_with(lambda: getattr(keras.optimizers, name)(learning_rate=0.05))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name in VARIANTS_ALIKE else name
        for name in VARIANTS
    ],
)
def test_optimizer_option_gives_the_serial_result(name: str) -> None:
    _train_with(VARIANTS[name])
