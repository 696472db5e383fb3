"""The methods of a model, in any order, do what they do in Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import (
    CLASSIFICATION,
    WITH_METRICS,
    assert_runs_as_in_keras,
    classification_data,
    small_model,
)

import tarantella as tnt
from tarantella.comm import waiting

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.ranks(2)]

X, Y = classification_data(samples=5)

Wrap = Callable[[keras.Model], keras.Model]


def _fit(model: keras.Model, **options: Any) -> Any:
    options = {"batch_size": 5, "shuffle": False, "verbose": 0, **options}
    return model.fit(X, Y, **options).history


def _weights(*models: keras.Model) -> list[Any]:
    return [np.array(weight) for model in models for weight in model.weights]


@pytest.mark.parametrize("phase", ["train", "test"])
def test_single_batches_between_silent_and_talkative_runs(phase: str) -> None:
    def run(wrap: Wrap) -> Any:
        model = wrap(small_model())
        model.compile(**WITH_METRICS)

        def over_data(verbose: int) -> Any:
            if phase == "train":
                return _fit(model, verbose=verbose)
            return model.evaluate(X, Y, batch_size=5, verbose=verbose)

        on_batch = model.train_on_batch if phase == "train" else model.test_on_batch
        results = [on_batch(X, Y)]
        for verbose in (0, 1, 0):
            results += [over_data(verbose), on_batch(X, Y)]
        return results, _weights(model)

    assert_runs_as_in_keras(run)


def test_functions_made_anew_in_the_middle() -> None:
    def run(wrap: Wrap) -> Any:
        model = wrap(small_model())
        model.compile(**WITH_METRICS)
        results = [model.train_on_batch(X, Y), _fit(model), _fit(model, verbose=1)]
        model.run_eagerly = True
        model.make_train_function(force=True)
        results += [_fit(model, verbose=1), model.train_on_batch(X, Y), _fit(model)]
        model.layers[1].trainable = False
        model.compile(**WITH_METRICS, jit_compile=True)
        results += [_fit(model, verbose=1), _fit(model), model.train_on_batch(X, Y)]
        return results, _weights(model)

    assert_runs_as_in_keras(run)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_training_again_after_a_step_that_has_failed(eager: bool) -> None:
    def checked(truth: Any, prediction: Any) -> Any:
        tf.debugging.assert_less(truth, tf.ones_like(truth) * 3)  # a GPU does not check it itself
        return keras.losses.sparse_categorical_crossentropy(truth, prediction)

    def run(wrap: Wrap) -> Any:
        model = wrap(small_model())
        # Not with XLA, which takes assertions out: then nothing in a step can fail.
        compiled = {**CLASSIFICATION, "loss": checked, "jit_compile": False}
        model.compile(**compiled, run_eagerly=eager)
        labels = np.array([0, 1, 2, 1, 9])  # of which the last is none, in the third step

        def batches() -> Any:
            return tf.data.Dataset.from_tensor_slices((X, labels)).batch(2)

        failed = []
        for _ in range(2):
            try:
                model.fit(batches(), verbose=0)
            except tf.errors.InvalidArgumentError:
                failed.append(1)
        assert waiting._unfinished or tnt.Model is not wrap
        return failed, _fit(model), _weights(model)

    assert_runs_as_in_keras(run)


@pytest.mark.ranks(1, 2)
def test_a_step_that_one_model_is_given() -> None:
    def run(wrap: Wrap) -> Any:
        model = wrap(small_model())
        model.compile(**CLASSIFICATION, run_eagerly=True)
        history = _fit(model)

        def train_step(data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = 2 * model.compute_loss(x, y, model(x))
            variables = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"twice": loss}

        evaluated = model.test_step
        model.train_step = train_step
        model.test_step = lambda data: {"again": evaluated(data)["loss"]}
        model.make_train_function(force=True)
        return history, _fit(model, validation_data=(X, Y)), _weights(model)

    assert_runs_as_in_keras(run)


def test_two_models_of_the_same_layers_in_alternation() -> None:
    def run(wrap: Wrap) -> Any:
        generator = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, activation="tanh")])
        judge = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activation="sigmoid")])
        discriminator = wrap(judge)
        discriminator.compile("adam", "binary_crossentropy")
        judge.trainable = False
        together = wrap(keras.Sequential([generator, judge]))
        together.compile("adam", "binary_crossentropy")
        judge.trainable = True
        results = []
        for verbose in (0, 1, 0):
            fake = generator.predict(X, verbose=0)
            results.append(discriminator.train_on_batch(fake, np.zeros((5, 1))))
            results.append(discriminator.train_on_batch(X[:, :3], np.ones((5, 1))))
            results.append(together.train_on_batch(X, np.ones((5, 1))))
            together.fit(X, np.ones((5, 1)), batch_size=5, shuffle=False, verbose=verbose)
        return results, _weights(generator, judge)

    assert_runs_as_in_keras(run)
