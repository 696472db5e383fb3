"""Layers with state that training changes: what becomes of it on several ranks, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

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
)

import tarantella as tnt
from tarantella.errors import InputError

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.ranks(2)]


class Stateful(keras.layers.Layer):
    """A layer of the user's own, with one variable that is not trained."""

    options: ClassVar[dict[str, Any]] = {}

    def build(self, shape: Any) -> None:
        options = {"shape": (shape[-1],), "initializer": "zeros", **self.options}
        self.value = self.add_weight(trainable=False, name="value", **options)

    def call(self, inputs: Any, training: bool = False) -> Any:
        # As it was before this step, when all ranks had the same.
        value = keras.ops.cast(keras.ops.mean(self.value), inputs.dtype)
        if training:
            self.update(inputs)
        return inputs + value

    def update(self, inputs: Any) -> None:
        raise NotImplementedError


class MovingMean(Stateful):
    def update(self, inputs: Any) -> None:
        self.value.assign(0.9 * self.value + 0.1 * keras.ops.mean(inputs, axis=0))


class MovingMeanInCondition(MovingMean):
    def update(self, inputs: Any) -> None:
        tf.cond(tf.shape(inputs)[1] > 1, lambda: self._write(inputs), lambda: False)

    def _write(self, inputs: Any) -> bool:
        super().update(inputs)
        return True


class MovingMeanInFunction(MovingMean):
    """TensorFlow traces the function once, and not again when the model is compiled anew."""

    @tf.function(autograph=False, reduce_retracing=True)
    def update(self, inputs: Any) -> None:
        super().update(inputs)


class CountsSteps(Stateful):
    options: ClassVar[dict[str, Any]] = {"shape": (), "dtype": "int64"}

    def update(self, inputs: Any) -> None:
        self.value.assign_add(1)


class CountsStepsInFloats(CountsSteps):
    options: ClassVar[dict[str, Any]] = {"shape": (), "dtype": "float32"}


class CountsSamples(CountsSteps):
    options: ClassVar[dict[str, Any]] = {"shape": (), "dtype": "int64", "aggregation": "sum"}

    def update(self, inputs: Any) -> None:
        self.value.assign_add(keras.ops.cast(keras.ops.shape(inputs)[0], "int64"))


class SumsSamples(CountsSamples):
    options: ClassVar[dict[str, Any]] = {"aggregation": "sum"}

    def update(self, inputs: Any) -> None:
        self.value.assign_add(keras.ops.sum(inputs, axis=0))


class Codebook(Stateful):
    """A vector quantizer whose code words follow what is assigned to them."""

    def build(self, shape: Any) -> None:
        initial = keras.initializers.RandomNormal(seed=3)
        self.value = self.add_weight(shape=(4, shape[-1]), initializer=initial, trainable=False)

    def update(self, inputs: Any) -> None:
        distances = keras.ops.sum(keras.ops.square(inputs[:, None] - self.value[None]), axis=-1)
        assigned = keras.ops.one_hot(keras.ops.argmin(distances, axis=1), 4, dtype=inputs.dtype)
        pull = keras.ops.mean(assigned[:, :, None] * (inputs[:, None] - self.value[None]), axis=0)
        self.value.assign_add(0.2 * pull)


def model_with(layer: keras.layers.Layer) -> keras.Model:
    inputs = keras.Input((5,))
    hidden = layer(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(hidden))


def data() -> dict[str, Any]:
    """Batches of 4, 4, 4 and 1 samples: on three ranks, two have none of the last."""
    return {"x": batches(*classification_data())}


@pytest.mark.parametrize(
    "layer",
    [
        MovingMean,
        MovingMeanInCondition,
        CountsSteps,
        CountsStepsInFloats,
        CountsSamples,
        SumsSamples,
        Codebook,
        lambda: keras.layers.SpectralNormalization(keras.layers.Dense(4)),
        keras.layers.LayerNormalization,
        lambda: keras.layers.GroupNormalization(groups=5),
        keras.layers.UnitNormalization,
    ],
)
def test_a_layer_gives_what_it_gives_in_keras(layer: Callable[[], Any]) -> None:
    assert_trains_as_in_keras(lambda: model_with(layer()), lambda: CLASSIFICATION, data)


