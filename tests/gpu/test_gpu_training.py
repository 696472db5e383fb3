"""Training on ranks that share GPUs gives what plain Keras gives on one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import device
import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import (
    WITH_METRICS,
    WITH_STATE,
    assert_close,
    assert_trains_as_in_keras,
    batches,
    classification_data,
    computed_by_master,
    small_model,
)

import tarantella as tnt
from tarantella.graph import engine

ON_RANKS = pytest.mark.ranks(1, 2, 4, timeout=device.LIMIT)
layers = keras.layers


class RunningMean(layers.Layer):
    """Has state that depends on the samples of a batch."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(
            shape=shape[1:], initializer="zeros", trainable=False, name="mean"
        )

    def call(self, x: Any, training: bool = False) -> Any:
        result = x - self.mean
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
        return result


def classifier(*hidden: Any) -> keras.Model:
    last = layers.Dense(3, activation="softmax")
    return keras.Sequential([keras.Input((5,)), layers.Dense(4), *hidden, last])


def embedding() -> keras.Model:
    tokens = keras.Input((6,), dtype="int32")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(9, 4)(tokens))
    return keras.Model(tokens, layers.Dense(3, activation="softmax")(hidden))


def masked() -> keras.Model:
    tokens = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(tokens)
    return keras.Model(tokens, layers.Dense(2)(layers.Dense(4, activation="tanh")(hidden)))


def tokens_and_classes() -> tuple[Any, ...]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 9, size=(13, 6)), rng.integers(0, 3, size=13)


def sequences_and_weights() -> tuple[Any, ...]:
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 9, size=(13, 6))  # 0 is masked
    return tokens, rng.normal(size=(13, 6, 2)), rng.random((13, 1)) * np.ones((1, 6))


# A model, how to compile it, and its data.
CASES: dict[str, tuple[Callable[[], keras.Model], dict[str, Any], Callable[[], Any]]] = {
    "dense": (small_model, WITH_STATE, classification_data),
    "statistics": (
        lambda: classifier(layers.BatchNormalization(synchronized=True)),
        WITH_METRICS,
        classification_data,
    ),
    "state": (lambda: classifier(RunningMean()), WITH_METRICS, classification_data),
    "sparse": (embedding, WITH_STATE, tokens_and_classes),
    "masked": (
        masked,
        {"optimizer": "sgd", "loss": "mse", "weighted_metrics": ["mae"]},
        sequences_and_weights,
    ),
}
# On a GPU, Keras compiles with XLA by itself.
EXECUTIONS = {
    "xla": {} if device.DEVICE == "gpu" else {"jit_compile": True},
    "graph": {"jit_compile": False},
    "eager": {"run_eagerly": True},
    "several_steps": {"steps_per_execution": 3},
}


@ON_RANKS
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("case", CASES)
def test_weights_and_logs_are_those_of_plain_keras(case: str, execution: str) -> None:
    make_model, compiled, data = CASES[case]
    assert_trains_as_in_keras(
        make_model,
        lambda: {**compiled, **EXECUTIONS[execution]},
        lambda: {"x": batches(*data())},
        then=lambda model: model.evaluate(batches(*data()), verbose=0, return_dict=True),
    )
    assert engine.device_hint() == (device.HINT if tnt.get_size() > 1 else "")


@ON_RANKS
@pytest.mark.usefixtures("float64")
def test_sums_in_host_memory_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `--gpu-sums host`."""

    def trained() -> Any:
        keras.utils.clear_session()
        keras.utils.set_random_seed(42)
        model = tnt.Model(classifier(layers.BatchNormalization(synchronized=True)))
        model.compile(**WITH_STATE)
        history = model.fit(batches(*classification_data()), epochs=2, verbose=0).history
        return history, model.get_weights()

    on_devices = trained()
    monkeypatch.setattr(engine, "_hint", "")
    assert_close(trained(), on_devices)


@ON_RANKS
@pytest.mark.parametrize("execution", ["xla", "graph"])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_within_its_own_tolerance(policy: str, execution: str) -> None:
    def make_model() -> keras.Model:
        keras.config.set_dtype_policy(policy)
        return small_model()

    x, y = classification_data()
    assert_trains_as_in_keras(
        make_model,
        lambda: {
            **WITH_METRICS,
            **EXECUTIONS[execution],
            "optimizer": keras.optimizers.SGD(0.1),
        },
        lambda: {"x": batches(x.astype("float32"), y)},
        tolerance=2e-2,
        atol=2e-2,
    )


@ON_RANKS
@pytest.mark.parametrize("execution", ["xla", "graph"])
def test_a_step_that_overflows_on_one_rank_is_left_out_on_all(execution: str) -> None:
    """Loss scaling as in plain Keras: no update, and half of the scale."""
    x, y = classification_data(8)
    x = x.astype("float32")
    x[7] = 1e4  # a sample of the last rank; times the scale it is more than float16 can hold

    def trained(wrap: Callable[[Any], Any]) -> tuple[Any, ...]:
        keras.utils.clear_session()
        keras.utils.set_random_seed(42)
        keras.config.set_dtype_policy("mixed_float16")
        model = wrap(keras.Sequential([keras.Input((5,)), layers.Dense(3)]))
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**15
        )
        model.compile(optimizer, "mse", **EXECUTIONS[execution])
        before = model.get_weights()
        model.fit(batches(x, np.eye(3)[y], batch_size=8), verbose=0)
        unchanged = [
            np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True)
        ]
        return unchanged, float(optimizer.dynamic_scale), int(optimizer.inner_optimizer.iterations)

    expected = computed_by_master(lambda: trained(lambda model: model))
    assert expected == ([True] * 2, 2.0**14, 0)
    assert trained(tnt.Model) == expected


@device.needs_gpu
@ON_RANKS
def test_weights_are_on_the_gpu() -> None:
    model = tnt.Model(small_model())
    assert len(tf.config.get_visible_devices("GPU")) == 1
    assert all("GPU" in weight.value.device for weight in model.trainable_variables)
