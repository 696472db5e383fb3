"""However a loss weighs and reduces its samples, the ranks' parts add up to the global one."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from oracle import Decay, assert_trains_as_in_keras, batches, classification_data, small_model

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.ranks(2)]

REDUCTIONS = ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight", "none"]


def _weights() -> np.ndarray:
    return np.random.default_rng(3).uniform(0.1, 2.0, size=13)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reduction(reduction: str, weighted: bool) -> None:
    x, y = classification_data()
    data = (x, y, _weights()) if weighted else (x, y)
    # Keras cannot add a regularizer to a loss that is not reduced.
    assert_trains_as_in_keras(
        lambda: small_model(regularized=reduction != "none"),
        lambda: {
            "optimizer": keras.optimizers.SGD(0.05),
            "loss": keras.losses.SparseCategoricalCrossentropy(reduction=reduction),
            "metrics": ["accuracy"],
            "weighted_metrics": ["accuracy"],
        },
        lambda: {"x": batches(*data)},
    )


def test_class_weight() -> None:
    assert_trains_as_in_keras(
        small_model,
        lambda: {
            "optimizer": "adam",
            "loss": "sparse_categorical_crossentropy",
            "weighted_metrics": ["accuracy"],
        },
        lambda: {"x": batches(*classification_data()), "class_weight": {0: 0.5, 1: 2.0, 2: 1.5}},
    )


def _sequences() -> tuple[Any, Any]:
    """Token sequences of different lengths, padded with the zeros that are masked."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(1, 9, size=(13, 6))
    for row, length in enumerate(rng.integers(0, 6, size=13)):
        tokens[row, length:] = 0
    return tokens, rng.normal(size=(13, 6, 2))


def _masked_model() -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
    hidden = keras.layers.LSTM(3, return_sequences=True)(hidden)
    return keras.Model(inputs, keras.layers.Dense(2)(hidden))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("reduction", REDUCTIONS[:4])
def test_mask(reduction: str) -> None:
    assert_trains_as_in_keras(
        _masked_model,
        lambda: {
            "optimizer": keras.optimizers.SGD(0.05),
            "loss": keras.losses.MeanSquaredError(reduction=reduction),
            "metrics": ["mae"],
        },
        lambda: {"x": batches(*_sequences())},
    )


def test_mask_with_sample_weight() -> None:
    assert_trains_as_in_keras(
        _masked_model,
        lambda: {"optimizer": "adam", "loss": "mse", "weighted_metrics": ["mae"]},
        lambda: {"x": batches(*_sequences(), _weights()[:, np.newaxis] * np.ones((1, 6)))},
    )


def test_ignored_class() -> None:
    x, y = classification_data()
    y = np.where(np.arange(13) % 3 == 0, -1, y)
    assert_trains_as_in_keras(
        small_model,
        lambda: {
            "optimizer": "sgd",
            "loss": keras.losses.SparseCategoricalCrossentropy(ignore_class=-1),
        },
        lambda: {"x": batches(x, y)},
    )


def _two_headed_model(regularized: bool) -> keras.Model:
    inputs = keras.Input((5,))
    decay = Decay() if regularized else None
    hidden = keras.layers.Dense(4, activation="relu", kernel_regularizer=decay)(inputs)
    return keras.Model(
        inputs,
        {
            "a": keras.layers.Dense(3, activation="softmax", name="a")(hidden),
            "b": keras.layers.Dense(1, name="b")(hidden),
        },
    )


@pytest.mark.parametrize(
    "second", ["sum", "sum_over_batch_size", "none"], ids=lambda reduction: f"with_{reduction}"
)
def test_several_outputs_with_their_own_reductions(second: str) -> None:
    x, y = classification_data()
    assert_trains_as_in_keras(
        lambda: _two_headed_model(regularized=second != "none"),
        lambda: {
            "optimizer": keras.optimizers.SGD(0.01),
            "loss": {
                "a": keras.losses.SparseCategoricalCrossentropy(),
                "b": keras.losses.MeanAbsoluteError(reduction=second),
            },
            "loss_weights": {"a": 0.3, "b": 1.7},
            "metrics": {"a": ["accuracy"], "b": ["mse"]},
        },
        lambda: {"x": batches(x, {"a": y, "b": x.sum(axis=1, keepdims=True)})},
    )


class _Penalty(keras.layers.Layer):
    """Adds a loss of its own, a mean over the samples as Keras's activity regularizers."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.mean(keras.ops.square(inputs)))
        return inputs


@pytest.mark.ranks(3)
def test_add_loss_and_regularizers_count_once() -> None:
    def make_model() -> keras.Model:
        inputs = keras.Input((5,))
        hidden = _Penalty()(keras.layers.Dense(4, kernel_regularizer=Decay())(inputs))
        return keras.Model(inputs, keras.layers.Dense(3, bias_regularizer=Decay())(hidden))

    assert_trains_as_in_keras(
        make_model,
        lambda: {
            "optimizer": "sgd",
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        },
        lambda: {"x": batches(*classification_data())},
    )


def test_activity_regularizers() -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")

    def make_model() -> keras.Model:
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(4, activity_regularizer="l2")(inputs)
        penalty = keras.regularizers.L1(0.1)
        return keras.Model(inputs, keras.layers.Dense(3, activity_regularizer=penalty)(hidden))

    x, y = classification_data()
    assert_trains_as_in_keras(
        make_model,
        lambda: {
            "optimizer": "sgd",
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        },
        lambda: {"x": batches(x.astype("float32"), y)},
        tolerance=1e-4,
        atol=1e-5,
    )


def test_loss_function_of_the_user() -> None:
    def loss(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y_pred - keras.ops.one_hot(y_true, 3)), axis=-1)

    assert_trains_as_in_keras(
        small_model,
        lambda: {"optimizer": "sgd", "loss": loss, "metrics": [loss]},
        lambda: {"x": batches(*classification_data())},
    )
