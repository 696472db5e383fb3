"""Models that are trained in several threads at once give what each gives alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
from oracle import Decay, assert_close, batches, classification_data

import tarantella as tnt

pytestmark = pytest.mark.usefixtures("float64")

Wrap = Callable[[keras.Model], keras.Model]


def plain(model: keras.Model) -> keras.Model:
    return model


def train(wrap: Wrap, seed: int, **options: Any) -> Any:
    """The history and the weights of a model that touches every hook of a step."""

    def dense(units: int, number: int, **arguments: Any) -> keras.layers.Layer:
        initializer = keras.initializers.RandomNormal(seed=seed + number)
        return keras.layers.Dense(units, kernel_initializer=initializer, **arguments)

    inputs = keras.Input((5,))
    hidden = dense(4, 1, activity_regularizer=Decay())(inputs)
    hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
    model = wrap(keras.Model(inputs, dense(3, 2, activation="softmax")(hidden)))
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(reduction="sum"),
        metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy(name="entropy")],
        **options,
    )
    x, y = classification_data()
    history = model.fit(batches(x, y), epochs=3, shuffle=False, verbose=0).history
    return history, [np.array(weight) for weight in model.weights]


@pytest.mark.ranks(1, 2)
def test_plain_models_in_other_threads() -> None:
    expected = [train(plain, seed) for seed in (10, 20, 30)]
    ready, is_trained = threading.Barrier(3), threading.Event()

    def train_again(seed: int, **options: Any) -> list[Any]:
        ready.wait(60)
        results = []
        while not results or not is_trained.is_set():
            results.append(train(plain, seed, **options))
        return results

    with ThreadPoolExecutor(2) as threads:
        others = [
            threads.submit(train_again, 20),
            threads.submit(train_again, 30, run_eagerly=True),
        ]
        try:
            ready.wait(60)
            actual = train(tnt.Model, 10)
        finally:
            is_trained.set()
    assert_close(actual, expected[0])
    for other, alone in zip(others, expected[1:], strict=True):
        for result in other.result():
            assert_close(result, alone)


# On several ranks, each thread needs communicators of its own.
@pytest.mark.ranks(1)
def test_two_models_in_two_threads() -> None:
    expected = [train(plain, seed) for seed in (10, 20, 30)]
    ready = threading.Barrier(3)

    def train_in_thread(wrap: Wrap, seed: int) -> Any:
        ready.wait(60)
        return train(wrap, seed)

    with ThreadPoolExecutor(3) as threads:
        futures = [
            threads.submit(train_in_thread, wrap, seed)
            for wrap, seed in ((tnt.Model, 10), (tnt.Model, 20), (plain, 30))
        ]
    for future, alone in zip(futures, expected, strict=True):
        assert_close(future.result(), alone)
