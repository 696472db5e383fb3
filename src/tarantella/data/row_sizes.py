"""Sizes that a function computes from the shapes of its tensors: some count the batch's rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tarantella.data.row_kinds import (
    Kind,
    PerRow,
    Same,
    Size,
    Sizes,
    entries_of,
    factor_of,
    is_same,
    shape_of,
)


def sizes(op: tf.Operation, kinds: Sequence[Kind]) -> list[Kind] | None:
    """The kinds of the results, where a shape is read, taken apart or put together."""
    shapes = [shape_of(tensor, kind) for tensor, kind in zip(op.inputs, kinds, strict=True)]
    if op.type in ("Shape", "ShapeN") and None not in shapes:
        return [Sizes(shape) for shape in shapes if shape is not None]
    if op.type == "Size" and shapes[0] is not None:
        return _product(shapes[0])
    if op.type == "Rank" and isinstance(kinds[0], PerRow):
        return [Same()]
    if not any(isinstance(kind, Sizes) for kind in kinds) or not op.outputs:
        return None
    inputs = [entries_of(tensor, kind) for tensor, kind in zip(op.inputs, kinds, strict=True)]
    if inputs[0] is None or op.outputs[0].shape.rank not in (0, 1):
        return None
    if op.type == "Cast" and op.outputs[0].dtype in (tf.int32, tf.int64, tf.uint64):
        return [Sizes(inputs[0])]
    if op.type in ("ExpandDims", "Reshape", "Squeeze") and all(map(is_same, kinds[1:])):
        return [Sizes(inputs[0])]
    if op.type == "Unpack":
        return [Sizes((size,)) for size in inputs[0]]
    if op.type in ("Pack", "ConcatV2"):
        vectors = inputs if op.type == "Pack" else inputs[:-1]
        known = [vector for vector in vectors if vector is not None]
        return [Sizes(sum(known, ()))] if len(known) == len(vectors) else None
    if op.type == "Prod" and op.outputs[0].shape.rank == 0:
        return _product(inputs[0])
    if op.type == "Mul" and op.outputs[0].shape.rank == 0 and inputs[1] is not None:
        return _product(inputs[0] + inputs[1])
    picked = _picked(op, len(inputs[0]))
    return None if picked is None else [Sizes(tuple(inputs[0][index] for index in picked))]


def _product(sizes: Sequence[Size]) -> list[Kind] | None:
    counts = [size.counts for size in sizes]
    return [Sizes((Size(factor_of(sizes), any(counts)),))] if sum(counts) < 2 else None


def _picked(op: tf.Operation, length: int) -> list[int] | None:
    """Which entries of a vector are taken."""
    arguments = [tf.get_static_value(tensor) for tensor in op.inputs[1:]]
    if any(argument is None for argument in arguments):
        return None
    if op.type == "GatherV2":
        indices = [int(index) for index in np.ravel(arguments[0])]
        return indices if all(0 <= index < length for index in indices) else None
    if op.type != "StridedSlice" or any(len(argument) != 1 for argument in arguments):
        return None
    if op.get_attr("new_axis_mask") or op.get_attr("ellipsis_mask"):
        return None
    begin, end, stride = (int(argument[0]) for argument in arguments)
    if op.get_attr("shrink_axis_mask"):
        return [begin]
    first = None if op.get_attr("begin_mask") else begin
    last = None if op.get_attr("end_mask") else end
    return list(range(length)[first:last:stride])
