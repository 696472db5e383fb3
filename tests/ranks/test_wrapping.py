"""A tnt.Model is a Keras model: the one it was made from, and more."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
from oracle import assert_close, batches, classification_data, small_model

import tarantella as tnt
from tarantella.runtime.log import LOGGER

pytestmark = pytest.mark.ranks(1, 2)


class Greeter(keras.Model):
    def __init__(self, greeting: str) -> None:
        super().__init__()
        self.greeting = greeting
        self.dense = keras.layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def greet(self) -> str:
        return f"{self.greeting} {self.name}"


def test_it_is_a_keras_model_and_a_tnt_model() -> None:
    plain = small_model()
    model = tnt.Model(plain, parallel_strategy=tnt.ParallelStrategy.DATA)
    assert isinstance(model, tnt.Model)
    assert isinstance(model, keras.Model)
    assert isinstance(model, type(plain))
    assert model.layers == plain.layers
    assert model.get_layer(index=1) is plain.get_layer(index=1)
    assert model.name == plain.name
    assert model.count_params() == plain.count_params()
    lines: list[list[str]] = [[], []]
    plain.summary(print_fn=lambda line, **_: lines[0].append(line))
    model.summary(print_fn=lambda line, **_: lines[1].append(line))
    assert lines[0] == lines[1]


def test_calling_it_is_calling_the_plain_model() -> None:
    plain = small_model()
    model = tnt.Model(plain)
    x = np.ones((2, 5))
    assert_close(np.array(model(x)), np.array(plain(x)), 0, 0)
    nested = keras.Sequential([keras.Input((5,)), model, keras.layers.Dense(1)])
    assert nested(x).shape == (2, 1)


def test_own_attributes_and_methods() -> None:
    model = tnt.Model(Greeter("hello"))
    assert model.greeting == "hello"
    assert model.greet() == f"hello {model.name}"
    model.greeting = "good day"
    assert model.greet().startswith("good day")


def test_sequential() -> None:
    model = tnt.Sequential([keras.Input((5,)), keras.layers.Dense(4)], name="stack")
    model.add(keras.layers.Dense(3, activation="softmax"))
    assert isinstance(model, tnt.Sequential)
    assert isinstance(model, keras.Sequential)
    assert model.name == "stack"
    assert model.output_shape == (None, 3)
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(batches(*classification_data()), verbose=0)


def test_both_share_their_weights_and_only_one_is_compiled() -> None:
    plain = small_model()
    model = tnt.Model(plain)
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(batches(*classification_data()), verbose=0)
    assert not plain.compiled
    for one, other in zip(plain.weights, model.weights, strict=True):
        assert one is other
    if tnt.is_master_rank():  # no other rank is needed for this
        assert plain.predict(np.ones((3, 5)), verbose=0).shape == (3, 3)


def test_a_model_that_was_compiled_before_stays_compiled() -> None:
    plain = small_model()
    plain.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = tnt.Model(plain).fit(batches(*classification_data()), verbose=0).history
    assert set(history) == {"loss", "accuracy"}


def test_wrapping_twice_is_an_error() -> None:
    model = tnt.Model(small_model())
    with pytest.raises(ValueError, match=r"is a tnt\.Model already"):
        tnt.Model(model)


def test_wrapping_something_else_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"takes a keras.Model, not Dense"):
        tnt.Model(keras.layers.Dense(3))


@pytest.mark.parametrize("strategy", ["data", None])
def test_unknown_strategy_is_an_error(strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"ParallelStrategy\.DATA"):
        tnt.Model(small_model(), parallel_strategy=strategy)


def test_the_strategy_all_of_earlier_versions_is_taken_as_data(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOGGER, "propagate", True)
    strategy = tnt.ParallelStrategy.ALL
    model = tnt.Model(small_model(), parallel_strategy=strategy, num_pipeline_stages=1)
    assert isinstance(model, tnt.Model)
    assert "ParallelStrategy.ALL is treated as DATA" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parallel_strategy": tnt.ParallelStrategy.PIPELINING}, "PIPELINING is not supported"),
        ({"num_pipeline_stages": 2}, "num_pipeline_stages is 2; it must be 1"),
        ({"pipeline_stages": 2}, "tnt.Model takes a Keras model.* not pipeline_stages"),
    ],
)
def test_models_are_not_divided(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        tnt.Model(small_model(), **arguments)


def test_the_plain_model_has_the_weights_and_settings_of_now() -> None:
    x, y = classification_data()
    model = tnt.Model(small_model())
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, verbose=0)
    results = model.evaluate(x, y, verbose=0)
    plain = model.model
    assert type(plain) is type(small_model())
    assert plain.optimizer is model.optimizer
    for one, other in zip(plain.weights, model.weights, strict=True):
        assert one is other
    if tnt.is_master_rank():  # no other rank is needed for this
        assert_close(plain.evaluate(x, y, verbose=0), results, 1e-5, 0)
        assert plain.predict(x, verbose=0).shape == (len(x), 3)


class HasModel(keras.Model):
    """A model with a layer `model`, as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = keras.layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        return self.model(inputs)


