"""Every rank works on its micro-batch of every global batch, whatever the batches are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import (
    CLASSIFICATION,
    assert_close,
    assert_trains_as_in_keras,
    batches,
    classification_data,
    small_model,
)

import tarantella as tnt
from tarantella.data import micro_batch
from tarantella.errors import InputError
from tarantella.keras.adapter import RankDataAdapter

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.ranks(2)]


def _train(fit_arguments: Any, **options: Any) -> None:
    options = {"second_fit": True, **options}
    assert_trains_as_in_keras(small_model, lambda: CLASSIFICATION, fit_arguments, **options)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "batch_size",
    [1, 2, 12, 50, *(pytest.param(size, marks=pytest.mark.long) for size in (6, 13))],
)
def test_batch_sizes(batch_size: int) -> None:
    _train(lambda: {"x": batches(*classification_data(), batch_size=batch_size)})


def test_four_ranks_and_few_samples() -> None:
    _train(lambda: {"x": batches(*classification_data(samples=3), batch_size=2)})


test_four_ranks_and_few_samples = pytest.mark.ranks(4)(test_four_ranks_and_few_samples)


@pytest.mark.ranks(3)
def test_dropped_remainder() -> None:
    def data() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(classification_data()).batch(
            5, drop_remainder=True
        )

    _train(lambda: {"x": data(), "validation_data": data()})


def test_seeded_shuffle_keeps_its_order_over_epochs() -> None:
    def data() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(classification_data()).shuffle(13, 5).batch(4)

    _train(lambda: {"x": data()})


def _shuffled_and_repeated() -> tf.data.Dataset:
    samples = tf.data.Dataset.from_tensor_slices(classification_data()).shuffle(13, 5)
    return samples.map(lambda x, y: (x * 2, y)).repeat(2).batch(4)


def _looked_at() -> tf.data.Dataset:
    dataset = batches(*classification_data()).map(lambda x, y: (x * 2, y)).cache().shuffle(4, 5)
    next(iter(dataset))
    return dataset


@pytest.mark.parametrize("make", [_shuffled_and_repeated, _looked_at])
def test_orders_are_those_of_keras(make: Callable[[], tf.data.Dataset]) -> None:
    _train(lambda: {"x": make(), "validation_data": make()})


def test_class_weights_of_samples_padded_to_the_longest_of_the_batch() -> None:
    _, y = classification_data()

    def data() -> tf.data.Dataset:
        numbers = tf.data.Dataset.from_tensor_slices((np.arange(13), y))
        ragged = numbers.map(lambda i, y: (tf.ones([i % 5, 5], tf.float64), y))
        return ragged.padded_batch(4)

    def model() -> keras.Model:
        inputs = keras.Input((None, 5))
        pooled = keras.layers.GlobalAveragePooling1D()(inputs)
        return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(pooled))

    assert_trains_as_in_keras(
        model,
        lambda: CLASSIFICATION,
        lambda: {"x": data(), "class_weight": {0: 0.5, 1: 2.0, 2: 1.5}},
    )


class TwoRows(keras.Model):
    def call(self, inputs: Any) -> Any:
        return inputs[0] - inputs[1]


@pytest.mark.parametrize("fixed", [True, False])
def test_batches_whose_first_axis_is_not_that_of_samples_are_an_error_with_a_way_out(
    fixed: bool,
) -> None:
    def pairs() -> Iterator[Any]:
        yield np.ones((2, 6, 5))

    spec = tf.TensorSpec((2 if fixed else None, 6, 5), tf.float64)
    dataset = tf.data.Dataset.from_generator(pairs, output_signature=spec)
    model = tnt.Model(TwoRows())
    with pytest.raises(InputError, match="pass `tnt_distribute_dataset=False`"):
        model.predict(dataset, verbose=0)


@pytest.mark.ranks(3)
def test_unknown_cardinality() -> None:
    x, y = classification_data()

    def samples() -> Iterator[tuple[Any, Any]]:
        yield from zip(x, y, strict=True)

    def data() -> tf.data.Dataset:
        spec = (tf.TensorSpec((5,), tf.float64), tf.TensorSpec((), tf.int64))
        return tf.data.Dataset.from_generator(samples, output_signature=spec).batch(4)

    _train(lambda: {"x": data(), "validation_data": data()})


def test_infinite_dataset_with_steps() -> None:
    def data() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(classification_data()).repeat().batch(5)

    _train(
        lambda: {
            "x": data(),
            "steps_per_epoch": 4,
            "validation_data": data(),
            "validation_steps": 2,
        }
    )


def test_arrays_in_the_order_of_the_users_seed() -> None:
    x, y = classification_data()
    _train(
        lambda: {
            "x": x,
            "y": y,
            "batch_size": 4,
            "shuffle": True,
            "validation_split": 0.3,
            "sample_weight": np.linspace(0.5, 1.5, 13),
        },
        then=lambda model: [
            model.evaluate(x, y, batch_size=6, verbose=0),
            model.predict(x, batch_size=6, verbose=0),
        ],
    )


def _everyones_batches(adapter: RankDataAdapter) -> list[np.ndarray]:
    """What all ranks are given in each step, put together."""
    result = []
    for own in adapter.get_tf_dataset():
        count = int(own.count)
        sizes = [int(size) for size in tnt.allgather(np.int64(count))]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == int(own.total)
        result.append(np.concatenate(tnt.allgather(own.data[:count].numpy())))
    return result


@pytest.mark.parametrize("size", [1, 5, 7])
def test_unseeded_shuffle_is_the_same_on_all_ranks_and_anew_each_epoch(size: int) -> None:
    dataset = tf.data.Dataset.range(20).shuffle(20).map(lambda i: i + 1).batch(size).prefetch(2)
    adapter = RankDataAdapter.of(dataset)
    epochs = [np.concatenate(_everyones_batches(adapter)) for _ in range(2)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(1, 21))
    assert list(epochs[0]) != list(epochs[1])
    assert list(epochs[0]) != sorted(epochs[0])


def test_order_that_was_left_free_is_fixed() -> None:
    dataset = (
        tf.data.Dataset.range(40)
        .map(lambda i: i, num_parallel_calls=4, deterministic=False)
        .interleave(tf.data.Dataset.from_tensors, 4, num_parallel_calls=4, deterministic=False)
        .batch(7)
    )
    assert list(np.concatenate(_everyones_batches(RankDataAdapter.of(dataset)))) == list(range(40))


def test_the_order_continues_in_a_second_fit() -> None:
    seen: list[float] = []

    class Recorder(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return tf.ensure_shape(
                tf.numpy_function(self._record, [inputs], inputs.dtype), inputs.shape
            )

        def _record(self, values: np.ndarray) -> np.ndarray:
            seen.extend(values[:, 0])
            return values

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    model = tnt.Model(keras.Sequential([Recorder(), keras.layers.Lambda(lambda x: x[:, :1])]))
    model.compile(loss="mse")
    x = np.arange(24.0)[:, np.newaxis]
    dataset = tf.data.Dataset.from_tensor_slices((x, x)).shuffle(24).batch(12)
    orders = []
    for _ in range(2):
        seen.clear()
        model.evaluate(dataset, verbose=0)
        orders.append(list(seen))
    assert len(orders[0]) == 24 // tnt.get_size()
    assert orders[0] != orders[1]


def test_shuffle_inside_a_function_is_the_same_on_all_ranks() -> None:
    dataset = tf.data.Dataset.range(4).flat_map(lambda i: tf.data.Dataset.range(9).shuffle(9))
    seen = np.concatenate(_everyones_batches(RankDataAdapter.of(dataset.batch(9))))
    assert sorted(seen[:9]) == list(range(9))


def test_predictions_come_in_the_order_of_the_samples() -> None:
    model = tnt.Model(keras.Sequential([keras.layers.Lambda(lambda x: x * 2)]))
    x = np.arange(22.0).reshape(11, 2)
    for batch_size in (1, 2, 4, 5, 11, 100):
        assert_close(model.predict(x, batch_size=batch_size, verbose=0), 2 * x, 0, 0)


def test_ragged_and_sparse_batches() -> None:
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0]], dtype=tf.float64)
    sparse = tf.sparse.from_dense(np.eye(4))
    dataset = tf.data.Dataset.from_tensor_slices((ragged, sparse)).ragged_batch(3)
    rank, size = tnt.get_rank(), tnt.get_size()
    adapter = RankDataAdapter.of(dataset)
    for own, whole in zip(adapter.get_tf_dataset(), dataset, strict=True):
        begin, count = micro_batch.bounds(int(own.total), rank, size)
        if count:
            assert own.data[0].to_list() == whole[0].to_list()[begin : begin + count]
            assert_close(
                tf.sparse.to_dense(own.data[1]),
                tf.sparse.to_dense(whole[1])[begin : begin + count],
            )
