"""Which tensors travel together in one message, and where they lie in its buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

# TensorFlow takes over an array without a copy only if it is aligned to this many bytes.
ALIGNMENT = 64


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor to be reduced."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @cached_property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @cached_property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype, by their positions in the list of all, that share a message."""

    members: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, members: Sequence[int], specs: Sequence[TensorSpec]) -> Bucket:
        offsets = []
        end = 0
        for spec in specs:
            offsets.append(end)
            end += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(members), tuple(specs), tuple(offsets), end)

    @property
    def dtype(self) -> np.dtype:
        return self.specs[0].dtype


def fuse(specs: Sequence[TensorSpec], threshold: int) -> list[Bucket]:
    """Groups tensors into messages, in an order that follows that of the tensors.

    A tensor of `threshold` bytes or more goes alone, and so is not copied. Smaller ones of one
    dtype are collected until together they reach the threshold. A bucket comes where its last
    member would, which is when all of it is ready. With `threshold` 0 every tensor goes alone.
    """
    buckets: list[Bucket] = []
    open_members: dict[np.dtype, list[int]] = {}
    open_bytes: dict[np.dtype, int] = {}
    for position, spec in enumerate(specs):
        if spec.nbytes >= threshold:
            buckets.append(Bucket.of([position], [spec]))
            continue
        members = open_members.setdefault(spec.dtype, [])
        members.append(position)
        open_bytes[spec.dtype] = open_bytes.get(spec.dtype, 0) + spec.nbytes
        if open_bytes[spec.dtype] >= threshold:
            buckets.append(Bucket.of(members, [specs[member] for member in members]))
            del open_members[spec.dtype], open_bytes[spec.dtype]
    for members in open_members.values():
        buckets.append(Bucket.of(members, [specs[member] for member in members]))
    return buckets


def aligned_zeros(nbytes: int) -> np.ndarray:
    """Zeroed bytes whose address TensorFlow can use as it is."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]