class HasProperty(Greeter):
    @property
    def model(self) -> str:
        return f"the model of {self.greeting}"


def test_an_attribute_model_of_the_users_is_kept(shared_tmp_path: Path) -> None:
    plain = HasModel()
    plain(np.ones((1, 5)))
    model = tnt.Model(plain)
    assert model.model is plain.model
    model.save_weights(shared_tmp_path / "own.weights.h5")
    before = model.get_weights()
    model.set_weights([0 * weight for weight in before])
    model.load_weights(shared_tmp_path / "own.weights.h5")
    assert_close(model.get_weights(), before, 0, 0)
    assert tnt.Model(HasProperty("me")).model == "the model of me"
    greeter = tnt.Model(Greeter("hello"))
    greeter.model = "a string"
    assert greeter.model == "a string"


def test_keras_does_not_save_the_plain_model_as_a_part_of_the_other(shared_tmp_path: Path) -> None:
    model = tnt.Model(small_model(regularized=False))
    assert "model" not in dir(model)
    outer = keras.Sequential([keras.Input((5,)), model])
    if tnt.is_master_rank():
        outer.save_weights(shared_tmp_path / "outer.weights.h5")
        with h5py.File(shared_tmp_path / "outer.weights.h5") as file:
            names: list[str] = []
            file.visit(names.append)
        assert not [name for name in names if name.endswith("/model")]


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
def test_a_missing_compile_is_an_error(method: str) -> None:
    model = tnt.Model(small_model())
    with pytest.raises(ValueError, match=rf"`{method}` needs a compiled model"):
        getattr(model, method)(*classification_data())


def test_a_saved_model_is_a_plain_one(shared_tmp_path: Path) -> None:
    model = tnt.Model(small_model(regularized=False))
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(batches(*classification_data()), verbose=0)
    model.save(shared_tmp_path / "model.keras")
    loaded = keras.models.load_model(shared_tmp_path / "model.keras")
    assert not isinstance(loaded, tnt.Model)
    assert_close([np.array(w) for w in loaded.weights], model.get_weights(), 0, 0)
    assert_close(
        [np.array(v) for v in loaded.optimizer.variables],
        [np.array(v) for v in model.optimizer.variables],
        0,
        0,
    )
    assert keras.models.model_from_json(model.to_json()).count_params() == model.count_params()


def test_ranks_with_different_models_are_told_so() -> None:
    if tnt.get_size() == 1:
        pytest.skip("needs more than one rank")
    layer = keras.layers.Dense(3 + tnt.get_rank())
    with pytest.raises(tnt.errors.MismatchError, match="rank"):
        tnt.Model(keras.Sequential([keras.Input((5,)), layer]))


def test_a_clone_is_a_tnt_model_of_its_own() -> None:
    model = tnt.Model(small_model(regularized=False))
    clone = keras.models.clone_model(model)
    assert isinstance(clone, tnt.Model)
    assert clone.count_params() == model.count_params()
    assert clone.weights[0] is not model.weights[0]
    assert isinstance(type(model).from_config(model.get_config()), tnt.Model)


@pytest.mark.parametrize("method", ["predict", "predict_on_batch"])
def test_weights_that_one_rank_sets_are_the_masters_again(method: str) -> None:
    model = tnt.Model(small_model())
    x, _ = classification_data()
    expected = getattr(model, method)(x)
    if tnt.get_rank() == 1:
        model.set_weights([0 * weight for weight in model.get_weights()])
    assert_close(getattr(model, method)(x), expected, 0, 0)


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_copies_and_pickles(again: Callable[[Any], Any]) -> None:
    model = tnt.Model(small_model(regularized=False))
    model.compile("sgd", "sparse_categorical_crossentropy")
    if tnt.is_master_rank():  # one rank can do that alone
        again(model)
    other = again(model)
    assert isinstance(other, tnt.Model)
    assert_close(other.get_weights(), model.get_weights(), 0, 0)
    other.fit(batches(*classification_data()), verbose=0)
    assert np.any(other.get_weights()[0] != model.get_weights()[0])


def test_datasets_are_not_kept_alive() -> None:
    model = tnt.Model(small_model())
    model.compile("sgd", "sparse_categorical_crossentropy")
    dataset = batches(*classification_data())
    model.fit(dataset, verbose=0)
    kept = weakref.ref(dataset)
    del dataset
    gc.collect()
    assert kept() is None


def test_clone_of_a_compiled_model_is_compiled() -> None:
    model = tnt.Model(small_model(regularized=False))
    model.compile("sgd", "sparse_categorical_crossentropy")
    clone = keras.models.clone_model(model)
    x, y = classification_data()
    clone.fit(x, y, batch_size=4, verbose=0)
    assert clone.optimizer is not model.optimizer
