"""Training steps of Keras that sum gradients, layers' state and metrics over the ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
from oracle import CLASSIFICATION, assert_trains_as_in_keras, batches, classification_data

import tarantella as tnt
from tarantella.graph.channel import Channel
from tarantella.keras import one_sum_step

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
        lambda: {**CLASSIFICATION, "optimizer": optimizer},
        lambda: {"x": batches(*classification_data()), "callbacks": callbacks},
    )
    in_steps = [purpose for purpose in sums if purpose not in ("statistics", "losses")]
    assert set(in_steps) <= {"gradients", "metrics"}  # at the end of an epoch
    assert "gradients" in in_steps


def test_logs_that_are_read_take_no_sum_of_their_own(sums: list[str]) -> None:
    model = tnt.Model(with_own_state())
    model.compile(**CLASSIFICATION)
    data = batches(*classification_data())
    model.fit(data, epochs=1, verbose=0, callbacks=[ReadsLogs()])
    at_end = sums.count("metrics")
    model.fit(data, epochs=2, verbose=0, callbacks=[ReadsLogs()])
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
        return {**CLASSIFICATION, "optimizer": optimizer, "metrics": [Steps(optimizer)]}

    def rate(y_true: Any, y_pred: Any) -> Any:
        return optimizer.iterations + 0.0 * y_pred[:, 0]

    def with_function() -> dict[str, Any]:
        nonlocal optimizer
        optimizer = keras.optimizers.SGD(0.1)
        return {**CLASSIFICATION, "optimizer": optimizer, "metrics": [rate]}

    for arguments in (compile_arguments, with_function):
        assert_trains_as_in_keras(
            with_state,
            arguments,
            lambda: {"x": batches(*classification_data(12)), "callbacks": [ReadsLogs()]},
        )
    assert not taken
