"""Plain Keras in one process as the judge of what several ranks compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tarantella as tnt
from tarantella.comm.waiting import wait_polling
from tarantella.runtime import world

SAMPLES = 13

# How most tests compile a model for `classification_data`. Plain gradient descent shows a gradient
# of the wrong size, which Adam would hide, and is traced in half the time. Tests of steps and
# logs add a metric, which takes a quarter longer.
CLASSIFICATION = {"optimizer": "sgd", "loss": "sparse_categorical_crossentropy"}
WITH_METRICS = {**CLASSIFICATION, "metrics": ["accuracy"]}
WITH_STATE = {**WITH_METRICS, "optimizer": "adam"}  # the optimizer has variables for each weight


def classification_data(samples: int = SAMPLES, features: int = 5) -> tuple[Any, Any]:
    """Inputs and labels of three classes, in float64."""
    rng = np.random.default_rng(7)
    return rng.normal(size=(samples, features)), rng.integers(0, 3, size=samples)


def batches(*arrays: Any, batch_size: int = 4) -> tf.data.Dataset:
    """A dataset of global batches; by default 4, 4, 4 and 1 samples."""
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)


class Decay(keras.regularizers.Regularizer):
    """Keras's own regularizers fail in float64 in some of the versions we support."""

    def __call__(self, x: Any) -> Any:
        return 0.01 * keras.ops.sum(keras.ops.square(x))


def small_model(regularized: bool = True) -> keras.Model:
    """A functional model for `classification_data`."""
    inputs = keras.Input((5,))
    decay = Decay() if regularized else None
    hidden = keras.layers.Dense(4, activation="tanh", kernel_regularizer=decay)(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(hidden))


def assert_close(actual: Any, expected: Any, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """Compares nested structures of numbers."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_close(actual[key], expected[key], rtol, atol)
    elif isinstance(expected, (list, tuple)) and not all(np.isscalar(e) for e in expected):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other, rtol, atol)
    else:
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


def assert_trains_as_in_keras(
    make_model: Callable[[], keras.Model],
    compile_arguments: Callable[[], dict[str, Any]],
    fit_arguments: Callable[[], dict[str, Any]],
    *,
    tolerance: float = 1e-9,
    atol: float = 1e-12,
    second_fit: bool = False,
    then: Callable[[keras.Model], Any] | None = None,
    arguments_on_ranks: Callable[[], dict[str, Any]] | None = None,
) -> None:
    """Trains twice, as plain Keras and as a tnt.Model, and compares weights and all logs.

    Each time two epochs, and a `second_fit` of one more; `then` may go on with the model and
    return what is to be compared too. The `fit` of the tnt.Model gets `arguments_on_ranks`, if
    they are others.
    """

    def train(
        wrap: Callable[[keras.Model], keras.Model], fit_arguments: Callable[[], dict[str, Any]]
    ) -> tuple[Any, ...]:
        keras.utils.clear_session()
        keras.utils.set_random_seed(42)
        model = wrap(make_model())
        model.compile(**compile_arguments())
        arguments = {"verbose": 0, "shuffle": False, **fit_arguments()}
        first = model.fit(epochs=2, **arguments).history
        second = model.fit(epochs=1, **arguments).history if second_fit else {}
        more = then(model) if then else None
        return first, second, [np.array(weight) for weight in model.weights], more

    expected = computed_by_master(lambda: train(lambda model: model, fit_arguments))
    actual = train(tnt.Model, arguments_on_ranks or fit_arguments)
    for ours, keras_own in zip(actual[:3], expected[:3], strict=True):
        assert_close(ours, keras_own, tolerance, atol)
    if then:
        assert_close(actual[3], expected[3], tolerance, atol)


def assert_runs_as_in_keras(run: Callable[[Callable[[keras.Model], keras.Model]], Any]) -> None:
    """Runs a piece of a script twice, as plain Keras and as Tarantella, and compares the results.

    Args:
        run: Takes what to make of a model, nothing or a tnt.Model, and returns numbers in any
            structure.
    """

    def seeded(wrap: Callable[[keras.Model], keras.Model]) -> Any:
        keras.utils.clear_session()
        keras.utils.set_random_seed(42)
        return run(wrap)

    expected = computed_by_master(lambda: seeded(lambda model: model))
    assert_close(seeded(tnt.Model), expected)


def computed_by_master(compute: Callable[[], Any]) -> Any:
    """One rank is enough for what needs no other, and leaves the cores to it."""
    result = compute() if tnt.is_master_rank() else None
    if tnt.get_size() == 1:
        return result
    communicator = world.communicator("control")
    wait_polling(communicator.Ibarrier(), None)  # no polling: other tests can use the core
    return communicator.bcast(result, tnt.get_master_rank())
