"""The global batch size that a micro-batch size asks for."""

from __future__ import annotations

import operator
from typing import Any

import tensorflow as tf

from tarantella.data.batch_size import find_batch_size, may_be_batched
from tarantella.errors import InputError
from tarantella.internals import keras as internals


def in_batches(
    x: Any,
    micro_batch_size: int | None,
    options: dict[str, Any],
    ranks: int,
    argument_prefix: str = "",
) -> tuple[Any, dict[str, Any]]:
    """The data and options with the batch size that follows from a micro-batch size.

    Args:
        x: Data as passed to `fit`.
        micro_batch_size: How many samples of a batch each rank gets; None if not stated.
        options: Arguments for Keras's data adapters, `batch_size` among them.
        ranks: How many ranks share a batch.
        argument_prefix: The prefix of the names of such arguments: "validation_" or "".
    """
    name = f"tnt_{argument_prefix}micro_batch_size"
    batch_size = options.get("batch_size")
    if batch_size is not None:
        _require_size(f"{argument_prefix}batch_size", batch_size)
    if micro_batch_size is None:
        return x, options
    wanted = _require_size(name, micro_batch_size) * ranks
    if isinstance(x, tf.data.Dataset):
        batch_size = find_batch_size(x)
        if batch_size is None and not may_be_batched(x):
            return x.batch(wanted), options
        if batch_size is None:
            raise InputError(
                f"{name} cannot be used with a dataset of batches of unknown size: leave it out, "
                "or make `dataset.batch(batch_size)` the last transformation."
            )
    elif not internals.is_arrays(x):
        raise InputError(
            f"{name} cannot be used with a {type(x).__name__}, which comes in "
            "batches already: leave it out, and make batches of the global size."
        )
    elif batch_size is None:
        return x, {**options, "batch_size": wanted}
    if batch_size != wanted:
        shared = f"{ranks} ranks with" if ranks > 1 else "one rank with"
        raise InputError(
            f"{name}={micro_batch_size} contradicts the batch size {batch_size}: "
            f"{shared} {micro_batch_size} samples each make {wanted}. Leave one of them out, or "
            "make them match."
        )
    return x, options


def _require_size(name: str, value: Any) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        size = 0
    if size < 1 or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; it must be a whole number of samples, 1 or more.")
    return size
