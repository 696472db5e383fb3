"""How the values of a tensor relate in two runs of a function: on a batch and on some rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf


@dataclass(frozen=True)
class Same:
    """The same value in both runs; of a captured variable or table, which one it is."""

    resource: str = ""


@dataclass(frozen=True)
class Drawn:
    """From a state that the function itself advances, such as the seed of a Keras layer."""


@dataclass(frozen=True)
class PerRow:
    """The second run has those entries of the first dimension that belong to its rows.

    Each row has `each` consecutive entries of that dimension; None is a number that we do not know,
    the same in both runs. The other dimensions are the same in both runs.
    """

    each: int | None = 1


@dataclass(frozen=True)
class Size:
    """`factor`, times the number of rows if it `counts` them; a factor of None is unknown."""

    factor: int | None
    counts: bool = False


@dataclass(frozen=True)
class Sizes:
    """The entries of a shape, or of one number in it."""

    entries: tuple[Size, ...]


@dataclass(frozen=True)
class Mixed:
    """Anything else; `reason` is the operation that made it so."""

    reason: str


Kind = Same | Drawn | PerRow | Sizes | Mixed


def is_same(kind: Kind) -> bool:
    if isinstance(kind, Sizes):
        return not any(size.counts for size in kind.entries)
    return isinstance(kind, Same)


def is_fixed(kind: Kind) -> bool:
    return is_same(kind) or kind == Drawn()


def aligned(kinds: Sequence[Kind]) -> Kind | None:
    """The kind of several tensors with rows that are of one kind."""
    one = kinds[0]
    alike = all(kind == one for kind in kinds) and isinstance(one, PerRow)
    unsure = len(kinds) > 1 and one == PerRow(None)
    return one if alike and not unsure else None


def entries_of(tensor: tf.Tensor, kind: Kind) -> tuple[Size, ...] | None:
    """What is known of the numbers in a scalar or vector."""
    if isinstance(kind, Sizes):
        return kind.entries
    if not isinstance(kind, Same) or tensor.shape.rank not in (0, 1):
        return None
    if not tensor.dtype.is_integer:
        return None
    value = tf.get_static_value(tensor)
    if value is not None:
        return tuple(Size(int(number)) for number in np.ravel(value))
    count = tensor.shape.num_elements()
    return None if count is None else (Size(None),) * count


def shape_of(tensor: tf.Tensor, kind: Kind) -> tuple[Size, ...] | None:
    if not isinstance(kind, PerRow):
        return None
    return (Size(kind.each, True), *(Size(length) for length in tensor.shape[1:]))


def factor_of(sizes: Sequence[Size]) -> int | None:
    factors = [size.factor for size in sizes if size.factor is not None]
    return math.prod(factors) if len(factors) == len(sizes) else None
