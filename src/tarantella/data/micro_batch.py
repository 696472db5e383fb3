"""From a global batch to this rank's micro-batch.

Micro-batches are contiguous, follow each other in the order of the ranks, and differ in size by at
most one sample. Joined together, they are the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tarantella.errors import InputError

NOT_BATCHED = (
    "The dataset is not batched. Batch it with the global batch size, "
    "`dataset = dataset.batch(batch_size)`, or pass `tnt_micro_batch_size`."
)
_SLICED = (tf.Tensor, tf.RaggedTensor)
_LARGEST_FINGERPRINT = 2**31 - 1  # a dimension of a tensor can be as large (`on_device`)
# What to do with batches that cannot be cut by their first axis.
OTHER_AXIS = (
    "Each rank gets some of the samples of a batch, which lie along the first axis of its tensors. "
    "If they lie along another axis, pass `tnt_distribute_dataset=False`: every rank then brings "
    "its own batches."
)
_DIFFERENT_SIZES = f"The tensors of a batch have different numbers of samples. {OTHER_AXIS}"


class MicroBatch(NamedTuple):
    """What one rank works on in one step.

    A rank that gets no sample of a batch (there are fewer samples than ranks) is given the batch's
    last sample to compute on, so that no layer ever sees an empty tensor. It does not count.

    Attributes:
        count: How many samples of the global batch are this rank's; can be 0.
        total: How many samples the global batch has.
        data: The samples, in the structure of the dataset's elements; at least one.
        fingerprint: A number that differs between batches with different samples, or nothing.
    """

    count: Any
    total: Any
    data: Any
    fingerprint: Any = ()


def fingerprint_of(one: MicroBatch) -> tf.Tensor:
    """The fingerprint of a micro-batch, 0 if it has none."""
    has_fingerprint = isinstance(one.fingerprint, tf.Tensor)
    return one.fingerprint if has_fingerprint else tf.constant(0, tf.int64)


def most_samples(one: MicroBatch, size: int) -> tf.Tensor | None:
    """The most samples that any of `size` ranks has in a step; None if their data are their own.

    Only batches that the ranks share have fingerprints.
    """
    if not isinstance(one.fingerprint, tf.Tensor):
        return None
    return tf.cast(tf.maximum(-(-one.total // size), 1), tf.int32)


def bounds(total: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Where the micro-batch of `rank` begins in a batch of `total` samples, and its size."""
    share, remainder = total // size, total % size
    if isinstance(total, int):
        return rank * share + min(rank, remainder), share + int(rank < remainder)
    earlier = tf.minimum(tf.constant(rank, total.dtype), remainder)
    return rank * share + earlier, share + tf.cast(rank < remainder, total.dtype)


def cut(batch: Any, rank: int, size: int) -> MicroBatch:
    """The micro-batch of `rank` in a global batch of dense, ragged or sparse tensors."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if _is_batched(leaf)]
    if not leaves:
        raise InputError(NOT_BATCHED)
    known_totals = {leaf.shape[0] for leaf in leaves} - {None}
    if len(known_totals) > 1:
        raise InputError(
            "The tensors of a batch have different numbers of samples: "
            f"{sorted(known_totals)}. {OTHER_AXIS}"
        )
    static_total = leaves[0].shape[0]
    if static_total is None:
        total = common_total([row_count(leaf) for leaf in leaves])
    else:
        total = static_total
    begin, count = bounds(total, rank, size)
    if static_total is None:
        rows = tf.maximum(count, 1)
        begin = tf.minimum(begin, tf.maximum(total - 1, 0))
    else:
        rows = max(count, 1)
        begin = min(begin, max(total - 1, 0))
    data = tf.nest.map_structure(
        lambda leaf: slice_rows(leaf, begin, rows) if _is_batched(leaf) else leaf, batch
    )
    return MicroBatch(tf.cast(count, tf.int64), tf.cast(total, tf.int64), data)


def common_total(totals: Sequence[tf.Tensor]) -> tf.Tensor:
    """The number of samples that all tensors of a batch have; an error if they differ."""
    total = totals[0]
    if len(totals) == 1:
        return total
    # tf.debugging.assert_equal would be a dozen operations, and slow to start.
    alike = tf.reduce_all([tf.equal(one, total) for one in totals[1:]])
    with tf.control_dependencies([tf.raw_ops.Assert(condition=alike, data=[_DIFFERENT_SIZES])]):
        return tf.identity(total)


def fingerprint_of_first_sample(batch: Any) -> tf.Tensor:
    """A number that differs between batches that begin with different samples."""
    return fingerprint(
        [
            leaf[:1]
            for leaf in tf.nest.flatten(batch)
            if isinstance(leaf, _SLICED) and _rank(leaf) != 0
        ]
    )


def fingerprint(samples: Any) -> tf.Tensor:
    """A number that differs between different samples."""
    number = tf.constant(0, tf.int64)
    for leaf in tf.nest.flatten(samples):
        if isinstance(leaf, tf.RaggedTensor):
            leaf = leaf.flat_values
        if isinstance(leaf, tf.Tensor) and leaf.dtype not in (tf.variant, tf.resource):
            hashed = tf.fingerprint(tf.reshape(leaf, [1, -1]))
            number = tf.bitwise.bitwise_xor(number, tf.bitcast(hashed, tf.int64)[0])
    return tf.bitwise.bitwise_and(number, _LARGEST_FINGERPRINT)


def is_batched(spec: Any) -> bool:
    """Whether all tensors of an element are known to have a first dimension."""
    return all(_rank(leaf) not in (None, 0) for leaf in tf.nest.flatten(spec))


def cannot_be_batch(spec: Any) -> bool:
    """Whether the tensors of an element show that it is a single sample."""
    leaves = [leaf for leaf in tf.nest.flatten(spec) if _rank(leaf) is not None]
    rows = {leaf.shape[0] for leaf in leaves if _rank(leaf)} - {None}
    return len(rows) > 1 or any(_rank(leaf) == 0 for leaf in leaves)


def _rank(leaf: Any) -> int | None:
    rank: int | None = getattr(leaf, "shape", tf.TensorShape(None)).rank
    return rank


def _is_batched(leaf: Any) -> bool:
    return isinstance(leaf, (*_SLICED, tf.SparseTensor)) and _rank(leaf) != 0


def row_count(leaf: Any) -> tf.Tensor:
    """The number of rows of a dense, ragged or sparse tensor."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, out_type=tf.int64)[0]


def slice_rows(leaf: Any, begin: Any, rows: Any) -> Any:
    """The given number of rows of a dense, ragged or sparse tensor, from `begin` on."""
    if isinstance(leaf, tf.SparseTensor):
        start = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros_like(leaf.dense_shape[1:])], 0)
        extent = tf.concat([[tf.cast(rows, tf.int64)], leaf.dense_shape[1:]], 0)
        return tf.sparse.slice(leaf, start, extent)
    return leaf[begin : begin + rows]
