"""Memory for results that TensorFlow takes over, used again once it has let go of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from tarantella.comm.buckets import Bucket, aligned_zeros


class ResultBuffers:
    """Where the results of a bucket lie.

    Fresh memory for every step would cost a page fault for every 4 kB. TensorFlow takes an array
    over as it is, and keeps it alive as long as any tensor, or a variable that was assigned from
    one, needs it. So each step gets new array objects of old memory: once they are gone, the
    memory is free.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._buffers: list[_Buffer] = []

    def take(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """The memory of the whole bucket, and of each of its members."""
        for buffer in self._buffers:
            if buffer.is_free():
                return buffer.whole, buffer.lend()
        self._buffers.append(_Buffer(self._bucket))
        return self._buffers[-1].whole, self._buffers[-1].lend()

    def load(self, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """What to sum, and where to, both flat; and the members of the result.

        A single array is not copied: what TensorFlow holds does not change as long as we have a
        reference to it. Several are copied to where their sums will be.
        """
        whole, members = self.take()
        if len(arrays) == 1:
            return np.ascontiguousarray(arrays[0]).reshape(-1), members[0].reshape(-1), members
        for member, array in zip(members, arrays, strict=True):
            np.copyto(member, array)
        return whole, whole, members


class _Buffer:
    """The memory of one bucket, and what was last lent of it."""

    def __init__(self, bucket: Bucket) -> None:
        memory = aligned_zeros(bucket.nbytes)
        self.whole = memory.view(bucket.dtype)
        self._members = [
            memory[offset : offset + spec.nbytes].view(spec.dtype).reshape(spec.shape)
            for offset, spec in zip(bucket.offsets, bucket.specs, strict=True)
        ]
        self._lent: list[weakref.ref[np.ndarray]] = []

    def is_free(self) -> bool:
        return all(array() is None for array in self._lent)

    def lend(self) -> list[np.ndarray]:
        """New array objects for the members; while one of them is alive, nothing is free."""
        arrays = [member.view() for member in self._members]
        self._lent = [weakref.ref(array) for array in arrays]
        return arrays
