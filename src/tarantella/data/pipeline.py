"""Reading a `tf.data` pipeline: which transformations it is made of, and with which arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tarantella.internals import tensorflow as internals
from tarantella.internals.tensorflow import argument, is_a, sources, unwrapped


def ancestors(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """The dataset and all that it is made of."""
    yield dataset
    for source in sources(dataset):
        yield from ancestors(source)


def name_of(dataset: tf.data.Dataset) -> str:
    """What users call a transformation: `filter`, `padded_batch`."""
    words = type(unwrapped(dataset)).__name__.strip("_").removesuffix("Dataset").removesuffix("V2")
    snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in words).strip("_")
    return snake.removeprefix("parallel_")


def components(zipped: tf.data.Dataset) -> Any:
    """The structure of datasets that a `zip` was given."""
    return argument(zipped, "datasets")


def rebatched(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset that a `rebatch` was applied to, which it has made dense first."""
    (dense,) = sources(dataset)
    (mapped,) = sources(dense)
    (source,) = sources(mapped)
    return source


def selector(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """The dataset that says which of several others is next, as in `sample_from_datasets`."""
    if not is_a(dataset, internals.DIRECTED_INTERLEAVE):
        return None
    return unwrapped(argument(dataset, "selector_input"))


def constant(tensor: Any) -> Any:
    """The value of an argument of a transformation that was given as a number."""
    return tf.get_static_value(tensor)


def batch_size(batched: tf.data.Dataset) -> int | None:
    """The size of the batches of a `batch` or `padded_batch`, if it was given as a number."""
    size = constant(argument(batched, "batch_size"))
    return None if size is None else int(size)


def drops_remainder(batched: tf.data.Dataset) -> bool:
    """Whether a last batch that is not full is left out."""
    return bool(constant(argument(batched, "drop_remainder")))


def reshuffles(shuffle: tf.data.Dataset) -> bool:
    """Whether each pass has an order of its own."""
    # It is None where that was not stated.
    return argument(shuffle, "reshuffle_each_iteration") is not False


def has_no_seed(dataset: tf.data.Dataset) -> bool:
    """Whether a `shuffle` or `random` was given no seed."""
    return int(argument(dataset, "seed")) == 0 and int(argument(dataset, "seed2")) == 0


def file_of(dataset: tf.data.Dataset) -> str | None:
    """The file or folder that a transformation writes to, if it does."""
    if is_a(dataset, internals.CACHE):
        return constant(argument(dataset, "filename")).decode() or None
    if is_a(dataset, internals.SNAPSHOT):
        path = tf.convert_to_tensor(argument(dataset, "path"))
        return str(tf.compat.as_text(constant(path)))
    return None


def first(dataset: tf.data.Dataset) -> Any:
    """The first element of a dataset that has one."""
    return dataset.take(1).get_single_element()


def as_one(element: tuple[Any, ...], spec: Any) -> Any:
    """The element that `map` has passed to a function as its arguments."""
    return element if type(spec) is tuple else element[0]
