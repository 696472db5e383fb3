"""Batch normalization: of the global batch if `synchronized`, else of the micro-batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import (
    CLASSIFICATION,
    assert_close,
    assert_trains_as_in_keras,
    batches,
    classification_data,
    computed_by_master,
)

import tarantella as tnt
from tarantella.runtime.log import LOGGER

float64 = pytest.mark.usefixtures("float64")

# Not Adam: a weight in front of a normalization has a gradient of zero in some directions, of
# which Adam would make a full step out of rounding.
COMPILED = {**CLASSIFICATION, "optimizer": "sgd"}
HAS_RENORM = "renorm" in keras.layers.BatchNormalization().get_config()


def normalized(**options: Any) -> keras.layers.BatchNormalization:
    return keras.layers.BatchNormalization(**{"synchronized": True, "momentum": 0.8, **options})


def classifier(*layers: keras.layers.Layer) -> keras.Model:
    hidden = inputs = keras.Input((5,))
    for layer in layers:
        hidden = layer(hidden)
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(hidden))


def small_model(**options: Any) -> keras.Model:
    return classifier(keras.layers.Dense(4), normalized(**options), keras.layers.Activation("tanh"))


def data() -> dict[str, Any]:
    """Batches of 4, 4, 4 and 1 samples, and others to validate with."""
    return {
        "x": batches(*classification_data()),
        "validation_data": batches(*classification_data(samples=7), batch_size=2),
    }


# Synchronized: the result of plain Keras


@float64
@pytest.mark.ranks(1, 3)
def test_statistics_are_of_the_global_batch() -> None:
    assert_trains_as_in_keras(small_model, lambda: COMPILED, data)


def two_branches() -> keras.Model:
    """Layers that do not depend on each other, and could come to their messages in any order."""
    inputs = keras.Input((5,))
    branches = [
        normalized()(keras.layers.Dense(units, activation="tanh")(inputs))
        for units in (2, 3, 4, 5, 6, 7)
    ]
    hidden = normalized()(keras.layers.Concatenate()(branches))
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(hidden))


class OwnStep(keras.Model):
    """Neither scales its loss nor calls the model only once."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(4)
        self.normalize = normalized()
        self.out = keras.layers.Dense(3, activation="softmax")

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.out(self.normalize(self.hidden(inputs), training=training))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        for factor in (1.0, 2.0):
            with tf.GradientTape() as tape:
                y_pred = self(factor * x, training=True)
                loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"own": loss}


class SummedStep(OwnStep):
    """Scales its loss, which is a vector."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, y_pred)
            scaled = self.optimizer.scale_loss(losses)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        return {"own": keras.ops.mean(losses)}


class InFunction(keras.layers.Layer):
    """Normalizes in a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = normalized()

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    def call(self, inputs: Any, training: bool = False) -> Any:
        @tf.function(autograph=False)
        def normalize(x: Any) -> Any:
            return self.inner(x, training=training)

        return normalize(inputs)


class Moments(keras.layers.Layer):
    """A normalization of the user's own."""

    def call(self, inputs: Any) -> Any:
        mean, variance = keras.ops.moments(inputs, axes=[0], keepdims=True, synchronized=True)
        return (inputs - mean) / keras.ops.sqrt(variance + 0.1)


MODELS: dict[str, Callable[[], keras.Model]] = {
    "two_branches": two_branches,
    "own_step": OwnStep,
    "summed_step": SummedStep,
    "nested": lambda: classifier(
        keras.layers.Dense(4), keras.Sequential([normalized(), keras.Sequential([normalized()])])
    ),
    "another_axis": lambda: classifier(
        keras.layers.Reshape((5, 1)),
        keras.layers.Dense(3),
        normalized(axis=1, center=False),
        keras.layers.Flatten(),
    ),
    "in_function": lambda: classifier(keras.layers.Dense(4), InFunction()),
    "own_moments": lambda: classifier(keras.layers.Dense(4), Moments()),
    "frozen": lambda: classifier(keras.layers.Dense(4), normalized(trainable=False)),
    "far_from_zero": lambda: classifier(keras.layers.Rescaling(1.0, 200.0), normalized()),
}
if HAS_RENORM:
    MODELS["renorm"] = lambda: small_model(renorm=True, renorm_clipping={"rmax": 2.0, "dmax": 1.0})


@float64
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    compiled = {**COMPILED, "metrics": None} if "step" in name else COMPILED
    training = {"x": batches(*classification_data())}
    assert_trains_as_in_keras(MODELS[name], lambda: compiled, lambda: training)


