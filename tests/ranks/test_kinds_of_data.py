"""Whatever Keras takes as data trains on several ranks as it does in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from oracle import (
    CLASSIFICATION,
    SAMPLES,
    assert_close,
    assert_trains_as_in_keras,
    batches,
    classification_data,
    small_model,
)

import tarantella as tnt
from tarantella.errors import InputError, MismatchError
from tarantella.internals import tensorflow as internals

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.ranks(2)]

X, Y = classification_data()
WEIGHTS = np.linspace(0.5, 1.5, SAMPLES)


class Batches(keras.utils.PyDataset):
    """The batches of arrays."""

    def __init__(self, *arrays: Any, length: int | None = 4, **options: Any) -> None:
        super().__init__(**options)
        self._arrays = arrays
        self._length = length

    @property
    def num_batches(self) -> int | None:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        begin = 4 * (index % 4)
        return tuple(array[begin : begin + 4] for array in self._arrays)


def _generate(*arrays: Any, rounds: int = 1) -> Iterator[tuple[Any, ...]]:
    for _ in range(rounds):
        for begin in range(0, SAMPLES, 4):
            yield tuple(array[begin : begin + 4] for array in arrays)


def _train(fit_arguments: Callable[[], dict[str, Any]], **options: Any) -> None:
    options = {"second_fit": True, **options}
    assert_trains_as_in_keras(small_model, lambda: CLASSIFICATION, fit_arguments, **options)


# Arrays


def _memory_mapped() -> Any:
    path = Path(f"mapped-{tnt.get_rank()}.npy")
    np.save(path, X)
    mapped = np.load(path, mmap_mode="r")
    path.unlink()
    return mapped


def _sparse(dense: Any) -> Any:
    return tf.sparse.from_dense(np.where(dense > 0, dense, 0))


ARRAYS = {
    "tensors, a triple to validate with": lambda: {
        "x": tf.constant(X),
        "y": tf.constant(Y),
        "batch_size": 4,
        "validation_data": (X[:5], Y[:5], WEIGHTS[:5]),
        "validation_batch_size": 2,
        "validation_freq": 2,
    },
    "a memory map, and weights": lambda: {
        "x": _memory_mapped(),
        "y": Y,
        "batch_size": 5,
        "shuffle": "batch",
        "sample_weight": WEIGHTS,
        "validation_split": 0.2,
    },
    "a frame with a column named feed": lambda: {
        "x": pd.DataFrame(X, columns=["a", "feed", "b", "dataset", "c"]),
        "y": pd.Series(Y),
        "batch_size": 4,
        "shuffle": True,
        "validation_split": 0.3,
    },
    "other floats, and weights of classes": lambda: {
        "x": X.astype("float32"),
        "y": Y.astype("uint8"),
        "batch_size": 6,
        "class_weight": {0: 0.5, 1: 2.0, 2: 1.0},
        "validation_data": batches(X, Y),
        "validation_steps": 2,
    },
    "steps and no batch size": lambda: {
        "x": X,
        "y": Y,
        "steps_per_epoch": 3,
        "validation_data": Batches(X, Y),
    },
    "sparse tensors": lambda: {"x": _sparse(X), "y": Y, "batch_size": 4, "shuffle": True},
    "SciPy's": lambda: {
        "x": pytest.importorskip("scipy.sparse").csr_matrix(np.where(X > 0, X, 0)),
        "y": Y,
        "batch_size": 4,
    },
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays(kind: str) -> None:
    _train(ARRAYS[kind])


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_training_needs_no_private_name_of_tensorflow(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {path.rpartition(".")[2] for path in internals.MODULE_NAMES} | set(internals.ATTRIBUTES)

    def without(owner: Any, name: str, *default: Any) -> Any:
        if name not in gone:
            return getattr(owner, name, *default)
        if default:
            return default[0]
        raise AttributeError(name)

    monkeypatch.setattr(internals, "getattr", without, raising=False)
    internals._found.cache_clear()

    def data() -> dict[str, Any]:
        if kind == "arrays":
            return {"x": X, "y": Y, "batch_size": 4, "shuffle": True, "validation_split": 0.2}
        samples = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(SAMPLES, seed=3)
        return {"x": samples.map(lambda x, y: (x / 2, y)).batch(4)}

    _train(data)


def test_initial_epoch() -> None:
    def train(model: keras.Model) -> Any:
        return model.fit(X, Y, 4, epochs=4, initial_epoch=2, shuffle=False, verbose=0).history

    _train(lambda: {"x": X, "y": Y}, second_fit=False, then=train)


def test_doubles_for_a_model_of_floats() -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    _train(lambda: {"x": X, "y": Y, "batch_size": 4}, tolerance=1e-4, atol=1e-5)


def test_evaluate_and_predict_take_all_their_arguments() -> None:
    frame, sparse = pd.DataFrame(X), _sparse(X)

    def use(model: keras.Model) -> Any:
        quiet = {"verbose": 0}
        return [
            model.evaluate(X, Y, 4, sample_weight=WEIGHTS, return_dict=True, **quiet),
            model.evaluate(batches(X, Y, WEIGHTS), steps=2, **quiet),
            model.evaluate(_generate(X, Y, rounds=3), steps=5, **quiet),
            model.evaluate(Batches(X, Y, workers=2), **quiet),
            model.evaluate(X, Y, steps=2, **quiet),
            model.predict(frame, batch_size=5, **quiet),
            model.predict(sparse, batch_size=5, **quiet),
            model.predict(batches(X), steps=2, **quiet),
            model.predict(_generate(X), **quiet),
            model.predict(_generate(X, rounds=3), steps=6, **quiet),
            model.predict(Batches(X), **quiet),
        ]

    _train(lambda: {"x": X, "y": Y}, second_fit=False, then=use)


test_evaluate_and_predict_take_all_their_arguments = pytest.mark.ranks(3)(
    test_evaluate_and_predict_take_all_their_arguments
)


# Structures


def _model_of_structures() -> keras.Model:
    first, second = keras.Input((5,), name="first"), keras.Input((2,), name="second")
    joined = keras.layers.Concatenate()([first, second])
    label = keras.layers.Dense(3, "softmax", name="label")(joined)
    number = keras.layers.Dense(1, name="number")(joined)
    return keras.Model(
        {"first": first, "deep": {"second": second}}, {"label": label, "number": number}
    )


STRUCTURES = {
    "nothing more": dict,
    "weights per output": lambda: {"sample_weight": {"label": WEIGHTS, "number": WEIGHTS**2}},
    "one array of weights": lambda: {"sample_weight": WEIGHTS, "shuffle": True},
    "a split": lambda: {"validation_split": 0.25, "shuffle": True},
}


@pytest.mark.parametrize("options", STRUCTURES)
def test_structures_of_arrays(options: str) -> None:
    def compile_arguments() -> dict[str, Any]:
        loss = {"label": "sparse_categorical_crossentropy", "number": "mse"}
        return {
            "optimizer": "sgd",
            "loss": loss,
            "weighted_metrics": {"label": ["accuracy"], "number": ["mae"]},
        }

    def fit_arguments() -> dict[str, Any]:
        return {
            "x": {"first": X, "deep": {"second": pd.DataFrame(X[:, :2])}},
            "y": {"label": Y, "number": tf.constant(X[:, :1])},
            "batch_size": 4,
            **STRUCTURES[options](),
        }

    assert_trains_as_in_keras(_model_of_structures, compile_arguments, fit_arguments)


def test_ragged_inputs() -> None:
    ragged = tf.RaggedTensor.from_row_lengths(np.arange(34) % 7, [3, 1, 4, 1, 5, 9, 2, 6, 3])

    class Sums(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

        def call(self, inputs: Any) -> Any:
            return self.scale * tf.cast(tf.reduce_sum(inputs, axis=1, keepdims=True), "float64")

    assert_trains_as_in_keras(
        Sums,
        lambda: {"optimizer": "sgd", "loss": "mse"},
        lambda: {"x": ragged, "y": np.ones((9, 1)), "batch_size": 4},
    )


# Data from Python code

PYTHON = {
    "no threads": lambda: {"x": Batches(X, Y, workers=0), "validation_data": Batches(X, Y)},
    "weights": lambda: {"x": Batches(X, Y, WEIGHTS), "shuffle": True},
    "weights of classes": lambda: {"x": Batches(X, Y), "class_weight": {0: 2.0, 1: 0.5}},
    "threads": lambda: {
        "x": Batches(X, Y, workers=2),
        "validation_data": _generate(X, Y, rounds=2),
        "validation_steps": 6,
        "validation_freq": 2,  # what Keras reads ahead of the first time is lost by chance
    },
    "processes": lambda: {"x": Batches(X, Y, workers=2, use_multiprocessing=True)},
    "no end": lambda: {
        "x": Batches(X, Y, length=None),
        "steps_per_epoch": 3,
        "validation_data": Batches(X, Y, length=None),
        "validation_steps": 2,
    },
    "no end, in threads": lambda: {
        "x": Batches(X, Y, length=None, workers=2),
        "steps_per_epoch": 6,
    },
    "a part of it each epoch": lambda: {"x": Batches(X, Y, length=8), "steps_per_epoch": 4},
}


@pytest.mark.parametrize("kind", PYTHON)
def test_py_datasets(kind: str) -> None:
    _train(PYTHON[kind], second_fit=kind != "threads")


def test_generator_with_weights_and_steps() -> None:
    _train(
        lambda: {"x": _generate(X, Y, WEIGHTS, rounds=3), "steps_per_epoch": 3},
        second_fit=False,
    )


test_generator_with_weights_and_steps = pytest.mark.ranks(3)(test_generator_with_weights_and_steps)


def test_data_loader() -> None:
    torch = pytest.importorskip("torch")
    samples = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))

    def loader() -> Any:
        return torch.utils.data.DataLoader(samples, batch_size=4)

    _train(lambda: {"x": loader(), "validation_data": loader()})


# Random data that are not seeded


class _Recorder(keras.layers.Layer):
    """Writes down one number of each batch."""

    seen: list[float] = []  # noqa: RUF012

    def call(self, inputs: Any) -> Any:
        recorded = tf.numpy_function(self._record, [inputs], inputs.dtype)
        return tf.ensure_shape(recorded, inputs.shape)

    def _record(self, values: np.ndarray) -> np.ndarray:
        self.seen.append(float(values[0, 0]))
        return values

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


def _assert_seen_alike(fit: Callable[[keras.Model], Any], steps: int) -> list[float]:
    """What a `fit` sees on all ranks, whose random numbers are different before it."""
    np.random.seed(tnt.get_rank())
    random.seed(tnt.get_rank())
    _Recorder.seen.clear()
    model = tnt.Model(keras.Sequential([keras.Input((1,)), _Recorder(), keras.layers.Dense(1)]))
    model.compile(loss="mse")
    fit(model)
    for seen in tnt.allgather(np.array(_Recorder.seen)):
        assert list(seen) == _Recorder.seen
    assert len(_Recorder.seen) == steps
    return list(_Recorder.seen)


def _constant_batch(value: float) -> tuple[Any, Any]:
    return np.full((4, 1), value), np.full((4, 1), value)


class _Drawn(keras.utils.PyDataset):
    def __init__(self, length: int | None) -> None:
        super().__init__()
        self._length = length

    @property
    def num_batches(self) -> int | None:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return _constant_batch(np.random.uniform())


class _Shuffled(_Drawn):
    def __init__(self, length: int | None) -> None:
        super().__init__(length)
        self._order = np.arange(5.0)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return _constant_batch(self._order[index % 5])

    def on_epoch_end(self) -> None:
        np.random.shuffle(self._order)


def _draw() -> Iterator[tuple[Any, Any]]:
    while True:
        yield _constant_batch(np.random.uniform())


@pytest.mark.parametrize("kind", [_Drawn, _Shuffled])
@pytest.mark.parametrize("length", [5, None])
def test_a_py_dataset_that_draws_is_the_same_on_all_ranks(kind: Any, length: int | None) -> None:
    steps = None if length else 3
    options = {"epochs": 6, "shuffle": bool(length), "verbose": 0}
    _assert_seen_alike(
        lambda model: model.fit(kind(length), steps_per_epoch=steps, **options), 6 * (steps or 5)
    )


def test_a_generator_that_draws_is_the_same_on_all_ranks_also_when_it_is_used_again() -> None:
    generator = _draw()

    def fit(model: keras.Model) -> None:
        for _ in range(2):
            model.fit(
                generator,
                steps_per_epoch=5,
                epochs=3,
                validation_data=_Drawn(2),
                shuffle=False,
                verbose=0,
            )

    seen = _assert_seen_alike(fit, 2 * 3 * (5 + 2))
    assert len(set(seen)) == len(seen)


def test_a_generator_used_again_resumes_where_it_stopped() -> None:
    numbers = (_constant_batch(number) for number in range(100))

    def fit(model: keras.Model) -> None:
        for _ in range(2):
            model.fit(numbers, steps_per_epoch=4, epochs=2, shuffle=False, verbose=0)

    assert _assert_seen_alike(fit, 16) == list(range(16))


def test_a_data_loader_that_shuffles_is_the_same_on_all_ranks() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(tnt.get_rank())
    numbers = torch.arange(5.0, dtype=torch.float64).reshape(5, 1, 1).repeat(1, 4, 1)
    samples = torch.utils.data.TensorDataset(numbers, numbers)
    # Each sample is a batch already.
    loader = torch.utils.data.DataLoader(samples, batch_size=None, shuffle=True)
    seen = _assert_seen_alike(lambda model: model.fit(loader, epochs=3, verbose=0), 15)
    assert all(sorted(seen[i : i + 5]) == list(range(5)) for i in (0, 5, 10))


# What a user gets wrong

MISTAKES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "batch size 0": (lambda: {"x": X, "y": Y, "batch_size": 0}, "batch_size is 0"),
    "negative": (lambda: {"x": X, "y": Y, "batch_size": -1}, "batch_size is -1"),
    "fraction": (lambda: {"x": X, "y": Y, "batch_size": 2.5}, "batch_size is 2.5"),
    "text": (lambda: {"x": X, "y": Y, "batch_size": "32"}, "batch_size is '32'"),
    "validation batch size": (
        lambda: {"x": X, "y": Y, "validation_split": 0.5, "validation_batch_size": -2},
        "validation_batch_size is -2",
    ),
    "lengths": (lambda: {"x": X, "y": Y[:5]}, "cardinality"),
    "split of a dataset": (lambda: {"x": batches(X, Y), "validation_split": 0.2}, "NumPy"),
    "dataset and targets": (lambda: {"x": batches(X), "y": Y}, "`y` should not be passed"),
    "generator and targets": (lambda: {"x": _generate(X), "y": Y}, "`y` should not be passed"),
    "not batched": (
        lambda: {"x": tf.data.Dataset.from_tensor_slices((X, Y))},
        r"dataset\.batch\(batch_size\)",
    ),
    "no batches": (lambda: {"x": (_ for _ in ())}, "at least one batch"),
    "two kinds of weights": (
        lambda: {"x": X, "y": Y, "sample_weight": WEIGHTS, "class_weight": {0: 1.0}},
        "at the same time",
    ),
    "nothing of the kind": (lambda: {"x": object()}, "Unrecognized data type"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_on_all_ranks(mistake: str) -> None:
    arguments, message = MISTAKES[mistake]
    model = tnt.Model(small_model())
    model.compile(**CLASSIFICATION)
    with pytest.raises(ValueError, match=message):
        model.fit(verbose=0, **arguments())
    assert_close(tnt.allreduce(1.0), tnt.get_size())


def test_empty_arrays_train_nothing_as_in_keras_and_predict_nothing() -> None:
    model = tnt.Model(small_model())
    model.compile(**CLASSIFICATION)
    assert model.fit(X[:0], Y[:0], verbose=0).history == {}
    with pytest.raises(InputError, match="no samples"):  # Keras fails in words of Python's
        model.predict(X[:0], verbose=0)


def test_another_kind_of_data_on_one_rank_is_an_error_that_says_so() -> None:
    model = tnt.Model(small_model())
    data = {0: X, 1: _generate(X)}[tnt.get_rank()]
    with pytest.raises(MismatchError, match="the kind of data: rank 0 has .*arrays"):
        model.predict(data, verbose=0)
