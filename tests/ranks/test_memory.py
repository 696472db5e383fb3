"""What is no longer used is let go of."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tarantella as tnt

pytestmark = pytest.mark.ranks(2)


def _model() -> keras.Model:
    model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile(optimizer="sgd", loss="mse")
    return model


def _arrays() -> tuple[Any, dict[str, Any]]:
    x, y = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")
    return weakref.ref(x), {"x": x, "y": y, "batch_size": 16}


def _dataset() -> tuple[Any, dict[str, Any]]:
    samples = tf.data.Dataset.range(64).map(lambda i: (tf.ones(4), tf.ones(1)))
    dataset = samples.shuffle(9).batch(16)
    return weakref.ref(dataset), {"x": dataset}


@pytest.mark.parametrize("make", [_arrays, _dataset])
def test_data_are_let_go_of_after_fit(make: Callable[[], tuple[Any, dict[str, Any]]]) -> None:
    model = _model()
    watched, arguments = make()
    model.fit(**arguments, epochs=2, verbose=0)
    model.evaluate(**arguments, verbose=0)
    del arguments
    gc.collect()
    assert watched() is None
