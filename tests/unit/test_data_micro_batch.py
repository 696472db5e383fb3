"""The micro-batches of a batch make up the batch."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tarantella.data import micro_batch
from tarantella.data.cut import cut
from tarantella.errors import InputError


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("total", [1, 2, 3, 8, 13])
def test_parts_follow_each_other_and_differ_by_at_most_one(total: int, size: int) -> None:
    everyones = [micro_batch.bounds(total, rank, size) for rank in range(size)]
    counts = [count for _, count in everyones]
    assert sum(counts) == total
    assert max(counts) - min(counts) <= 1
    assert [begin for begin, _ in everyones] == [sum(counts[:rank]) for rank in range(size)]
    in_graph = [
        micro_batch.bounds(tf.constant(total, tf.int64), rank, size) for rank in range(size)
    ]
    assert [(int(begin), int(count)) for begin, count in in_graph] == everyones


def test_a_rank_without_samples_gets_one_that_does_not_count() -> None:
    own = micro_batch.cut((tf.constant([[1.0], [2.0]]), tf.constant([1, 2])), 2, 3)
    assert int(own.count) == 0
    assert int(own.total) == 2
    assert own.data[0].numpy().tolist() == [[2.0]]


Named = namedtuple("Named", "a b")


@pytest.mark.parametrize(
    "element",
    [
        lambda i: i,
        lambda i: (i,),
        lambda i: (i, i),
        lambda i: {"a": i, "b": (i, i)},
        lambda i: (i, {"a": i}, i),
        lambda i: Named(i, i),
    ],
    ids=["tensor", "one", "two", "dict", "nested", "named"],
)
def test_structure_is_kept(element: Any) -> None:
    dataset = tf.data.Dataset.range(5).map(element).batch(3)
    distributed = cut(dataset, 0, 2).micro_batches
    assert isinstance(distributed.element_spec, micro_batch.MicroBatch)
    assert not isinstance(dataset.element_spec, micro_batch.MicroBatch)
    data_spec = distributed.element_spec.data
    tf.nest.assert_same_structure(data_spec, dataset.element_spec)
    first = next(iter(distributed))
    assert [leaf.numpy().tolist() for leaf in tf.nest.flatten(first.data)] == [[0, 1]] * len(
        tf.nest.flatten(dataset.element_spec)
    )


def test_static_shapes_stay_static() -> None:
    dataset = tf.data.Dataset.range(12).batch(5, drop_remainder=True)
    assert cut(dataset, 0, 2).micro_batches.element_spec.data.shape == (3,)
    assert cut(dataset, 1, 2).micro_batches.element_spec.data.shape == (2,)


def test_cardinality_is_known_where_it_was() -> None:
    dataset = tf.data.Dataset.range(10)
    assert int(cut(dataset.batch(3), 0, 2).micro_batches.cardinality()) == 4
    infinite = cut(dataset.repeat().batch(3), 0, 2).micro_batches
    assert int(infinite.cardinality()) == tf.data.INFINITE_CARDINALITY


def test_a_dataset_without_batches_is_refused() -> None:
    with pytest.raises(InputError, match=r"dataset\.batch\(batch_size\)"):
        cut(tf.data.Dataset.range(3), 0, 2)


def test_tensors_of_different_lengths_are_refused() -> None:
    dataset = tf.data.Dataset.from_generator(
        lambda: [(np.ones(3), np.ones(2))],
        output_signature=(tf.TensorSpec((None,)), tf.TensorSpec((None,))),
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="different numbers of samples"):
        list(cut(dataset, 0, 2).micro_batches)
