"""Which tensors share a message."""

from __future__ import annotations

import numpy as np
import pytest

from tarantella.comm.buckets import ALIGNMENT, TensorSpec, aligned_zeros, fuse

FLOAT = np.dtype(np.float32)


def _specs(*sizes: int, dtype: np.dtype = FLOAT) -> list[TensorSpec]:
    return [TensorSpec((size,), dtype) for size in sizes]


def _members(*sizes: int, threshold: int) -> list[tuple[int, ...]]:
    return [bucket.members for bucket in fuse(_specs(*sizes), threshold)]


def test_a_large_tensor_goes_alone_and_small_ones_together() -> None:
    assert _members(1, 1, 1000, 1, threshold=1024) == [(2,), (0, 1, 3)]


def test_a_bucket_is_sent_when_it_has_reached_the_threshold() -> None:
    assert _members(200, 100, 3, 1, threshold=1024) == [(0, 1), (2, 3)]


def test_without_a_threshold_nothing_is_fused() -> None:
    assert _members(1, 2, 3, threshold=0) == [(0,), (1,), (2,)]


def test_dtypes_are_not_mixed() -> None:
    specs = [*_specs(1), *_specs(1, dtype=np.dtype(np.float64)), *_specs(1)]
    assert [bucket.members for bucket in fuse(specs, 1024)] == [(0, 2), (1,)]


@pytest.mark.parametrize("threshold", [0, 1, 64, 4096, 2**40])
def test_every_tensor_has_one_place(threshold: int) -> None:
    specs = _specs(*np.random.default_rng(0).integers(0, 2000, size=50))
    buckets = fuse(specs, threshold)
    assert sorted(m for bucket in buckets for m in bucket.members) == list(range(50))
    for bucket in buckets:
        ends = [
            offset + spec.nbytes for offset, spec in zip(bucket.offsets, bucket.specs, strict=True)
        ]
        assert all(offset % ALIGNMENT == 0 for offset in bucket.offsets)
        assert all(end <= start for end, start in zip(ends, bucket.offsets[1:], strict=False))
        assert ends[-1] <= bucket.nbytes


@pytest.mark.parametrize("nbytes", [1, 64, 1000])
def test_memory_is_aligned(nbytes: int) -> None:
    memory = aligned_zeros(nbytes)
    assert memory.nbytes == nbytes
    assert memory.ctypes.data % ALIGNMENT == 0
    assert not memory.any()