@pytest.mark.parametrize("execution", ["jit_compile", "run_eagerly", "steps_per_execution"])
@pytest.mark.device_sums
def test_ways_of_execution(execution: str) -> None:
    value = 3 if execution == "steps_per_execution" else True
    assert_trains_as_in_keras(
        lambda: model_with(MovingMean()),
        lambda: {**CLASSIFICATION, execution: value},
        data,
    )


@pytest.mark.parametrize("run_eagerly", [True, False])
def test_state_that_is_written_in_a_function_which_is_traced_already(run_eagerly: bool) -> None:
    def again(model: keras.Model) -> list[np.ndarray]:
        model.compile(**CLASSIFICATION, run_eagerly=run_eagerly)
        model.fit(verbose=0, shuffle=False, **data())
        return model.get_weights()

    assert_trains_as_in_keras(
        lambda: model_with(MovingMeanInFunction()),
        lambda: {**CLASSIFICATION, "run_eagerly": run_eagerly},
        data,
        then=again,
    )


def test_state_that_is_written_in_evaluation_and_prediction() -> None:
    class Always(MovingMean):
        def call(self, inputs: Any, training: bool = False) -> Any:
            return super().call(inputs, training=True)

    def used(model: keras.Model) -> list[np.ndarray]:
        x, y = classification_data(samples=7)
        model.evaluate(x, y, batch_size=5, verbose=0)
        model.predict(x, batch_size=5, verbose=0)
        return model.get_weights()

    assert_trains_as_in_keras(lambda: model_with(Always()), lambda: CLASSIFICATION, data, then=used)


def test_state_that_two_calls_of_a_step_write() -> None:
    class OnlyForInference(MovingMean):
        def call(self, inputs: Any, training: bool = False) -> Any:
            outputs = super().call(inputs, training)
            return inputs if training else outputs

    class Twice(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_with(OnlyForInference())

        def call(self, inputs: Any, training: bool = False) -> Any:
            return self.inner(inputs, training=training)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            for inputs in (x, 2.0 * x):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x, y, self(inputs, training=True))
                variables = self.trainable_variables
                self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    assert_trains_as_in_keras(Twice, lambda: {**CLASSIFICATION, "metrics": None}, data)


def test_a_rank_without_samples_adds_nothing_even_if_it_computes_nonsense() -> None:
    class NotANumber(MovingMean):
        def update(self, inputs: Any) -> None:
            nonsense = np.nan if tnt.get_rank() else 2.0
            self.value.assign(keras.ops.full_like(self.value, nonsense))

    model = tnt.Model(model_with(NotANumber()))
    model.compile(**CLASSIFICATION)
    x, y = classification_data()
    model.train_on_batch(x[:1], y[:1])
    assert_close(model.layers[1].value.numpy(), np.full(5, 2.0))


def test_only_the_first_replica_counts_where_a_variable_says_so() -> None:
    class OwnRank(Stateful):
        options: ClassVar[dict[str, Any]] = {"shape": (), "aggregation": "only_first_replica"}

        def update(self, inputs: Any) -> None:
            self.value.assign(tf.constant(5.0 + tnt.get_rank(), tf.float64))

    model = tnt.Model(model_with(OwnRank()))
    model.compile(**CLASSIFICATION)
    model.fit(verbose=0, **data())
    assert float(model.layers[1].value) == 5.0


@pytest.mark.ranks(3)
def test_seeds_stay_different() -> None:
    dropout = keras.layers.Dropout(0.5, seed=3)
    model = tnt.Model(model_with(dropout))
    model.compile(**CLASSIFICATION)
    model.fit(verbose=0, **data())
    seeds = tnt.allgather(np.array(dropout.seed_generator.state))
    assert len({tuple(seed) for seed in np.asarray(seeds).tolist()}) == 3


# Layers that adapt to data before the training


@pytest.mark.parametrize("kind", ["array", "dataset"])
def test_normalization_that_every_rank_adapts(kind: str) -> None:
    x, _ = classification_data()

    def make_model() -> keras.Model:
        layer = keras.layers.Normalization()
        layer.adapt(x if kind == "array" else tf.data.Dataset.from_tensor_slices(x).batch(4))
        return model_with(layer)

    assert_trains_as_in_keras(make_model, lambda: CLASSIFICATION, data)


@pytest.mark.ranks(3)
def test_normalization_that_adapts_to_other_data_on_each_rank_is_the_masters() -> None:
    x, _ = classification_data()
    layer = keras.layers.Normalization()
    layer.adapt(x + tnt.get_rank())
    model = tnt.Model(model_with(layer))
    assert_close(np.array(layer(x)), (x - x.mean(axis=0)) / x.std(axis=0))
    assert_close(tnt.allgather(model.predict(x, verbose=0)), [model(x).numpy()] * 3)


