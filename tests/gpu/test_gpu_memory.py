"""The memory of the GPU is free again when a model is gone, with its buckets."""

from __future__ import annotations

import gc
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


def train(**compiled: Any) -> int:
    """Trains a model, lets go of it, and returns how much memory it had."""
    before = in_use()
    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
    model = tnt.Model(keras.Sequential([keras.Input((WIDTH,)), *hidden]))
    model.compile("sgd", "mse", **compiled)
    data = np.ones((16, WIDTH), np.float32)
    model.fit(data, data, batch_size=8, epochs=2, verbose=0)
    return in_use() - before


@device.needs_gpu
@pytest.mark.ranks(1, 2, timeout=device.LIMIT)
@pytest.mark.parametrize("jit_compile", [True, False])
def test_a_model_that_is_gone_leaves_no_memory_behind(jit_compile: bool) -> None:
    train(jit_compile=jit_compile)  # libraries keep some memory when they are used first
    before = in_use()
    for _ in range(2):
        assert train(jit_compile=jit_compile) > WEIGHTS
    assert in_use() - before < WEIGHTS / 8
