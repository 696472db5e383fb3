"""A batch size can also be given as the size of each rank's micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import (
    WITH_METRICS,
    assert_close,
    assert_trains_as_in_keras,
    batches,
    classification_data,
    small_model,
)

import tarantella as tnt
from tarantella.errors import InputError

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.ranks(2)]

X, Y = classification_data()


def _samples() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def _compiled() -> keras.Model:
    model = tnt.Model(small_model())
    model.compile(**WITH_METRICS)
    return model


def _train(
    in_keras: Callable[[], dict[str, Any]], on_ranks: Callable[[], dict[str, Any]], **options: Any
) -> None:
    assert_trains_as_in_keras(
        small_model, lambda: WITH_METRICS, in_keras, arguments_on_ranks=on_ranks, **options
    )


@pytest.mark.ranks(1, 3)
def test_a_dataset_is_batched_with_the_parts_of_all_ranks() -> None:
    size = tnt.get_size()
    _train(
        lambda: {
            "x": _samples().batch(2 * size),
            "validation_data": _samples().batch(3 * size),
        },
        lambda: {
            "x": _samples(),
            "tnt_micro_batch_size": 2,
            "validation_data": _samples(),
            "tnt_validation_micro_batch_size": 3,
        },
    )


@pytest.mark.ranks(1, 3)
def test_arrays() -> None:
    size = tnt.get_size()
    arrays = {"x": X, "y": Y, "shuffle": True, "validation_split": 0.4}
    _train(
        lambda: {**arrays, "batch_size": 2 * size, "validation_batch_size": size},
        lambda: {**arrays, "tnt_micro_batch_size": 2, "tnt_validation_micro_batch_size": 1},
    )


def test_evaluate_and_predict() -> None:
    model, size = _compiled(), tnt.get_size()
    for data in [(X, Y), (_samples(),), (_samples().batch(2 * size),)]:
        result = model.evaluate(*data, verbose=0, tnt_micro_batch_size=2)
        assert_close(result, model.evaluate(X, Y, batch_size=2 * size, verbose=0))
    expected = model.predict(X, verbose=0)
    inputs = tf.data.Dataset.from_tensor_slices(X)
    for x in (X, inputs, inputs.batch(2 * size)):
        assert_close(model.predict(x, verbose=0, tnt_micro_batch_size=2), expected)


@pytest.mark.ranks(1, 3)
def test_data_of_a_ranks_own() -> None:
    rank, size = tnt.get_rank(), tnt.get_size()
    own = slice(4 * rank, 4 * rank + 4)
    order = [4 * r + 2 * step + i for step in range(2) for r in range(size) for i in range(2)]
    _train(
        lambda: {"x": X[order], "y": Y[order], "batch_size": 2 * size},
        lambda: {
            "x": _samples().skip(own.start).take(4),
            "tnt_micro_batch_size": 2,
            "tnt_distribute_dataset": False,
            "validation_data": None,
        },
    )
    result = _compiled().evaluate(
        X[own], Y[own], verbose=0, tnt_micro_batch_size=2, tnt_distribute_dataset=False
    )
    assert len(result) == 2


def test_sparse_batches_of_a_ranks_own() -> None:
    rank, size = tnt.get_rank(), tnt.get_size()
    dense = np.where(X > 0, X, 0)

    def data(numbers: list[int], batch_size: int) -> tf.data.Dataset:
        sparse = tf.sparse.from_dense(dense[numbers])
        return tf.data.Dataset.from_tensor_slices((sparse, Y[numbers])).batch(batch_size)

    everyones = [[4 * r + i for i in range(4)] for r in range(size)]
    order = [i for step in range(2) for own in everyones for i in own[2 * step : 2 * step + 2]]
    _train(
        lambda: {"x": data(order, 2 * size)},
        lambda: {"x": data(everyones[rank], 2), "tnt_distribute_dataset": False},
    )


def test_a_distributed_dataset_in_fit_and_evaluate() -> None:
    size = tnt.get_size()

    def evaluate(model: keras.Model) -> Any:
        data: Any = _samples().batch(5)
        if isinstance(model, tnt.Model):
            data = tnt.distribute_dataset(data)
        return model.evaluate(data, verbose=0)

    _train(
        lambda: {"x": _samples().batch(2 * size), "validation_data": _samples().batch(4)},
        lambda: {
            "x": tnt.distribute_dataset(_samples(), tnt_micro_batch_size=2),
            "validation_data": tnt.distribute_dataset(_samples().batch(4)),
        },
        then=evaluate,
    )


def test_a_contradiction_is_an_error_that_says_so() -> None:
    model, size = _compiled(), tnt.get_size()
    wrong = 2 * size + 1
    message = f"tnt_micro_batch_size=2 contradicts the batch size {wrong}.* make {2 * size}"
    for arguments in (
        {"x": X, "y": Y, "batch_size": wrong},
        {"x": batches(X, Y, batch_size=wrong)},
    ):
        with pytest.raises(InputError, match=message):
            model.fit(**arguments, tnt_micro_batch_size=2, verbose=0)
    with pytest.raises(InputError, match="tnt_validation_micro_batch_size=2 contradicts"):
        model.fit(
            X,
            Y,
            validation_data=batches(X, Y, batch_size=wrong),
            tnt_validation_micro_batch_size=2,
            verbose=0,
        )


@pytest.mark.parametrize("value", [0, -1, 2.5, "2", True, np.array([2, 3])])
def test_nonsense_is_an_error_that_says_so(value: Any) -> None:
    model = _compiled()
    for x in (_samples(), X):
        with pytest.raises(InputError, match="^tnt_micro_batch_size is .* whole number of samples"):
            model.predict(x, tnt_micro_batch_size=value, verbose=0)
    with pytest.raises(InputError, match="^tnt_validation_micro_batch_size is"):
        model.fit(X, Y, validation_split=0.5, tnt_validation_micro_batch_size=value, verbose=0)


def test_batches_from_python_code_have_their_size() -> None:
    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            return X, Y

    def generate() -> Iterator[tuple[Any, Any]]:
        yield X, Y

    for data in (Batches(), generate()):
        with pytest.raises(InputError, match="cannot be used with a .*, which comes in batches"):
            _compiled().fit(data, tnt_micro_batch_size=2, verbose=0)


def _in_buckets() -> tf.data.Dataset:
    return _samples().bucket_by_sequence_length(
        lambda x, y: tf.shape(x)[0], bucket_boundaries=[3], bucket_batch_sizes=[2, 3]
    )


@pytest.mark.parametrize(
    "make",
    [
        _in_buckets,
        lambda: _samples().batch(4).rebatch([2, 3]),
        lambda: _samples().batch(4).filter(lambda x, y: True),
        lambda: tf.data.Dataset.sample_from_datasets([_samples().batch(4)] * 2),
    ],
    ids=["buckets", "rebatch", "filter", "sample_from_datasets"],
)
def test_batches_of_a_size_that_cannot_be_told_are_an_error(make: Any) -> None:
    with pytest.raises(InputError, match="a dataset of batches of unknown size"):
        _compiled().fit(make(), tnt_micro_batch_size=2, verbose=0)


def test_batches_that_were_taken_apart_are_batched() -> None:
    model = _compiled()
    expected = model.evaluate(X, Y, verbose=0)
    for samples in (
        _samples().batch(4).unbatch(),
        _samples().batch(4).flat_map(lambda *batch: tf.data.Dataset.from_tensor_slices(batch)),
        _samples().filter(lambda x, y: True),
    ):
        assert_close(model.evaluate(samples, verbose=0, tnt_micro_batch_size=2), expected)
