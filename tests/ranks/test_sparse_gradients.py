"""An optimizer is given the slices of gradients that it would be given in one process.

Keras does not add up slices of the same index, so that Adam tells two from their sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from oracle import assert_close, assert_trains_as_in_keras, batches

import tarantella as tnt

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.ranks(2)]

LENGTH, TOKENS = 6, 9


class _Embeddings(layers.Layer):
    """Two tables, of tokens and of positions, and some way to look things up in them."""

    def __init__(self, look_up: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.tokens = layers.Embedding(TOKENS, 4)
        self.positions = layers.Embedding(TOKENS, 4)
        self.look_up = look_up

    def build(self, shape: Any) -> None:
        self.tokens.build(shape)
        self.positions.build((LENGTH,))

    def call(self, x: Any) -> Any:
        return self.look_up(self, x)


class _Counter(layers.Layer):
    """Has state for which a step is refused by XLA; then the call of the model is compiled."""

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(initializer="zeros", trainable=False, aggregation="sum")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.count.assign_add(ops.cast(ops.shape(x)[0], x.dtype))
        return x + 0


def _tied(layer: Any, x: Any) -> Any:
    scores = ops.matmul(layer.tokens(x), ops.transpose(layer.tokens.embeddings))
    return scores[..., :4] + layer.positions(ops.arange(LENGTH))


def _positions_of_each_sample(layer: Any, x: Any) -> Any:
    positions = tf.tile(tf.range(LENGTH)[tf.newaxis], [tf.shape(x)[0], 1])
    return layer.tokens(x) + layer.positions(positions)


LOOKUPS = {
    "positions": lambda layer, x: layer.tokens(x) + layer.positions(ops.arange(LENGTH)),
    "positions_of_any_length": lambda layer, x: (
        layer.tokens(x) + layer.positions(tf.range(tf.shape(x)[1]))
    ),
    "positions_of_each_sample": _positions_of_each_sample,
    "one_table_for_tokens_and_positions": lambda layer, x: (
        layer.tokens(x) + layer.tokens(ops.arange(LENGTH))
    ),
    "several_lookups": lambda layer, x: (
        layer.positions(ops.arange(LENGTH)) + layer.positions(ops.arange(1, 7)) + layer.positions(x)
    ),
    "slices_and_dense_gradients": _tied,
    "repeated_positions": lambda layer, x: (
        layer.tokens(x) + tf.gather(layer.positions.embeddings.value, [0, 1, 2, 2, 1, 0])
    ),
    "positions_in_a_function": lambda layer, x: tf.function(LOOKUPS["positions"])(layer, x),
}


def _data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, TOKENS, size=(13, LENGTH)), rng.normal(size=(13, 1))


def _model(look_up: Callable[[Any, Any], Any], stateful: bool = False) -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.GlobalAveragePooling1D()(_Embeddings(look_up)(inputs))
    if stateful:
        hidden = _Counter()(hidden)
    return keras.Model(inputs, layers.Dense(1)(hidden))


def _check(look_up: str, stateful: bool = False, **compile_arguments: Any) -> None:
    assert_trains_as_in_keras(
        lambda: _model(LOOKUPS[look_up], stateful),
        lambda: {"optimizer": "adam", "loss": "mse", **compile_arguments},
        lambda: {"x": batches(*_data())},
    )


@pytest.mark.parametrize("look_up", LOOKUPS)
def test_slices_of(look_up: str) -> None:
    _check(look_up)


@pytest.mark.parametrize(
    "look_up",
    ["positions", "positions_of_any_length", "positions_in_a_function", "several_lookups"],
)
@pytest.mark.device_sums
def test_slices_with_xla_of(look_up: str) -> None:
    _check(look_up, jit_compile=True)


def test_slices_of_a_compiled_call_with_state() -> None:
    _check("positions", stateful=True, jit_compile=True)


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_random_slices_of_each_rank(jit_compile: bool) -> None:
    """They are no lookup that ranks have in common: each rank draws its own."""
    seeds = keras.random.SeedGenerator(3)

    def draw(layer: Any, x: Any) -> Any:
        positions = keras.random.randint((LENGTH,), 0, TOKENS, seed=seeds)
        return layer.tokens(x) + layer.positions(positions)

    x, y = _data()
    model = tnt.Model(_model(draw))
    model.compile("adam", "mse", jit_compile=jit_compile)
    model.fit(batches(x, y), verbose=0)
    weights = tnt.allgather([np.array(weight) for weight in model.trainable_weights])
    assert_close(weights[1], weights[0])


@pytest.mark.parametrize("look_up", ["positions", "positions_of_each_sample"])
def test_slices_run_eagerly_of(look_up: str) -> None:
    _check(look_up, run_eagerly=True)
