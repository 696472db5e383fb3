"""TensorFlow's private names for datasets mean what we take them for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

from tarantella.data import dataset_state, optionals, pipeline, rebuild
from tarantella.internals import tensorflow as internals

_range = tf.data.Dataset.range


def _plus(i: tf.Tensor) -> tf.Tensor:
    return i + 1


CLASSES: dict[str, tuple[Callable[[tf.data.Dataset], tf.data.Dataset], tuple[str, ...]]] = {
    "batch": (lambda ds: ds.batch(3), internals.BATCH),
    "parallel batch": (lambda ds: ds.batch(3, num_parallel_calls=2), internals.BATCH),
    "cache": (lambda ds: ds.cache(), internals.CACHE),
    "concatenate": (lambda ds: ds.concatenate(_range(3)), internals.CONCATENATE),
    "choose_from_datasets": (
        lambda ds: tf.data.Dataset.choose_from_datasets([ds, ds], _range(2).repeat(4)),
        internals.DIRECTED_INTERLEAVE,
    ),
    "interleave": (
        lambda ds: ds.interleave(tf.data.Dataset.from_tensors, num_parallel_calls=2),
        internals.PARALLEL_INTERLEAVE,
    ),
    "map": (lambda ds: ds.map(_plus), internals.MAP),
    "parallel map": (lambda ds: ds.map(_plus, num_parallel_calls=2), internals.MAP),
    "options": (lambda ds: ds.with_options(tf.data.Options()), internals.OPTIONS),
    "padded_batch": (lambda ds: ds.map(tf.range).padded_batch(3), internals.PADDED_BATCH),
    "prefetch": (lambda ds: ds.prefetch(2), internals.PREFETCH),
    "rebatch": (lambda ds: ds.batch(4).rebatch(3), internals.REBATCH),
    "repeat": (lambda ds: ds.repeat(2), internals.REPEAT),
    "shard": (lambda ds: ds.shard(2, 1), internals.SHARD),
    "shuffle": (lambda ds: ds.shuffle(5, seed=3), internals.SHUFFLE),
    "skip": (lambda ds: ds.skip(2), internals.SKIP),
    "take": (lambda ds: ds.take(2), internals.TAKE),
    "zip": (lambda ds: tf.data.Dataset.zip({"a": ds, "b": (ds, ds)}), internals.ZIP),
}


def _texts(dataset: tf.data.Dataset) -> list[str]:
    return [
        str([leaf.numpy().tolist() for leaf in tf.nest.flatten(element)]) for element in dataset
    ]


@pytest.mark.parametrize("name", CLASSES)
def test_a_transformation_is_known_and_can_be_made_again(name: str) -> None:
    transform, kind = CLASSES[name]
    original = transform(_range(8))
    assert internals.is_a(original, kind)
    again = rebuild.over(transform(_range(8)), lambda source: source)
    assert again.element_spec == original.element_spec
    assert _texts(again) == _texts(original)
    assert _texts(again) == _texts(original)  # the second epoch too


def test_ragged_batch_is_two_transformations() -> None:
    batched = _range(8).map(tf.range).ragged_batch(3)
    assert internals.is_a(batched, internals.BATCH)
    assert internals.is_a(internals.sources(batched)[0], internals.DENSE_TO_RAGGED)


def test_random_numbers_can_be_made_again() -> None:
    tf.random.set_seed(None)  # another test may have set one
    original = tf.data.Dataset.random(seed=4)
    assert internals.is_a(original, internals.RANDOM)
    assert not pipeline.has_no_seed(original)
    assert pipeline.has_no_seed(tf.data.Dataset.random())


def test_files_are_found_and_replaced(tmp_path: Path) -> None:
    cached = _range(3).cache(str(tmp_path / "one"))
    assert pipeline.file_of(cached) == str(tmp_path / "one")
    assert pipeline.file_of(rebuild.with_file(cached, "two")) == "two"
    assert pipeline.file_of(_range(3).cache()) is None
    (stored,) = internals.sources(_range(3).snapshot(str(tmp_path / "one")))
    assert internals.is_a(stored, internals.SNAPSHOT)
    assert pipeline.file_of(stored) == str(tmp_path / "one")
    assert pipeline.file_of(rebuild.with_file(stored, "two")) == "two"


def test_a_cache_is_filled_by_whoever_reads_it_all_and_not_by_asking() -> None:
    cached = _range(5).shuffle(5, seed=1).cache()
    assert not dataset_state.is_filled(cached)
    next(iter(cached))
    assert not dataset_state.is_filled(cached)
    elements = _texts(cached)
    assert dataset_state.is_filled(cached)
    assert _texts(cached) == elements


def test_names_are_those_of_the_methods() -> None:
    assert pipeline.name_of(_range(3).padded_batch(2)) == "padded_batch"
    assert pipeline.name_of(_range(3).filter(lambda i: i > 1)) == "filter"
    assert pipeline.name_of(_range(3).map(_plus, num_parallel_calls=2)) == "map"


def test_the_input_of_rebatch_is_found() -> None:
    batched = _range(3).batch(2)
    assert pipeline.rebatched(batched.rebatch(3)) is batched


def test_elements_go_into_optionals_and_out() -> None:
    element = (tf.ragged.constant([[1], [2, 3]]), {"a": tf.constant(["x"]), "b": None})
    spec = tf.data.Dataset.from_tensors(element).element_spec
    optional = optionals.from_value(element)
    assert bool(optionals.has_value(optional))
    assert not bool(optionals.has_value(optionals.empty()))
    ragged, rest = optionals.get_value(spec, optional)
    assert ragged.to_list() == [[1], [2, 3]]
    assert rest["a"].numpy().tolist() == [b"x"]
    assert rest["b"] is None


def test_a_seed_for_a_while_leaves_no_trace() -> None:
    tf.random.set_seed(3)
    first = tf.random.uniform([2]).numpy().tolist()
    second = tf.random.uniform([2]).numpy().tolist()
    tf.random.set_seed(3)
    assert tf.random.uniform([2]).numpy().tolist() == first
    with internals.seeded(99):
        tf.random.uniform([5])
    assert internals.global_seed() == 3
    assert tf.random.uniform([2]).numpy().tolist() == second
