"""However a loss weighs and reduces samples, the ranks' contributions add up to the global one."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import Decay, assert_trains_as_in_keras, batches, classification_data, small_model

import tarantella as tnt

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.ranks(2)]

REDUCTIONS = ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight", "none"]


def _weights() -> np.ndarray:
    return np.random.default_rng(3).uniform(0.1, 2.0, size=13)


# Without weights these are the same as `sum_over_batch_size`.
MEANS = ("mean", "mean_with_sample_weight")


@pytest.mark.parametrize(
    ("reduction", "weighted"),
    [
        *((reduction, True) for reduction in REDUCTIONS),
        *(
            pytest.param(name, False, marks=pytest.mark.long) if name in MEANS else (name, False)
            for name in REDUCTIONS
        ),
    ],
)
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
            "optimizer": "sgd",
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


# One is enough where TensorFlow's collectives sum what the ranks have weighed and reduced.
@pytest.mark.parametrize(
    "reduction", [*REDUCTIONS[:3], pytest.param(REDUCTIONS[3], marks=pytest.mark.device_sums)]
)
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
        lambda: {"optimizer": "sgd", "loss": "mse", "weighted_metrics": ["mae"]},
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


def _squares(x: Any) -> Any:
    return keras.ops.sum(keras.ops.square(x), axis=-1)


def _masked_mean(values: Any, weights: Any) -> Any:
    return tf.reduce_sum(values * weights) / tf.reduce_sum(weights)


def _dice(values: Any) -> Any:
    """Not linear in the sums that it is computed from."""
    return 1 - (2 * tf.reduce_sum(values) + 1) / (tf.reduce_sum(values**2) + 2)


ADDED = {
    "one_value_a_sample": _squares,
    "one_value_a_feature_of_a_sample": keras.ops.square,
    "mean": lambda x: keras.ops.mean(keras.ops.square(x)),
    "sum": lambda x: keras.ops.sum(keras.ops.square(x)),
    "sum_divided_by_samples": lambda x: (
        keras.ops.sum(keras.ops.square(x)) / keras.ops.cast(keras.ops.shape(x)[0], "float64")
    ),
    "function_of_sums": lambda x: _dice(keras.ops.sigmoid(x)),
}


@pytest.mark.parametrize(
    ("added", "jit_compile"),
    [*((added, False) for added in ADDED), ("one_value_a_sample", True), ("sum", True)],
)
def test_add_loss_counts_as_keras_counts_it(added: str, jit_compile: bool) -> None:
    class Adding(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(ADDED[added](inputs))
            return inputs

    def make_model() -> keras.Model:
        inputs = keras.Input((5,))
        hidden = Adding()(keras.layers.Dense(4, kernel_regularizer=Decay())(inputs))
        return keras.Model(inputs, keras.layers.Dense(1)(hidden))

    assert_trains_as_in_keras(
        make_model,
        lambda: {
            "optimizer": keras.optimizers.SGD(0.01),
            "loss": "mse",
            "jit_compile": jit_compile,
        },
        lambda: {"x": batches(classification_data()[0], _weights())},
    )


OWN_LOSSES = {
    "sum": lambda y, p: tf.reduce_sum((y - p) ** 2),
    "masked_mean": lambda y, p: _masked_mean((y - p) ** 2, tf.cast(y > 0.2, tf.float64) + 0.01),
    "mean_of_a_selection": lambda y, p: tf.reduce_mean(tf.boolean_mask((y - p) ** 2, y > 0.2)),
    "dice": lambda y, p: _dice(y * tf.sigmoid(p)),
    "logarithm_of_a_mean": lambda y, p: tf.math.log(tf.reduce_mean((y - p) ** 2)),
    "mean_of_each_output": lambda y, p: tf.reduce_sum(tf.reduce_mean((y - p) ** 2, axis=0)),
}


@pytest.mark.parametrize("loss", OWN_LOSSES)
def test_loss_function_that_returns_one_number(loss: str) -> None:
    targets = np.tile(_weights()[:, np.newaxis], 3)
    assert_trains_as_in_keras(
        small_model,
        lambda: {"optimizer": keras.optimizers.SGD(0.05), "loss": OWN_LOSSES[loss]},
        lambda: {"x": batches(classification_data()[0], targets)},
    )


class OwnStep(keras.Model):
    """Takes gradients, and logs, of what `loss` returns."""

    loss_of_step: Any = None
    scales = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="tracked")

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of_step(y, self(x, training=True))
            if self.scales:
                loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result(), "last": tf.reduce_sum(loss)}

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]


OWN_STEPS = {
    **OWN_LOSSES,
    "one_value_a_sample": lambda y, p: _squares(y - p),
    "keras_sum_and_mean": lambda y, p: (
        keras.losses.MeanSquaredError(reduction="sum")(y, p)
        + keras.losses.MeanAbsoluteError()(y, p)
    ),
    "average_by_constant": lambda y, p: tf.nn.compute_average_loss(
        _squares(y - p), global_batch_size=4
    ),
}


def _own_step_model(loss: Any, scales: bool) -> keras.Model:
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(4, activation="tanh", kernel_regularizer=Decay())(inputs)
    model = OwnStep(inputs, keras.layers.Dense(3, activation="softmax")(hidden))
    model.scales = scales
    model.loss_of_step = lambda y, p: loss(y, p) + sum(model.losses)
    return model


@pytest.mark.parametrize(
    ("loss", "scales"),
    [*((loss, False) for loss in OWN_STEPS), ("one_value_a_sample", True), ("masked_mean", True)],
)
def test_gradients_of_an_own_step(loss: str, scales: bool) -> None:
    targets = np.tile(_weights()[:, np.newaxis], 3)
    assert_trains_as_in_keras(
        lambda: _own_step_model(OWN_STEPS[loss], scales),
        lambda: {"optimizer": keras.optimizers.SGD(0.05)},
        lambda: {"x": batches(classification_data()[0], targets)},
    )


def test_one_value_a_sample_of_an_own_step_that_runs_eagerly() -> None:
    targets = np.tile(_weights()[:, np.newaxis], 3)
    assert_trains_as_in_keras(
        lambda: _own_step_model(OWN_STEPS["one_value_a_sample"], False),
        lambda: {"optimizer": keras.optimizers.SGD(0.05), "run_eagerly": True},
        lambda: {"x": batches(classification_data()[0], targets)},
    )


def test_number_that_no_mean_or_sum_shows_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = tnt.Model(_own_step_model(lambda y, p: tf.reduce_max((y - p) ** 2), False))
    model.compile("sgd")
    targets = np.tile(_weights()[:, np.newaxis], 3)
    model.fit(batches(classification_data()[0], targets), verbose=0)
    if tnt.is_master_rank():
        assert caplog.text.count("treated as a mean over the samples") == 1


@pytest.mark.parametrize("loss", ["sum", "keras_sum_and_mean"])
def test_own_function_that_steps_of_training_and_evaluation_call(loss: str) -> None:
    class InFunction(OwnStep):
        @tf.function
        def loss_and_metric(self, x: Any, y: Any) -> Any:
            prediction = self(x)
            self.tracker.update_state(_squares(y - prediction))
            return OWN_STEPS[loss](y, prediction)

        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.loss_and_metric(*data)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"tracked": self.tracker.result()}

        def test_step(self, data: Any) -> Any:
            loss = self.loss_and_metric(*data)
            return {"tracked": self.tracker.result(), "loss": loss}

    def make_model() -> keras.Model:
        inputs = keras.Input((5,))
        return InFunction(inputs, keras.layers.Dense(3, activation="softmax")(inputs))

    targets = np.tile(_weights()[:, np.newaxis], 3)
    assert_trains_as_in_keras(
        make_model,
        lambda: {"optimizer": keras.optimizers.SGD(0.05)},
        lambda: {"x": batches(classification_data()[0], targets)},
        then=lambda model: model.evaluate(
            batches(classification_data()[0], targets, batch_size=5), verbose=0, return_dict=True
        ),
    )


@pytest.mark.parametrize("divisor", ["rows", "entries"])
def test_sum_divided_by_a_number_of_samples_that_is_known_in_advance(divisor: str) -> None:
    def loss(y: Any, p: Any) -> Any:
        entries = p.shape[0] if divisor == "rows" else p.shape[0] * p.shape[1]
        return tf.reduce_sum((y - p) ** 2) / entries

    targets = np.tile(_weights()[:, np.newaxis], 3)
    data = tf.data.Dataset.from_tensor_slices((classification_data()[0], targets))
    assert_trains_as_in_keras(
        small_model,
        lambda: {"optimizer": keras.optimizers.SGD(0.05), "loss": loss},
        lambda: {"x": data.batch(5, drop_remainder=True)},
    )
