"""Unseeded shuffles get a seed, everything else stays as it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tarantella.data import order
from tarantella.data.order import common_seed, with_common_order
from tarantella.errors import InputError

Transformation = Callable[[tf.data.Dataset], tf.data.Dataset]


@pytest.fixture(autouse=True)
def unseeded() -> Iterator[None]:
    context.context()._set_global_seed(None)
    yield
    context.context()._set_global_seed(None)


def _options() -> tf.data.Options:
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    return options


DOWNSTREAM: dict[str, Transformation] = {
    "batch": lambda ds: ds.batch(3),
    "parallel_batch": lambda ds: ds.batch(3, num_parallel_calls=2, deterministic=False),
    "cache": lambda ds: ds.cache(),
    "concatenate": lambda ds: ds.concatenate(ds),
    "enumerate": lambda ds: ds.enumerate(),
    "filter": lambda ds: ds.filter(lambda i: i % 2 == 0),
    "flat_map": lambda ds: ds.flat_map(lambda i: tf.data.Dataset.from_tensors(i).repeat(2)),
    "group_by_window": lambda ds: ds.group_by_window(lambda i: i % 2, lambda _, w: w.batch(2), 2),
    "interleave": lambda ds: ds.interleave(tf.data.Dataset.from_tensors, 2),
    "parallel_interleave": lambda ds: ds.interleave(
        tf.data.Dataset.from_tensors, 2, num_parallel_calls=2, deterministic=False
    ),
    "map": lambda ds: ds.map(lambda i: i + 1),
    "parallel_map": lambda ds: ds.map(lambda i: i + 1, num_parallel_calls=2, deterministic=False),
    "options": lambda ds: ds.with_options(_options()),
    "padded_batch": lambda ds: ds.map(lambda i: tf.range(i % 3)).padded_batch(4),
    "prefetch": lambda ds: ds.prefetch(2),
    "prefetch_autotune": lambda ds: ds.prefetch(tf.data.AUTOTUNE),
    "ragged_batch": lambda ds: ds.map(lambda i: tf.range(i % 3)).ragged_batch(4),
    "rebatch": lambda ds: ds.batch(4).rebatch(3),
    "repeat": lambda ds: ds.repeat(2),
    "scan": lambda ds: ds.scan(tf.constant(0, tf.int64), lambda s, i: (s + i, s + i)),
    "shard": lambda ds: ds.shard(2, 1),
    "shuffle": lambda ds: ds.shuffle(5, seed=3),
    "skip": lambda ds: ds.skip(3),
    "take": lambda ds: ds.take(7),
    "take_while": lambda ds: ds.take_while(lambda i: i < 18),
    "unbatch": lambda ds: ds.batch(4).unbatch(),
    "unique": lambda ds: ds.unique(),
    "window": lambda ds: ds.window(3).flat_map(lambda w: w.batch(3)),
    "zip": lambda ds: tf.data.Dataset.zip(ds, ds),
}


def _elements(dataset: tf.data.Dataset) -> list[Any]:
    return [
        tf.nest.map_structure(lambda leaf: getattr(leaf, "to_list", leaf.numpy)(), element)
        if not hasattr(element, "numpy")
        else element.numpy().tolist()
        for element in dataset
    ]


def _texts(dataset: tf.data.Dataset) -> list[str]:
    return [str(element) for element in _elements(dataset)]


@pytest.mark.parametrize("name", DOWNSTREAM)
def test_order_is_fixed_through(name: str) -> None:
    def build() -> tf.data.Dataset:
        return DOWNSTREAM[name](tf.data.Dataset.range(20).shuffle(20))

    original = build()
    order._uses = itertools.count()
    first = with_common_order(original)
    order._uses = itertools.count()  # as on another rank
    second = with_common_order(build())
    assert first.element_spec == original.element_spec
    assert int(first.cardinality()) == int(original.cardinality())
    assert _texts(first) == _texts(second)
    assert _texts(first) == _texts(second)  # the second epoch too


def test_what_is_rebuilt_does_what_it_did() -> None:
    """With a seed given, a rebuilt pipeline yields what the original yields."""

    def build() -> tf.data.Dataset:
        free = tf.data.Dataset.range(20).map(lambda i: i, num_parallel_calls=2, deterministic=False)
        return free.shuffle(20, seed=5).batch(4).repeat(2)

    fixed = with_common_order(build())
    expected = tf.data.Dataset.range(20).shuffle(20, seed=5).batch(4).repeat(2)
    assert fixed is not build()
    assert _texts(fixed) == _texts(expected)
    assert _texts(fixed) == _texts(expected)


def test_a_dataset_with_a_seed_is_left_alone() -> None:
    dataset = tf.data.Dataset.range(5).shuffle(5, seed=1).batch(2)
    assert with_common_order(dataset) is dataset


def test_a_global_seed_is_a_seed() -> None:
    tf.random.set_seed(3)
    dataset = tf.data.Dataset.range(5).shuffle(5).batch(2)
    assert with_common_order(dataset) is dataset


def test_an_interleave_whose_order_counts_is_left_alone() -> None:
    for deterministic in (None, True):
        dataset = tf.data.Dataset.range(5).interleave(
            tf.data.Dataset.from_tensors, 2, num_parallel_calls=2, deterministic=deterministic
        )
        assert with_common_order(dataset) is dataset


def test_each_epoch_has_an_order_of_its_own() -> None:
    fixed = with_common_order(tf.data.Dataset.range(50).shuffle(50))
    assert _texts(fixed) != _texts(fixed)
    once = with_common_order(tf.data.Dataset.range(50).shuffle(50, reshuffle_each_iteration=False))
    assert _texts(once) == _texts(once)


FREE: dict[str, Callable[[], tf.data.Dataset]] = {
    "shuffle in a function": lambda: tf.data.Dataset.range(3).flat_map(
        lambda i: tf.data.Dataset.range(20).shuffle(20)
    ),
    "draws in a filter": lambda: tf.data.Dataset.range(40).filter(
        lambda i: tf.random.uniform([]) < 0.5
    ),
    "random": lambda: tf.data.Dataset.random().take(9),
    "sample_from_datasets": lambda: tf.data.Dataset.sample_from_datasets(
        [tf.data.Dataset.range(20), tf.data.Dataset.range(50, 70)]
    ),
    "rejection_resample": lambda: (
        tf.data.Dataset.range(60)
        .map(lambda i: i % 3)
        .rejection_resample(lambda i: tf.cast(i, tf.int32), [0.5, 0.3, 0.2])
        .map(lambda _, i: i)
    ),
    "two shuffles": lambda: tf.data.Dataset.zip(
        tf.data.Dataset.range(30).shuffle(30), tf.data.Dataset.range(30).shuffle(30)
    ),
}


@pytest.mark.parametrize("name", FREE)
def test_what_is_left_to_chance_is_the_same_on_all_ranks(name: str) -> None:
    def on_a_rank() -> list[str]:
        order._uses = itertools.count()
        common = with_common_order(FREE[name]())
        return _texts(common) + _texts(common)

    assert on_a_rank() == on_a_rank()


def test_two_shuffles_are_not_alike() -> None:
    pairs = _elements(with_common_order(FREE["two shuffles"]()))
    assert any(one != other for one, other in pairs)


def test_free_order_inside_a_function_is_refused() -> None:
    dataset = tf.data.Dataset.range(3).flat_map(
        lambda i: tf.data.Dataset.range(3).map(
            lambda k: k, num_parallel_calls=2, deterministic=False
        )
    )
    with pytest.raises(InputError, match="set `deterministic=True` there"):
        with_common_order(dataset.batch(2))


def test_seeded_shuffle_inside_a_function_is_fine() -> None:
    dataset = tf.data.Dataset.range(3).flat_map(lambda i: tf.data.Dataset.range(3).shuffle(3, 7))
    assert with_common_order(dataset) is dataset


def test_random_operations_share_a_seed_only_if_the_user_gave_none() -> None:
    def draw() -> list[float]:
        with common_seed():
            dataset = tf.data.Dataset.range(1).map(lambda i: tf.random.uniform([3]))
        return next(iter(dataset)).numpy().tolist()

    order._uses = itertools.count()
    first, second = draw(), draw()
    assert first != second
    order._uses = itertools.count()
    assert [draw(), draw()] == [first, second]
    assert context.global_seed() is None
    tf.random.set_seed(11)
    draw()
    assert context.global_seed() == 11


SHUFFLED_IN_PASSES: dict[str, tuple[bool, Callable[[], tf.data.Dataset]]] = {
    "shuffle": (False, lambda: tf.data.Dataset.range(9)),
    "interleave": (
        False,
        lambda: (
            tf.data.Dataset.range(3).shuffle(3, 5).interleave(lambda i: tf.data.Dataset.range(i))
        ),
    ),
    "flat_map": (
        False,
        lambda: tf.data.Dataset.range(8).window(3).flat_map(lambda rows: rows.batch(2)).unbatch(),
    ),
    "groups": (
        False,
        lambda: (
            tf.data.Dataset.range(9)
            .shuffle(9, 5)
            .group_by_window(lambda i: i % 2, lambda key, rows: rows.batch(2), 2)
            .unbatch()
        ),
    ),
    "cardinality": (
        False,
        lambda: tf.data.Dataset.range(9).apply(tf.data.experimental.assert_cardinality(9)),
    ),
    "a shuffle inside": (
        True,
        lambda: tf.data.Dataset.range(3).flat_map(lambda i: tf.data.Dataset.range(4).shuffle(4, 6)),
    ),
    "cache": (True, lambda: tf.data.Dataset.range(9).shuffle(9, 5).cache()),
    "concatenate": (
        True,
        lambda: tf.data.Dataset.range(5).concatenate(tf.data.Dataset.range(5).shuffle(5, 5)),
    ),
}


@pytest.mark.parametrize("name", SHUFFLED_IN_PASSES)
def test_passes_need_only_be_begun_to_reach_a_later_one(name: str) -> None:
    may_continue, make = SHUFFLED_IN_PASSES[name]
    read, begun = (make().shuffle(4, seed=3) for _ in range(2))
    assert order.continues_across_passes(read) == may_continue
    if may_continue:
        return
    for _ in range(2):
        list(read)
        next(iter(begun))
    assert [int(i) for i in begun] == [int(i) for i in read]


def test_records_of_files_need_only_be_begun(tmp_path: Path) -> None:
    for name in "ab":
        with tf.io.TFRecordWriter(str(tmp_path / name)) as file:
            for number in range(5):
                file.write(f"{name}{number}".encode())

    def records() -> tf.data.Dataset:
        files = tf.data.Dataset.list_files(str(tmp_path / "*"), seed=4)
        return files.interleave(
            tf.data.TFRecordDataset, num_parallel_calls=2, deterministic=True
        ).shuffle(4, seed=3)

    read, begun = records(), records()
    assert not order.continues_across_passes(read)
    for _ in range(2):
        list(read)
        next(iter(begun))
    assert [i.numpy() for i in begun] == [i.numpy() for i in read]
