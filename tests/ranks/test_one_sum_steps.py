"""Training steps of Keras that sum gradients, layers' state and metrics over the ranks together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import (
    WITH_METRICS,
    assert_runs_as_in_keras,
    assert_trains_as_in_keras,
    batches,
    classification_data,
)

import tarantella as tnt
from tarantella.errors import InputError
from tarantella.graph.channel import Channel
from tarantella.keras import hooks, one_sum_step

pytestmark = [pytest.mark.ranks(2), pytest.mark.usefixtures("float64")]
layers = keras.layers


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The purposes of the sums in all steps that were traced."""
    asked: list[str] = []
    allreduce = Channel.allreduce

    def noted(self: Channel, tensors: Any, threshold: int) -> Any:
        if tensors:
            asked.append(self._purpose)
        return allreduce(self, tensors, threshold)

    monkeypatch.setattr(Channel, "allreduce", noted)
    return asked


class ReadsLogs(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert logs["loss"] > 0


class Steps(keras.metrics.Metric):
    """A metric that sees how often the optimizer has updated the weights."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        super().__init__(name="steps")
        self.optimizer = optimizer
        self.last = self.add_variable((), "zeros", name="last", aggregation="mean")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.last.assign(keras.ops.cast(self.optimizer.iterations, self.last.dtype))

    def result(self) -> Any:
        return self.last


def with_state() -> keras.Model:
    inputs = keras.Input((5,))
    hidden = layers.BatchNormalization(synchronized=True)(layers.Dense(4)(inputs))
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden))


def with_own_state() -> keras.Model:
    """A model whose layer writes its state, and a variable that is trained."""

    class Centred(layers.Layer):
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)
            self.scale = self.add_weight(shape=shape[1:], initializer="ones")

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.mean.assign(0.5 * self.mean + 0.5 * keras.ops.mean(x, axis=0))
                self.scale.assign(keras.ops.clip(self.scale, 0.9, 1.1))
            return x * self.scale

    inputs = keras.Input((5,))
    hidden = Centred()(layers.Dense(4)(inputs))
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden))


@pytest.mark.parametrize("callbacks", [[ReadsLogs()], []], ids=["read", "unread"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("make_model", [with_state, with_own_state])
def test_steps_give_what_plain_keras_gives(
    make_model: Callable[[], keras.Model], optimizer: str, callbacks: Any, sums: list[str]
) -> None:
    """The last batch has one sample, so that one rank has none."""
    assert_trains_as_in_keras(
        make_model,
        lambda: {**WITH_METRICS, "optimizer": optimizer},
        lambda: {"x": batches(*classification_data()), "callbacks": callbacks},
    )
    in_steps = [purpose for purpose in sums if purpose not in ("statistics", "losses")]
    assert set(in_steps) <= {"gradients", "metrics"}  # at the end of an epoch
    assert "gradients" in in_steps


def test_logs_that_are_read_take_no_sum_of_their_own(sums: list[str]) -> None:
    model = tnt.Model(with_own_state())
    model.compile(**WITH_METRICS)
    data = batches(*classification_data())
    model.fit(data, epochs=1, verbose=0, callbacks=[ReadsLogs()])
    at_end = sums.count("metrics")
    model.fit(data, epochs=2, verbose=0, callbacks=[ReadsLogs()])
    assert at_end
    assert sums.count("metrics") == 3 * at_end  # once an epoch, whatever its steps
    assert sums.count("layers") == 0


def test_a_metric_that_sees_the_update_is_asked_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(one_sum_step, "take", lambda *arguments: taken.append(arguments))
    optimizer = keras.optimizers.SGD(0.1)

    def compile_arguments() -> dict[str, Any]:
        optimizer = keras.optimizers.SGD(0.1)
        return {**WITH_METRICS, "optimizer": optimizer, "metrics": [Steps(optimizer)]}

    def rate(y_true: Any, y_pred: Any) -> Any:
        return optimizer.iterations + 0.0 * y_pred[:, 0]

    def with_function() -> dict[str, Any]:
        nonlocal optimizer
        optimizer = keras.optimizers.SGD(0.1)
        return {**WITH_METRICS, "optimizer": optimizer, "metrics": [rate]}

    for arguments in (compile_arguments, with_function):
        assert_trains_as_in_keras(
            with_state,
            arguments,
            lambda: {"x": batches(*classification_data(12)), "callbacks": [ReadsLogs()]},
        )
    assert not taken


class TeachesAPartInCall(keras.Model):
    """Another optimizer trains a layer in the forward pass, which goes on with its new weights."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.out = layers.Dense(4), layers.Dense(3, activation="softmax")
        self.part.build((None, 5))
        self.out.build((None, 4))
        self.part.trainable = False
        self.own = keras.optimizers.SGD(0.1)
        self.own.build(self.part.variables)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            with tf.GradientTape() as tape:
                values = [variable.value for variable in self.part.variables]
                tape.watch(values)
                loss = tf.reduce_mean(tf.square(tf.matmul(x, values[0]) + values[1]))
            self.own.apply(tape.gradient(loss, values), self.part.variables)
        return self.out(self.part(x))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_updates_in_a_forward_pass_come_at_their_place(jit_compile: bool) -> None:
    assert_trains_as_in_keras(
        TeachesAPartInCall,
        lambda: {**WITH_METRICS, "optimizer": "adam", "jit_compile": jit_compile},
        lambda: {"x": batches(*classification_data())},
    )


def test_an_optimizer_with_a_method_of_its_own_is_left_alone() -> None:
    def arguments() -> dict[str, Any]:
        optimizer = keras.optimizers.SGD(0.1)
        plain = optimizer.apply_gradients

        def apply_and_decay(pairs: Any) -> Any:
            pairs = list(pairs)
            result = plain(pairs)
            for _, variable in pairs:
                variable.assign(variable * 0.9)
            return result

        optimizer.apply_gradients = apply_and_decay
        return {**WITH_METRICS, "optimizer": optimizer}

    assert_trains_as_in_keras(
        with_state, arguments, lambda: {"x": batches(*classification_data(12))}, second_fit=True
    )


@pytest.mark.parametrize("kind", ["function", "method"])
def test_metrics_that_only_look_like_those_of_keras_see_the_update(kind: str) -> None:
    model = with_state()

    def make_model() -> keras.Model:
        nonlocal model
        model = with_state()
        return model

    def norm() -> Any:
        return keras.ops.sum(keras.ops.square(model.trainable_weights[0]))

    def arguments() -> dict[str, Any]:
        @functools.wraps(keras.metrics.sparse_categorical_crossentropy)
        def penalized(y_true: Any, y_pred: Any) -> Any:
            return keras.metrics.sparse_categorical_crossentropy(y_true, y_pred) + norm()

        patched = keras.metrics.Mean(name="patched")
        update = patched.update_state
        patched.update_state = lambda y_true, y_pred, sample_weight=None: update(norm())
        return {**WITH_METRICS, "metrics": [penalized if kind == "function" else patched]}

    assert_trains_as_in_keras(
        make_model, arguments, lambda: {"x": batches(*classification_data(12))}
    )


class OfLayers(keras.Model):
    """A model of a user's class."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(4), layers.Dense(3, activation="softmax")

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))


def called_once() -> keras.Model:
    model = OfLayers()
    model(np.zeros((1, 5)))
    return model


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("optimizer", "jit_compile"), [("sgd", False), ("adam", True)])
def test_ranks_that_are_traced_again_by_themselves_communicate_like_the_others(
    optimizer: str, jit_compile: bool
) -> None:
    """Batches of one sample more or less change the shape of the micro-batch on one rank only."""
    x, y = classification_data()

    def train(wrap: Callable[[keras.Model], keras.Model]) -> Any:
        model = wrap(called_once())
        model.compile(optimizer, WITH_METRICS["loss"], jit_compile=jit_compile)
        return [model.train_on_batch(x[:size], y[:size]) for size in (6, 5, 6, 7, 4)]

    assert_runs_as_in_keras(train)


@pytest.mark.parametrize("metrics", [["accuracy"], None])
@pytest.mark.parametrize("method", ["evaluate", "train_on_batch"])
def test_a_users_model_that_the_master_has_used_alone(method: str, metrics: Any) -> None:
    """The master has built what the others build in the first step."""
    x, y = classification_data()

    def train(wrap: Callable[[keras.Model], keras.Model]) -> Any:
        model = wrap(called_once())
        model.compile("sgd", WITH_METRICS["loss"], metrics=metrics)
        if tnt.is_master_rank():
            plain = model.model if isinstance(model, tnt.Model) else model
            weights = plain.get_weights()
            getattr(plain, method)(x, y)
            plain.set_weights(weights)
        return model.fit(batches(x, y), epochs=2, verbose=0).history

    assert_runs_as_in_keras(train)


class ThenDecays:
    """Goes on with the weights that an optimizer has updated."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        variables = list(trainable_variables)
        super().apply(grads, variables)  # type: ignore[misc]
        for variable in variables:
            variable.assign(0.9 * variable)


class DecayingSGD(ThenDecays, keras.optimizers.SGD):
    pass


def replaced_apply() -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.SGD(0.1)
    apply = optimizer.apply

    def apply_and_decay(grads: Any, trainable_variables: Any) -> None:
        apply(grads, trainable_variables)
        for variable in trainable_variables:
            variable.assign(0.9 * variable)

    optimizer.apply = apply_and_decay
    return optimizer


@pytest.mark.parametrize("make_optimizer", [lambda: DecayingSGD(0.1), replaced_apply])
def test_an_optimizer_that_goes_on_after_the_update(
    make_optimizer: Callable[[], keras.optimizers.Optimizer],
) -> None:
    assert_trains_as_in_keras(
        with_state,
        lambda: {**WITH_METRICS, "optimizer": make_optimizer()},
        lambda: {"x": batches(*classification_data()), "callbacks": [ReadsLogs()]},
    )


def test_an_update_that_nobody_could_see_is_an_error() -> None:
    optimizer = keras.optimizers.SGD(0.1)
    hidden = hooks.unhooked(keras.optimizers.SGD.apply)
    optimizer.apply = lambda *arguments: hidden(optimizer, *arguments)
    model = tnt.Model(with_state())
    model.compile(**{**WITH_METRICS, "optimizer": optimizer})
    with pytest.raises(InputError, match="Gradients were not summed over the ranks"):
        model.fit(batches(*classification_data()), verbose=0)


class Adaptive(keras.Model):
    """A model whose loss depends on what a metric has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(3, activation="softmax")
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x: Any) -> Any:
        return self.out(x)

    def compute_loss(self, x: Any = None, *arguments: Any, **named: Any) -> Any:
        self.seen.update_state(keras.ops.mean(keras.ops.square(x), axis=1))
        return super().compute_loss(x, *arguments, **named) * (1 + self.seen.result())


@pytest.mark.parametrize("callbacks", [[ReadsLogs()], []], ids=["read", "unread"])
def test_results_of_metrics_in_a_users_code_are_those_of_all_ranks(callbacks: Any) -> None:
    data = batches(*classification_data())
    assert_trains_as_in_keras(
        Adaptive,
        lambda: WITH_METRICS,
        lambda: {"x": data, "validation_data": data, "callbacks": callbacks},
    )