def test_layers_with_a_vocabulary_that_every_rank_adapts() -> None:
    words = np.array([["red", "green blue"], ["blue", "red red"], ["grey", "green"]] * 4)

    def make_model() -> keras.Model:
        lookup = keras.layers.StringLookup()
        text = keras.layers.TextVectorization(output_mode="multi_hot")
        bins = keras.layers.Discretization(num_bins=3)
        lookup.adapt(words[:, :1])
        text.adapt(words[:, 1])
        bins.adapt(np.arange(12.0)[:, None])
        inputs = keras.Input((2,), dtype="string")
        number = keras.Input((1,))
        embedded = [
            keras.layers.Flatten()(keras.layers.Embedding(8, 3)(numbers))
            for numbers in (lookup(inputs[:, :1]), bins(number))
        ]
        words_of_text = keras.layers.Dense(2)(keras.layers.Flatten()(text(inputs[:, 1:])))
        hidden = keras.layers.Concatenate()([*embedded, words_of_text])
        return keras.Model([inputs, number], keras.layers.Dense(1)(hidden))

    dataset = batches((words, np.arange(12.0)[:, None]), np.arange(12.0)[:, None], batch_size=5)
    assert_trains_as_in_keras(
        make_model,
        lambda: {"optimizer": "sgd", "loss": "mse"},
        lambda: {"x": dataset},
    )


# Layers that keep a state for each sample of a batch


def recurrent(samples: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input(batch_shape=(samples, 5, 1)),
            keras.layers.LSTM(3, stateful=True, name="memory"),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


@pytest.mark.ranks(2)
def test_stateful_recurrent_layers_made_for_the_part_of_a_rank() -> None:
    x, y = classification_data(samples=12)
    results = []
    for samples, wrap in ((4, lambda model: model), (2, tnt.Model)):
        keras.utils.set_random_seed(42)
        model = wrap(recurrent(samples))
        model.compile(**CLASSIFICATION)
        history = model.fit(x[..., None], y, 4, epochs=2, shuffle=False, verbose=0).history
        results.append([history, model.get_weights()])
    assert_close(results[1], results[0])


@pytest.mark.ranks(2)
def test_stateful_recurrent_layers_made_for_the_global_batch_are_an_error() -> None:
    x, y = classification_data(samples=12)
    model = tnt.Model(recurrent(4))
    model.compile(**CLASSIFICATION)
    with pytest.raises(InputError, match=r"'memory' is stateful.*4 samples.*batch_shape=\(2, "):
        model.fit(x[..., None], y, batch_size=4, verbose=0)


class WritesVariables(keras.Model):
    """A step that writes variables which count as trainable, but no optimizer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.written = keras.Variable(np.zeros(3))
        self.average = keras.Variable(np.zeros((3, 1)))
        self.clipped = keras.Variable(np.zeros(3), trainable=False)
        self.sums = keras.Variable(np.zeros(3), trainable=False)
        self.samples = keras.Variable(0, dtype="int64", trainable=False)
        self.tracker = keras.metrics.Mean(name="written")
        self.weighted = keras.metrics.Mean(name="weighted")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(y - self(x)))
        trained = self.dense.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))
        self.average.assign(0.9 * self.average + 0.1 * self.dense.kernel)
        self.tracker.update_state(self.written)
        self.tracker.update_state([loss])
        self.weighted.update_state(loss, sample_weight=2.0)
        self.weighted.update_state(loss, sample_weight=keras.ops.shape(x)[0])
        self.written.assign(keras.ops.mean(x, axis=0))
        self.clipped.assign(keras.ops.maximum(self.clipped + keras.ops.mean(x, axis=0), 0))
        self.sums.assign(0.9 * self.sums + 0.1 * keras.ops.sum(x, axis=0))
        self.samples.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "int64"))
        return {"written": self.tracker.result(), "weighted": self.weighted.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker, self.weighted]


def test_variables_that_a_step_writes_and_metrics_of_numbers() -> None:
    x = np.random.default_rng(4).normal(size=(13, 3))
    assert_trains_as_in_keras(
        WritesVariables, lambda: {"optimizer": "sgd"}, lambda: {"x": batches(x, x[:, :1])}
    )