@float64
@pytest.mark.ranks(2)
@pytest.mark.parametrize("execution", ["jit_compile", "run_eagerly", "steps_per_execution"])
@pytest.mark.device_sums
def test_ways_of_execution(execution: str) -> None:
    value = 3 if execution == "steps_per_execution" else True
    assert_trains_as_in_keras(small_model, lambda: {**COMPILED, execution: value}, data)


@float64
@pytest.mark.ranks(3)
def test_masked_samples_do_not_count() -> None:
    tokens = np.random.default_rng(1).integers(0, 4, size=(13, 4))
    tokens[12] = 0  # a batch of which nothing is left

    def make_model() -> keras.Model:
        inputs = keras.Input((4,), dtype="int32")
        hidden = keras.layers.Embedding(4, 3, mask_zero=True)(inputs)
        hidden = normalized()(keras.layers.Dense(3)(hidden))
        return keras.Model(inputs, keras.layers.Dense(2)(hidden))

    assert_trains_as_in_keras(
        make_model,
        lambda: {"optimizer": "sgd", "loss": "mse"},
        lambda: {"x": batches(tokens, np.ones((13, 4, 2)))},
    )


@float64
@pytest.mark.ranks(2)
def test_single_batches() -> None:
    x, y = classification_data()
    assert_trains_as_in_keras(
        small_model,
        lambda: COMPILED,
        lambda: {"x": batches(x, y)},
        then=lambda model: [model.train_on_batch(x[:7], y[:7]), model.train_on_batch(x[7:], y[7:])],
    )


@pytest.mark.ranks(2)
def test_mixed_precision_within_its_own_tolerance() -> None:
    def make_model() -> keras.Model:
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            return small_model()
        finally:
            keras.config.set_dtype_policy("float32")

    x, y = classification_data()
    assert_trains_as_in_keras(
        make_model,
        lambda: COMPILED,
        lambda: {"x": batches(x.astype("float32"), y)},
        tolerance=2e-2,
        atol=2e-2,
    )


@pytest.mark.ranks(3)
def test_float32_far_from_zero_keeps_its_variance() -> None:
    """As in Keras, whose variance does not suffer from a mean that is rounded."""
    layer = keras.layers.BatchNormalization(synchronized=True, momentum=0.0)
    model = tnt.Model(keras.Sequential([keras.Input((30,)), layer]))
    model.compile("sgd", "mse")
    x = (1000.0 + np.random.default_rng(1).normal(size=(10, 30))).astype("float32")
    model.train_on_batch(x, x)
    expected = np.var(x.astype("float64"), axis=0)
    np.testing.assert_allclose(np.array(layer.moving_variance), expected, rtol=1e-6)


