"""Whether the elements of a dataset are batches, and of what size."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tarantella.data import micro_batch, pipeline
from tarantella.data.split_batches import TREATS_ALIKE
from tarantella.internals import tensorflow as internals
from tarantella.internals.tensorflow import MissingNameError, argument, is_a, sources, unwrapped


def find_batch_size(dataset: tf.data.Dataset) -> int | None:
    """The size of the batches of a dataset, if a `batch` of some form says so."""
    try:
        return _stated_batch_size(dataset)
    except MissingNameError:
        return None


def is_unbatched(dataset: tf.data.Dataset) -> bool:
    """Whether the elements of a dataset are single samples, as far as their shapes tell."""
    try:
        batch_size = _stated_batch_size(dataset)
    except MissingNameError:
        return False
    return batch_size is None and micro_batch.cannot_be_batch(dataset.element_spec)


def may_be_batched(dataset: tf.data.Dataset) -> bool:
    """Whether a transformation makes batches, and no later one takes them apart again.

    True also if we cannot tell.
    """
    try:
        name = pipeline.name_of(dataset)
        if name in ("flat_map", "interleave", "unbatch"):
            return False
        makes_batches = name.endswith(("batch", "group_by_window"))
        return makes_batches or any(map(may_be_batched, sources(dataset)))
    except MissingNameError:
        return True


def _stated_batch_size(dataset: tf.data.Dataset) -> int | None:
    dataset = unwrapped(dataset)
    if is_a(dataset, internals.BATCH, internals.PADDED_BATCH):
        return pipeline.batch_size(dataset)
    if is_a(dataset, internals.REBATCH):
        sizes = set(np.ravel(pipeline.constant(argument(dataset, "batch_sizes"))).tolist())
        return sizes.pop() if len(sizes) == 1 else None
    if is_a(dataset, *TREATS_ALIKE, internals.MAP, internals.ZIP, internals.CONCATENATE):
        return next(filter(None, map(_stated_batch_size, sources(dataset))), None)
    return None
