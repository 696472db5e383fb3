"""Models that are trained in several threads at once give what each gives alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from oracle import Decay, assert_close, batches, classification_data, computed_by_master

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
    history = model.fit(batches(x, y), epochs=2, shuffle=False, verbose=0).history
    return history, [np.array(weight) for weight in model.weights]


class NamedThread(threading.Thread):
    """A thread that returns something. Threads that train together have one name on all ranks."""

    def __init__(self, name: str, function: Callable[[], Any]) -> None:
        super().__init__(name=name)
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join()
        if self._error is not None:
            raise self._error
        return self._result


@pytest.mark.ranks(1, 2, timeout=300)
def test_plain_models_in_other_threads() -> None:
    expected = computed_by_master(lambda: {seed: train(plain, seed) for seed in (10, 20, 30)})
    ready, is_trained = threading.Barrier(3), threading.Event()

    def train_again(seed: int, **options: Any) -> list[Any]:
        ready.wait(120)
        results = []
        while not results or not is_trained.is_set():
            results.append(train(plain, seed, **options))
        return results

    others = {
        20: NamedThread("traced", lambda: train_again(20)),
        30: NamedThread("eager", lambda: train_again(30, run_eagerly=True)),
    }
    try:
        ready.wait(120)
        actual = train(tnt.Model, 10)
    finally:
        is_trained.set()
    assert_close(actual, expected[10])
    for seed, thread in others.items():
        for result in thread.result():
            assert_close(result, expected[seed])


# On several ranks, each thread needs communicators of its own.
@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.device_sums
def test_two_models_in_two_threads() -> None:
    expected = computed_by_master(lambda: {seed: train(plain, seed) for seed in (10, 20, 30)})
    ready = threading.Barrier(3)

    def train_with_others(wrap: Wrap, seed: int) -> Any:
        ready.wait(120)
        return train(wrap, seed)

    threads = {
        10: NamedThread("first", lambda: train_with_others(tnt.Model, 10)),
        20: NamedThread("second", lambda: train_with_others(tnt.Model, 20)),
        30: NamedThread("plain", lambda: train_with_others(plain, 30)),
    }
    for seed, thread in threads.items():
        assert_close(thread.result(), expected[seed])
