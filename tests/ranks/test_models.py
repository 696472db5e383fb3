"""Models of every kind train as in Keras, with their own steps, losses and metrics."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import (
    WITH_METRICS,
    Decay,
    assert_close,
    assert_trains_as_in_keras,
    batches,
    classification_data,
    small_model,
)

import tarantella as tnt

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.ranks(2)]


def _evaluated(model: keras.Model) -> list[Any]:
    data = batches(*classification_data())
    return [model.evaluate(data, verbose=0), model.predict(data, verbose=0)]


class Subclassed(keras.Model):
    """Not built before it sees data."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(4, activation="relu")
        self.out = keras.layers.Dense(3, activation="softmax")

    def call(self, inputs: Any) -> Any:
        return self.out(self.hidden(inputs))


class OwnTrainStep(Subclassed):
    """The training step that Keras's guide writes, with trackers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_tracker = keras.metrics.Mean(name="my_loss")
        self.norm = keras.metrics.Sum(name="norms")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="acc")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.norm, self.accuracy]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.norm.update_state(loss)
        self.accuracy.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(self.compute_loss(x, y, y_pred))
        self.accuracy.update_state(y, y_pred)
        return {"only": self.accuracy.result()}


class OwnComputeLoss(Subclassed):
    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True
    ) -> Any:
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * keras.ops.mean(keras.ops.square(y_pred))


class TwoOptimizers(keras.Model):
    """Two players with an optimizer each, as in a GAN; the model itself is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.Sequential([keras.layers.Dense(2)])  # not built yet
        self.second = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        self.tracker = keras.metrics.Mean(name="loss")

    def compile(self, one: Any, other: Any) -> None:
        super().compile()
        self.one, self.other = one, other

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        target = keras.ops.cast(y, x.dtype)[:, None]
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(target, self.second(self.first(x)))
        variables = self.second.trainable_variables
        self.other.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(target, self.second(self.first(x)))
        variables = self.first.trainable_variables
        self.one.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class Triplets(keras.Model):
    """A network that is trained with three inputs at a time, and makes a layer when it needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = keras.Sequential([keras.layers.Dense(2)])
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs: Any) -> Any:
        raise AssertionError("No step calls the model.")

    def distances(self, data: Any) -> Any:
        if not hasattr(self, "head"):
            self.head = keras.layers.Dense(2, activation="tanh")
        data = list(data.values()) if isinstance(data, dict) else data
        anchor, near, far = (self.head(self.network(each)) for each in data[:3])
        return keras.ops.mean((anchor - near) ** 2 - (anchor - far) ** 2)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.distances(data)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.test_step(data)

    def test_step(self, data: Any) -> dict[str, Any]:
        self.tracker.update_state(self.distances(data))
        return {"loss": self.tracker.result()}


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("evaluates_first", [False, True], ids=["fit", "evaluate_first"])
def test_own_step_on_data_of_its_own_kind_makes_the_variables(
    eager: bool, evaluates_first: bool
) -> None:
    rng = np.random.default_rng(3)
    parts = [rng.normal(size=(5, 3)) for _ in range(4)]
    data = dict(zip("abcd", parts, strict=True)) if eager else tuple(parts)

    def train(wrap: Any, seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        model = wrap(Triplets())
        model.compile("adam", run_eagerly=eager)
        dataset = tf.data.Dataset.from_tensor_slices(data).batch(3)
        before = model.evaluate(dataset, verbose=0) if evaluates_first else 0.0
        history = model.fit(dataset, verbose=0, epochs=2).history
        return before, history, [np.array(weight) for weight in model.weights]

    expected = train(lambda model: model, 5)
    assert_close(train(tnt.Model, 5 + tnt.get_rank()), expected)


def test_sequential_that_is_not_built() -> None:
    assert_trains_as_in_keras(
        lambda: keras.Sequential(
            [keras.layers.Dense(4, activation="relu"), keras.layers.Dense(3, activation="softmax")]
        ),
        lambda: WITH_METRICS,
        lambda: {"x": batches(*classification_data())},
        then=_evaluated,
    )


def test_functional() -> None:
    assert_trains_as_in_keras(
        small_model,
        lambda: WITH_METRICS,
        lambda: {
            "x": batches(*classification_data()),
            "validation_data": batches(*classification_data(samples=7), batch_size=2),
        },
        then=_evaluated,
    )


@pytest.mark.parametrize("kind", [Subclassed, OwnTrainStep, OwnComputeLoss])
def test_subclassed(kind: type[keras.Model]) -> None:
    assert_trains_as_in_keras(
        kind,
        lambda: WITH_METRICS,
        lambda: {
            "x": batches(*classification_data()),
            "validation_data": batches(*classification_data(samples=7), batch_size=2),
        },
        then=_evaluated,
    )


def test_own_train_step_with_two_optimizers() -> None:
    assert_trains_as_in_keras(
        TwoOptimizers,
        lambda: {"one": keras.optimizers.Adam(0.1), "other": keras.optimizers.SGD(0.1)},
        lambda: {"x": batches(*classification_data())},
    )


@pytest.mark.device_sums
def test_sparse_gradients_of_an_embedding() -> None:
    tokens = np.random.default_rng(1).integers(0, 20, size=(13, 4))

    def make_model() -> keras.Model:
        inputs = keras.Input((4,), dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(20, 3)(inputs))
        return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(hidden))

    for optimizer in ("sgd", "adam", "adagrad"):
        assert_trains_as_in_keras(
            make_model,
            lambda optimizer=optimizer: {**WITH_METRICS, "optimizer": optimizer},
            lambda: {"x": batches(tokens, classification_data()[1])},
        )


def test_several_inputs_and_outputs() -> None:
    x, y = classification_data()

    def make_model() -> keras.Model:
        left, right = keras.Input((5,), name="left"), keras.Input((2,), name="right")
        hidden = keras.layers.Concatenate()([keras.layers.Dense(3)(left), right])
        return keras.Model(
            {"left": left, "right": right},
            [
                keras.layers.Dense(3, activation="softmax", name="label")(hidden),
                keras.layers.Dense(1, name="value")(hidden),
            ],
        )

    def predicted(model: keras.Model) -> list[Any]:
        return model.predict({"left": x, "right": x[:, :2]}, batch_size=5, verbose=0)

    assert_trains_as_in_keras(
        make_model,
        lambda: {
            "optimizer": "adam",
            "loss": ["sparse_categorical_crossentropy", "mse"],
            "loss_weights": [1.0, 0.2],
            "metrics": [["accuracy"], ["mae"]],
        },
        lambda: {"x": batches({"left": x, "right": x[:, :2]}, (y, x[:, :1]))},
        then=predicted,
    )


def test_frozen_layers_and_variables_without_gradient() -> None:
    class Unused(keras.layers.Layer):
        def build(self, input_shape: Any) -> None:
            self.unused = self.add_weight(shape=(3,), name="unused")

        def call(self, inputs: Any) -> Any:
            return inputs

    def make_model() -> keras.Model:
        inputs = keras.Input((5,))
        frozen = keras.layers.Dense(4, activation="relu", trainable=False)
        hidden = Unused()(frozen(inputs))
        return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(hidden))

    assert_trains_as_in_keras(
        make_model, lambda: WITH_METRICS, lambda: {"x": batches(*classification_data())}
    )


def test_batches_by_hand() -> None:
    x, y = classification_data()

    def by_hand(model: keras.Model) -> list[Any]:
        return [
            model.train_on_batch(x[:7], y[:7]),
            model.train_on_batch(x[7:8], y[7:8], sample_weight=np.array([0.5])),
            model.train_on_batch(x[:7], y[:7], class_weight={0: 1.0, 1: 2.0, 2: 3.0}),
            model.test_on_batch(x, y),
            model.predict_on_batch(x[:5]),
            model.predict_on_batch(x[:1]),
            list(model.test_on_batch(x, y, return_dict=True)),
        ][:-1]

    assert_trains_as_in_keras(
        small_model, lambda: WITH_METRICS, lambda: {"x": batches(x, y)}, then=by_hand
    )


def test_the_first_batch_by_hand_builds_the_model_and_starts_from_the_master() -> None:
    x, y = classification_data()
    model = tnt.Model(Subclassed())
    model.compile(**WITH_METRICS)
    model.train_on_batch(x, y)
    for weight in model.get_weights():
        everyones = tnt.allgather(weight)
        assert all(np.array_equal(weight, other) for other in everyones)


@pytest.mark.parametrize("execution", ["jit_compile", "run_eagerly", "steps_per_execution"])
@pytest.mark.parametrize("kind", [small_model, OwnTrainStep], ids=["functional", "own_step"])
@pytest.mark.device_sums
def test_ways_of_execution(kind: Any, execution: str) -> None:
    value = 3 if execution == "steps_per_execution" else True
    assert_trains_as_in_keras(
        kind,
        lambda: {**WITH_METRICS, execution: value},
        lambda: {"x": batches(*classification_data())},
        then=_evaluated,
    )


def test_compiled_calls_hand_masks_and_added_losses_through() -> None:
    tokens = np.random.default_rng(1).integers(0, 4, size=(13, 4))

    class Penalty(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.supports_masking = True

        def call(self, inputs: Any) -> Any:
            self.add_loss(keras.ops.mean(keras.ops.square(inputs)))
            return inputs

    def make_model() -> keras.Model:
        inputs = keras.Input((4,), dtype="int32")
        hidden = Penalty()(keras.layers.Embedding(4, 3, mask_zero=True)(inputs))
        return keras.Model(inputs, keras.layers.Dense(2, kernel_regularizer=Decay())(hidden))

    assert_trains_as_in_keras(
        make_model,
        lambda: {"optimizer": "sgd", "loss": "mse", "metrics": ["mae"], "jit_compile": True},
        lambda: {"x": batches(tokens, np.ones((13, 4, 2)))},
    )


@pytest.mark.device_sums
def test_mixed_precision_within_its_own_tolerance() -> None:
    for policy in ("mixed_bfloat16", "mixed_float16"):

        def make_model(policy: str = policy) -> keras.Model:
            keras.config.set_floatx("float32")
            keras.config.set_dtype_policy(policy)
            return small_model()

        assert_trains_as_in_keras(
            make_model,
            lambda: {**WITH_METRICS, "optimizer": keras.optimizers.SGD(0.1)},
            lambda: {"x": batches(*(a.astype("float32") for a in classification_data()))},
            tolerance=2e-2,
            atol=2e-2,
        )


def test_weights_start_equal_whatever_each_rank_made() -> None:
    keras.utils.set_random_seed(100 + tnt.get_rank())
    model = tnt.Model(small_model())
    for weight in model.get_weights():
        assert_close(tnt.allgather(weight), [weight] * tnt.get_size(), 0, 0)
    model.set_weights([weight + tnt.get_rank() for weight in model.get_weights()])
    model.compile(**WITH_METRICS)
    model.fit(batches(*classification_data()), verbose=0)
    for weight in [*model.get_weights(), *[np.array(v) for v in model.optimizer.variables]]:
        assert_close(tnt.allgather(weight), [weight] * tnt.get_size(), 0, 0)


class _Counting(keras.layers.Layer):
    """Has state that every step changes, whatever the samples are."""

    def build(self, input_shape: Any) -> None:
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

    def call(self, inputs: Any) -> Any:
        self.steps.assign(self.steps + 1)
        return inputs * (1 + 0.1 * self.steps)


@pytest.mark.parametrize(
    "make_layer",
    [_Counting, lambda: keras.layers.SpectralNormalization(keras.layers.Dense(4))],
    ids=["counting", "spectral"],
)
def test_state_of_layers_after_a_batch_smaller_than_the_number_of_ranks(make_layer: Any) -> None:
    def make_model() -> keras.Model:
        inputs = keras.Input((5,))
        hidden = make_layer()(inputs)
        return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(hidden))

    assert_trains_as_in_keras(
        make_model, lambda: WITH_METRICS, lambda: {"x": batches(*classification_data())}
    )


def test_numbers_that_a_step_logs_itself_are_of_the_global_batch() -> None:
    class OwnLogs(Subclassed):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"own": loss}

    stop = keras.callbacks.EarlyStopping("own", min_delta=0.01, mode="min")
    assert_trains_as_in_keras(
        OwnLogs,
        lambda: {**WITH_METRICS, "metrics": None},
        lambda: {"x": batches(*classification_data(), batch_size=5), "callbacks": [stop]},
    )


def test_a_scaled_and_a_plain_loss_on_one_optimizer() -> None:
    class Twice(Subclassed):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            for scaled in (True, False):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x, y, self(x, training=True))
                    if scaled:
                        loss = self.optimizer.scale_loss(loss)
                variables = self.trainable_variables
                self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"own": loss}

    assert_trains_as_in_keras(
        Twice,
        lambda: {**WITH_METRICS, "metrics": None},
        lambda: {"x": batches(*classification_data())},
    )


def test_own_fit_and_predict_call_those_of_the_library() -> None:
    class OwnFit(Subclassed):
        def fit(self, data: Any, rounds: int = 1, **kwargs: Any) -> Any:
            for _ in range(rounds):
                history = super().fit(data, **kwargs)
            return history

        def predict(self, data: Any) -> Any:
            return super().predict(data, verbose=0).argmax(axis=1)

    results = []
    for wrap in (lambda model: model, tnt.Model):
        keras.utils.set_random_seed(3)
        model = wrap(OwnFit())
        model.compile(**WITH_METRICS)
        history = model.fit(batches(*classification_data()), rounds=2, verbose=0).history
        results.append([history, model.predict(batches(*classification_data()))])
    assert_close(results[1], results[0])


def test_metric_state_that_was_not_made_for_several_ranks() -> None:
    class Plain(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="plain")
            self.total = keras.Variable(0.0, trainable=False, dtype="float64")
            self.any = keras.Variable(False, trainable=False, dtype="bool")

        def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(keras.ops.sum(y_pred[:, 0]))
            self.any.assign(True)

        def reset_state(self) -> None:
            self.total.assign(0.0)
            self.any.assign(False)

        def result(self) -> Any:
            return keras.ops.where(self.any, self.total, -1.0)

    assert_trains_as_in_keras(
        small_model,
        lambda: {**WITH_METRICS, "metrics": [Plain()]},
        lambda: {"x": batches(*classification_data())},
    )
