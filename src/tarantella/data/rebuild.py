"""Rebuilding a transformation of a `tf.data` pipeline with other inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tarantella.data.dataset_state import own_seed_generator, seed_generator
from tarantella.data.padding import Padding
from tarantella.data.pipeline import components, drops_remainder
from tarantella.internals import tensorflow as internals
from tarantella.internals.tensorflow import Replace, argument, is_a, sources


def over(
    dataset: tf.data.Dataset, replace: Replace, traced: list[Any] | None = None
) -> tf.data.Dataset:
    """The same transformation, applied to what `replace` makes of its inputs.

    A shuffle continues the dataset's own sequence of orders: a pass over one of them is a pass over
    both.

    Args:
        dataset: The dataset.
        replace: Makes the new inputs from its own.
        traced: The functions to use in place of its own, if any.
    """
    if is_a(dataset, internals.SHUFFLE):
        (source,) = sources(dataset)
        seeds = (argument(dataset, "seed"), argument(dataset, "seed2"))
        return internals.shuffled_again(replace(source), dataset, seeds, seed_generator(dataset))
    if is_a(dataset, internals.OPTIONS):
        (source,) = sources(dataset)
        return replace(source).with_options(dataset.options())
    functions = internals.functions(dataset) if traced is None else traced
    return internals.made_again(dataset, replace, functions)


def set_apart(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset, not to be fused with the transformation that comes next.

    TensorFlow fuses a `shuffle` and a `repeat` that follow each other into one, which draws other
    numbers. They must not become neighbours where something between them was taken out.
    """
    return dataset.with_options(tf.data.Options())


def with_file(dataset: tf.data.Dataset, name: str) -> tf.data.Dataset:
    """The same transformation of the same inputs, with another file or folder."""
    changes = {"path" if is_a(dataset, internals.SNAPSHOT) else "filename": name}
    functions = internals.functions(dataset)
    return internals.made_again(dataset, lambda source: source, functions, **changes)


def with_components(zipped: tf.data.Dataset, new: list[tf.data.Dataset]) -> tf.data.Dataset:
    """The same `zip` of other datasets."""
    return tf.data.Dataset.zip(tf.nest.pack_sequence_as(components(zipped), new))


def in_component(
    zipped: tf.data.Dataset, index: int, function: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """A function of elements of a `zip` that changes one component with `function`."""
    structure_of_zip = tf.nest.map_structure(lambda _: 0, components(zipped))

    def change(element: Any) -> Any:
        members = internals.members(structure_of_zip, element)
        members[index] = function(members[index])
        return tf.nest.pack_sequence_as(structure_of_zip, members)

    return change


def batched_like(
    tagged: tf.data.Dataset, like: tf.data.Dataset, batch_size: int
) -> tuple[tf.data.Dataset, Padding | None]:
    """Batches of tagged elements made as another dataset makes them, but for their size.

    Where batches are padded to their longest element, the padding says how to finish that.
    """
    drop_remainder = drops_remainder(like)
    if not is_a(like, internals.PADDED_BATCH):
        calls = internals.parallel_calls(like)
        return tagged.batch(batch_size, drop_remainder, num_parallel_calls=calls), None
    padded_shapes, padding_values = (
        argument(like, "padded_shapes"),
        argument(like, "padding_values"),
    )
    shapes = ([3], padded_shapes)
    values = (tf.constant(0, tf.int64), padding_values)
    padding = Padding.of(tf.nest.flatten(padded_shapes), tf.nest.flatten(padding_values))
    return tagged.padded_batch(batch_size, shapes, values, drop_remainder), padding


def shuffled(
    source: tf.data.Dataset, like: tf.data.Dataset, seed: int | None = None
) -> tf.data.Dataset:
    """A shuffle of `source` that is like another one, with orders of its own.

    Its seed is that of the other one, unless one is given.
    """
    seeds = (argument(like, "seed"), argument(like, "seed2")) if seed is None else (0, seed)
    return internals.shuffled_again(source, like, seeds, own_seed_generator(like, seeds))


def random_numbers(like: tf.data.Dataset, seed: int) -> tf.data.Dataset:
    """A dataset of random numbers like another one but for its seed."""
    return tf.data.Dataset.random(
        seed,
        rerandomize_each_iteration=argument(like, "rerandomize"),
        name=argument(like, "name"),
    )
