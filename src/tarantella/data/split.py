"""Each rank's micro-batches of the batches of a dataset, split off where that is cheapest.

Cutting a finished batch is always right, but then every rank has prepared all of it. So a pipeline
is taken apart, and its transformations are put together again after the split: the elements of a
batch are counted off before the `map`s (`split_elements`), and what is done with batches is
done with micro-batches (`split_batches`). Every rank counts all elements, so a micro-batch comes
with its size and that of its batch.
"""

from __future__ import annotations

import tensorflow as tf

from tarantella.data import order, pipeline, rebuild
from tarantella.data.cut import Split, cut
from tarantella.data.split_batches import Splitter
from tarantella.errors import InputError
from tarantella.internals.tensorflow import MissingNameError, tell_once, unwrapped


def split(dataset: tf.data.Dataset, rank: int, size: int) -> Split:
    """The micro-batches of `rank`; the batches come in the same order on all ranks."""
    try:
        own = Splitter(rank, size).of_batches(_with_own_files(dataset, rank, size))
    except MissingNameError as missing:
        own = _cut_as_a_whole(dataset, rank, size, missing)
    in_order = tf.data.Options()
    in_order.deterministic = True
    ordered = own.micro_batches.with_options(dataset.options()).with_options(in_order)
    return Split(ordered, own.padding)


def _cut_as_a_whole(
    dataset: tf.data.Dataset, rank: int, size: int, missing: MissingNameError
) -> Split:
    """The micro-batches of a pipeline that cannot be taken apart with this TensorFlow."""
    consequence = "every rank prepares whole batches of a dataset, and cuts its micro-batch out."
    try:
        own_files = _with_own_files(dataset, rank, size)
        in_order = order.with_common_order(own_files)
        fingerprinted = not order.may_draw(in_order)
    except MissingNameError as error:
        if _writes_files(dataset):
            raise InputError(
                "Tarantella does not know a transformation of this dataset well enough to give "
                f"each rank its own cache file (there is no `{error.private_name}`). Cache in "
                "memory, or leave the file out."
            ) from None
        # With fingerprints, the ranks notice if their batches differ.
        in_order, fingerprinted = dataset, True
        consequence += " Seed every `shuffle`, set `deterministic=True`, and cache in memory."
    tell_once(missing, consequence)
    return cut(in_order, rank, size, fingerprinted)


def _writes_files(dataset: tf.data.Dataset) -> bool:
    """Whether ranks would write the same files, as far as we can tell."""
    try:
        return any(pipeline.file_of(one) for one in pipeline.ancestors(unwrapped(dataset)))
    except MissingNameError:
        return False


def _with_own_files(dataset: tf.data.Dataset, rank: int, size: int) -> tf.data.Dataset:
    """The dataset, with this rank's own file for each that ranks must not write together."""
    dataset = unwrapped(dataset)
    if not any(pipeline.file_of(one) for one in pipeline.ancestors(dataset)):
        return dataset
    changed = rebuild.over(dataset, lambda source: _with_own_files(source, rank, size))
    file = pipeline.file_of(dataset)
    return rebuild.with_file(changed, f"{file}.rank{rank}of{size}") if file else changed
