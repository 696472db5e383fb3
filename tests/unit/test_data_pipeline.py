"""TensorFlow's private dataset classes are what `pipeline` takes them for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tarantella.data import pipeline

_range = tf.data.Dataset.range


def _plus(i: tf.Tensor) -> tf.Tensor:
    return i + 1


CLASSES: dict[str, tuple[Callable[[tf.data.Dataset], tf.data.Dataset], Any]] = {
    "batch": (lambda ds: ds.batch(3), pipeline.Batch),
    "parallel batch": (lambda ds: ds.batch(3, num_parallel_calls=2), pipeline.Batch),
    "cache": (lambda ds: ds.cache(), pipeline.Cache),
    "concatenate": (lambda ds: ds.concatenate(_range(3)), pipeline.Concatenate),
    "choose_from_datasets": (
        lambda ds: tf.data.Dataset.choose_from_datasets([ds, ds], _range(2).repeat(4)),
        pipeline.DirectedInterleave,
    ),
    "interleave": (
        lambda ds: ds.interleave(tf.data.Dataset.from_tensors, num_parallel_calls=2),
        pipeline.ParallelInterleave,
    ),
    "map": (lambda ds: ds.map(_plus), pipeline.Map),
    "parallel map": (lambda ds: ds.map(_plus, num_parallel_calls=2), pipeline.Map),
    "options": (lambda ds: ds.with_options(tf.data.Options()), pipeline.Options),
    "padded_batch": (lambda ds: ds.map(tf.range).padded_batch(3), pipeline.PaddedBatch),
    "prefetch": (lambda ds: ds.prefetch(2), pipeline.Prefetch),
    "rebatch": (lambda ds: ds.batch(4).rebatch(3), pipeline.Rebatch),
    "repeat": (lambda ds: ds.repeat(2), pipeline.Repeat),
    "shard": (lambda ds: ds.shard(2, 1), pipeline.Shard),
    "shuffle": (lambda ds: ds.shuffle(5, seed=3), pipeline.Shuffle),
    "skip": (lambda ds: ds.skip(2), pipeline.Skip),
    "take": (lambda ds: ds.take(2), pipeline.Take),
    "zip": (lambda ds: tf.data.Dataset.zip({"a": ds, "b": (ds, ds)}), pipeline.Zip),
}


def _texts(dataset: tf.data.Dataset) -> list[str]:
    return [
        str([leaf.numpy().tolist() for leaf in tf.nest.flatten(element)]) for element in dataset
    ]


@pytest.mark.parametrize("name", CLASSES)
def test_a_transformation_is_known_and_can_be_made_again(name: str) -> None:
    transform, cls = CLASSES[name]
    original = transform(_range(8))
    assert isinstance(original, cls)
    again = pipeline.over(transform(_range(8)), lambda source: source)
    assert again.element_spec == original.element_spec
    assert _texts(again) == _texts(original)
    assert _texts(again) == _texts(original)  # the second epoch too


def test_ragged_batch_is_two_transformations() -> None:
    batched = _range(8).map(tf.range).ragged_batch(3)
    assert isinstance(batched, pipeline.Batch)
    assert isinstance(pipeline.sources(batched)[0], pipeline.DenseToRagged)


def test_random_numbers_can_be_made_again() -> None:
    original = tf.data.Dataset.random(seed=4)
    assert isinstance(original, pipeline.Random)
    assert not pipeline.is_free(original)
    assert pipeline.is_free(tf.data.Dataset.random())


def test_files_are_found_and_replaced(tmp_path: Path) -> None:
    cached = _range(3).cache(str(tmp_path / "one"))
    assert pipeline.file_of(cached) == str(tmp_path / "one")
    assert pipeline.file_of(pipeline.with_file(cached, "two")) == "two"
    assert pipeline.file_of(_range(3).cache()) is None
    (stored,) = pipeline.sources(_range(3).snapshot(str(tmp_path / "one")))
    assert isinstance(stored, pipeline.Snapshot)
    assert pipeline.file_of(stored) == str(tmp_path / "one")
    assert pipeline.file_of(pipeline.with_file(stored, "two")) == "two"


def test_a_cache_is_filled_by_whoever_reads_it_all_and_not_by_asking() -> None:
    cached = _range(5).shuffle(5, seed=1).cache()
    assert not pipeline.is_filled(cached)
    next(iter(cached))
    assert not pipeline.is_filled(cached)
    elements = _texts(cached)
    assert pipeline.is_filled(cached)
    assert _texts(cached) == elements


def test_names_are_those_of_the_methods() -> None:
    assert pipeline.name_of(_range(3).padded_batch(2)) == "padded_batch"
    assert pipeline.name_of(_range(3).filter(lambda i: i > 1)) == "filter"
    assert pipeline.name_of(_range(3).map(_plus, num_parallel_calls=2)) == "map"


def test_the_input_of_rebatch_is_found() -> None:
    batched = _range(3).batch(2)
    assert pipeline.rebatched(batched.rebatch(3)) is batched


def test_elements_go_into_boxes_and_out() -> None:
    element = (tf.ragged.constant([[1], [2, 3]]), {"a": tf.constant(["x"]), "b": None})
    spec = tf.data.Dataset.from_tensors(element).element_spec
    box = pipeline.boxed(spec, element)
    assert bool(pipeline.has_element(box))
    assert not bool(pipeline.has_element(pipeline.empty_box()))
    ragged, rest = pipeline.unboxed(spec, box)
    assert ragged.to_list() == [[1], [2, 3]]
    assert rest["a"].numpy().tolist() == [b"x"]
    assert rest["b"] is None


def test_a_seed_for_a_while_leaves_no_trace() -> None:
    tf.random.set_seed(3)
    first = tf.random.uniform([2]).numpy().tolist()
    second = tf.random.uniform([2]).numpy().tolist()
    tf.random.set_seed(3)
    assert tf.random.uniform([2]).numpy().tolist() == first
    with pipeline.seeded(99):
        tf.random.uniform([5])
    assert pipeline.global_seed() == 3
    assert tf.random.uniform([2]).numpy().tolist() == second