@float64
@pytest.mark.ranks(2)
@pytest.mark.parametrize("in_graph", [True, False], ids=["function", "eager"])
def test_custom_loops(in_graph: bool) -> None:
    loss_function = keras.losses.SparseCategoricalCrossentropy()

    def trained(wrap: Any, distribute: Any, wrap_optimizer: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(42)
        model = wrap(small_model())
        optimizer = wrap_optimizer(keras.optimizers.SGD(0.1))

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = loss_function(y, model(x, training=True))
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        if in_graph:
            step = tf.function(step, reduce_retracing=True)
        for x, y in distribute(batches(*classification_data())):
            step(x, y)
        return [np.array(weight) for weight in model.weights]

    plain = computed_by_master(lambda: trained(*[lambda same: same] * 3))
    ours = trained(tnt.Model, tnt.distribute_dataset, tnt.keras.optimizers.Optimizer)
    assert_close(ours, plain)


# Statistics of the micro-batches, which is the default


@float64
@pytest.mark.ranks(3)
def test_local_statistics_are_averaged_over_the_samples_in_every_step() -> None:
    layer = keras.layers.BatchNormalization(momentum=0.5)
    model = tnt.Model(keras.Sequential([keras.Input((2,)), layer]))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.random.default_rng(1).normal(size=(8, 2))
    micro_batches = [x[0:3], x[3:6], x[6:8]]  # the last has fewer samples

    class SameOnAllRanks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            for value in (layer.moving_mean, layer.moving_variance):
                assert_close(tnt.allgather(np.array(value)), [np.array(value)] * 3, 0, 0)

    model.fit(x, x, batch_size=8, shuffle=False, verbose=0, callbacks=[SameOnAllRanks()])
    mean = 0.5 * sum(len(one) / 8 * one.mean(axis=0) for one in micro_batches)
    variance = 0.5 + 0.5 * sum(len(one) / 8 * one.var(axis=0) for one in micro_batches)
    assert_close(np.array(layer.moving_mean), mean)
    assert_close(np.array(layer.moving_variance), variance)

    model.train_on_batch(x[:1], x[:1])  # two ranks have nothing
    assert_close(np.array(layer.moving_mean), 0.5 * mean + 0.5 * x[0])
    assert_close(np.array(layer.moving_variance), 0.5 * variance)


@float64
@pytest.mark.ranks(2)
@pytest.mark.parametrize("execution", ["jit_compile", "run_eagerly", "steps_per_execution"])
def test_local_statistics_and_ways_of_execution(execution: str) -> None:
    def trained(**options: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(42)
        model = tnt.Model(small_model(synchronized=False))
        model.compile(**COMPILED, **options)
        model.fit(batches(*classification_data()), epochs=2, verbose=0)
        weights: list[np.ndarray] = model.get_weights()
        return weights

    weights = trained(**{execution: 3 if execution == "steps_per_execution" else True})
    assert_close(weights, trained())
    for weight in weights:
        assert_close(tnt.allgather(weight), [weight] * tnt.get_size(), 0, 0)


@float64
@pytest.mark.ranks(2)
def test_frozen_layers_are_those_of_keras() -> None:
    assert_trains_as_in_keras(
        lambda: classifier(normalized(synchronized=False, trainable=False)),
        lambda: COMPILED,
        lambda: {"x": batches(*classification_data())},
    )


# What the user is told


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of the library on this rank, as they come."""
    told: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    monkeypatch.setattr(LOGGER, "handlers", [Recorder(logging.WARNING)])
    return told


def fitted(batch_size: int, *, layer: Any = None, **options: Any) -> keras.Model:
    """A model that was fitted on 70 samples, the last batch of which is small."""
    layer = layer or keras.layers.BatchNormalization(name="norm", **options)
    model = tnt.Model(keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    model.fit(np.ones((70, 2)), np.ones((70, 1)), batch_size=batch_size, epochs=2, verbose=0)
    return model


@pytest.mark.ranks(2)
def test_small_parts_are_warned_of_once(warnings: list[str]) -> None:
    model = fitted(31)
    model.fit(np.ones((70, 2)), np.ones((70, 1)), batch_size=8, verbose=0)
    (warning,) = warnings
    assert "15 samples" in warning
    assert "'norm'" in warning
    assert "32 samples or more" in warning
    assert "synchronized=True" in warning


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 32},
        {"batch_size": 8, "synchronized": True},
        {"batch_size": 8, "trainable": False},
        {"batch_size": 8, "layer": keras.layers.LayerNormalization()},
    ],
    ids=["enough", "synchronized", "frozen", "another_layer"],
)
def test_no_warning(options: Any, warnings: list[str]) -> None:
    model = fitted(**options)
    model.evaluate(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
    model.predict(np.ones((8, 2)), batch_size=4, verbose=0)
    assert not warnings


@pytest.mark.ranks(2)
def test_no_warning_of_layers_that_run_in_inference_mode(warnings: list[str]) -> None:
    class Inference(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.normalize, self.out = keras.layers.BatchNormalization(), keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.out(self.normalize(inputs, training=False))

    model = tnt.Model(Inference())
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
    assert not warnings


@pytest.mark.ranks(2)
def test_small_parts_of_data_whose_batch_size_is_not_known(warnings: list[str]) -> None:
    def generate() -> Any:
        yield np.ones((31, 2)), np.ones((31, 1))
        yield np.ones((4, 2)), np.ones((4, 1))

    model = tnt.Model(keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()]))
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(generate(), verbose=0)
    assert len(warnings) == 1
    assert "15 samples" in warnings[0]


@pytest.mark.ranks(2)
def test_synchronized_layers_are_not_compiled_and_that_is_said(warnings: list[str]) -> None:
    model = tnt.Model(keras.Sequential([keras.Input((2,)), normalized(name="norm")]))
    model.compile("sgd", "mse", jit_compile=True)
    model.fit(np.ones((70, 2)), np.ones((70, 2)), batch_size=32, epochs=2, verbose=0)
    (warning,) = warnings
    assert "not compiled with XLA" in warning
    assert "'norm'" in warning


@pytest.mark.ranks(2)
def test_gradients_of_gradients_are_refused() -> None:
    class Penalized(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.stack = [keras.layers.Dense(4), normalized(), keras.layers.Dense(1)]

        def call(self, inputs: Any, training: Any = None) -> Any:
            for layer in self.stack:
                inputs = layer(inputs)
            return inputs

        def train_step(self, batch: Any) -> Any:
            x, _ = batch
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    outputs = self(x, training=True)
                loss = tf.reduce_mean(tf.square(inner.gradient(outputs, x)))
            weights = self.trainable_variables
            self.optimizer.apply(outer.gradient(loss, weights), weights)
            return {"loss": loss}

    x, y = classification_data()
    model = tnt.Model(Penalized())
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="Gradients of gradients"):
        model.fit(batches(x, y[:, None]), verbose=0)
