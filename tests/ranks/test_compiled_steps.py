"""Steps of training that XLA compiles as a whole, or in part, with the results of plain Keras."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import ops
from oracle import assert_trains_as_in_keras, batches, classification_data, small_model

from tarantella.keras import compiled_step
from tarantella.keras.compiled_step import CompiledStep, RefusedStep

pytestmark = [pytest.mark.ranks(2), pytest.mark.usefixtures("float64")]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Whether each step that was traced was compiled as a whole."""
    kinds: list[type] = []
    take = compiled_step.take

    def noted(*args: Any) -> Any:
        step = take(*args)
        kinds.append(type(step))
        return step

    monkeypatch.setattr(compiled_step, "take", noted)
    return kinds


def check(
    make_model: Any = small_model, optimizer: Any = keras.optimizers.SGD, **compiled: Any
) -> None:
    assert_trains_as_in_keras(
        make_model,
        lambda: {
            "optimizer": optimizer(0.1),
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy"],
            "jit_compile": True,
            **compiled,
        },
        lambda: {"x": batches(*classification_data())},
    )


@pytest.mark.device_sums
def test_batches_of_unknown_size(taken: list[type]) -> None:
    check()
    assert set(taken) == {CompiledStep}


class Subclassed(keras.Model):
    """A model whose optimizer and metrics Keras builds only in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs_of = keras.layers.Dense(3, activation="softmax")

    def call(self, x: Any) -> Any:
        return self.outputs_of(x)


def subclassed() -> keras.Model:
    model = Subclassed()
    model.build((None, 5))
    return model


def test_variables_that_the_first_step_creates(taken: list[type]) -> None:
    check(subclassed, keras.optimizers.Adam)
    assert set(taken) == {CompiledStep}


def test_state_that_is_trained_as_well(taken: list[type]) -> None:
    """The layer writes its kernel, and then the optimizer does."""

    def make_model() -> keras.Model:
        hidden = keras.layers.SpectralNormalization(keras.layers.Dense(4))
        last = keras.layers.Dense(3, activation="softmax")
        return keras.Sequential([keras.Input((5,)), hidden, last])

    check(make_model)
    assert set(taken) == {CompiledStep}


class Projected(keras.optimizers.SGD):
    """Goes on with the variables after their update."""

    def apply_gradients(self, grads_and_vars: Any) -> None:
        pairs = list(grads_and_vars)
        super().apply_gradients(pairs)
        for _, variable in pairs:
            variable.assign(ops.clip(variable, -0.3, 0.3))


def test_what_follows_the_update(taken: list[type]) -> None:
    check(optimizer=Projected)
    assert set(taken) == {RefusedStep}


@pytest.mark.parametrize("activation", ["softmax", tf.nn.softmax], ids=["Keras", "TensorFlow"])
def test_certain_predictions_of_a_compiled_call(activation: Any, taken: list[type]) -> None:
    """Keras computes a loss from what the probabilities were made of, as these round to 0 and 1."""

    def certain() -> keras.Model:
        last = keras.layers.Dense(3, activation=activation)
        return keras.Sequential([keras.Input((5,)), keras.layers.Rescaling(100.0), last])

    check(certain, Projected)
    assert set(taken) == {RefusedStep}


def test_a_loop_in_a_refused_step(taken: list[type]) -> None:
    def make_model() -> keras.Model:
        inputs = keras.Input((5,))
        sequence = keras.layers.Reshape((5, 1))(inputs)
        hidden = keras.layers.SimpleRNN(4)(sequence)
        return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(hidden))

    check(make_model, Projected)
    assert set(taken) == {RefusedStep}


class Standardized(keras.layers.Layer):
    """Communicates, which only its code shows."""

    def call(self, x: Any) -> Any:
        mean, variance = ops.moments(x, axes=[0], synchronized=True)
        return (x - mean) / ops.sqrt(variance + 0.1)


@pytest.mark.device_sums
def test_a_call_that_communicates(taken: list[type]) -> None:
    def make_model() -> keras.Model:
        last = keras.layers.Dense(3, activation="softmax")
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), Standardized(), last])

    check(make_model)
    assert set(taken) == {RefusedStep}


def test_metric_of_the_learning_rate(taken: list[type]) -> None:
    made: list[Any] = []

    def optimizer(rate: float) -> Any:
        schedule = keras.optimizers.schedules.ExponentialDecay(rate, 1, 0.9)
        made.append(keras.optimizers.SGD(schedule))
        return made[-1]

    def learning_rate(truth: Any, prediction: Any) -> Any:
        return ops.cast(made[-1].learning_rate, "float64")

    check(optimizer=optimizer, metrics=[learning_rate])
    assert set(taken) == {RefusedStep}


class Cautious(keras.losses.Loss):
    """Catches whatever goes wrong."""

    def __call__(self, truth: Any, prediction: Any, sample_weight: Any = None) -> Any:
        weighted = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        weights = ops.cast(truth, "float64") + 0.1
        target = ops.one_hot(ops.cast(truth, "int32"), 3, dtype="float64")
        try:
            return weighted(target, prediction, sample_weight=weights)
        except Exception:
            return ops.mean(ops.square(target - prediction))


def test_a_refusal_that_is_caught(taken: list[type]) -> None:
    check(loss=Cautious())
    assert set(taken) == {RefusedStep}


class Averages(keras.layers.Layer):
    """Writes its state in a function that is traced only once."""

    def build(self, shape: Any) -> None:
        self.average = self.add_weight(shape=(), initializer="zeros", trainable=False)

    @tf.function
    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.average.assign(self.average * 0.9 + 0.1 * ops.mean(x))
        return tf.identity(x)


def averaging() -> keras.Model:
    inputs = keras.Input((5,))
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(Averages()(inputs)))


def test_state_that_a_refused_step_has_seen_written(taken: list[type]) -> None:
    check(averaging, loss=Cautious())
    assert set(taken) == {RefusedStep}
