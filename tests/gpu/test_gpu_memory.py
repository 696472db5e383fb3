"""The memory of the GPU is free again when a model is gone, with its buckets."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import device
import keras
import numpy as np
import pytest
import tensorflow as tf

import tarantella as tnt

WIDTH, LAYERS = 1024, 4
WEIGHTS = LAYERS * WIDTH * WIDTH * 4  # bytes, and as many of gradients and of their sums


def in_use() -> int:
    gc.collect()
    number: int = tf.config.experimental.get_memory_info("GPU:0")["current"]
    return number


def train(wrap: Callable[[keras.Model], keras.Model], **compiled: Any) -> int:
    """Trains a model, lets go of it, and returns how much memory it had."""
    before = in_use()
    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
    model = wrap(keras.Sequential([keras.Input((WIDTH,)), *hidden]))
    model.compile("sgd", "mse", **compiled)
    data = np.ones((16, WIDTH), np.float32)
    model.fit(data, data, batch_size=8, epochs=2, verbose=0)
    return in_use() - before


def left_behind(wrap: Callable[[keras.Model], keras.Model], **compiled: Any) -> int:
    """How much memory is in use because of two models that are gone."""
    train(wrap, **compiled)  # libraries keep some memory when they are used first
    before = in_use()
    for _ in range(2):
        assert train(wrap, **compiled) > WEIGHTS
    return in_use() - before


def plain(model: keras.Model) -> keras.Model:
    return model


# Plain Keras leaves the weights behind: its optimizer calls `all_reduce` of `tf.distribute`, which
# registers a gradient function by name, for ever, and with it the graph that captured the weights.
@device.needs_gpu
@pytest.mark.ranks(1, 2, timeout=device.LIMIT)
@pytest.mark.parametrize("jit_compile", [True, False])
def test_a_model_that_is_gone_leaves_no_more_behind_than_plain_keras(jit_compile: bool) -> None:
    of_keras = left_behind(plain, jit_compile=jit_compile)
    assert left_behind(tnt.Model, jit_compile=jit_compile) - of_keras < WEIGHTS / 8
