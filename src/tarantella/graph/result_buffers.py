"""Memory for results that TensorFlow takes over, used again once it has let go of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from tarantella.comm.buckets import Bucket, aligned_zeros


class ReusedMemory:
    """Where the results of a bucket lie.

    Fresh memory for every step would cost a page fault for every 4 kB. TensorFlow takes the
    arrays over as they are and holds a reference to each as long as any tensor, or a variable
    that was assigned from one, needs it: the reference counts say what is free.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._blocks: list[tuple[np.ndarray, list[np.ndarray]]] = []

    def take(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """The memory of the whole bucket, and of each of its members."""
        for block in self._blocks:
            if all(sys.getrefcount(view) <= _REFERENCES_WHEN_FREE for view in block[1]):
                return block[0], list(block[1])
        buffer = aligned_zeros(self._bucket.nbytes)
        views = [
            buffer[offset : offset + spec.nbytes].view(spec.dtype).reshape(spec.shape)
            for offset, spec in zip(self._bucket.offsets, self._bucket.specs, strict=True)
        ]
        self._blocks.append((buffer.view(self._bucket.dtype), views))
        return self._blocks[-1][0], list(views)

    def load(self, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """What to sum, and where to, both flat; and the members of the result.

        One array alone is not copied: what TensorFlow holds stays as it is for as long as we have
        a reference to it. Several are copied to where their sums will be.
        """
        whole, views = self.take()
        if len(arrays) == 1:
            return np.ascontiguousarray(arrays[0]).reshape(-1), views[0].reshape(-1), views
        for view, array in zip(views, arrays, strict=True):
            np.copyto(view, array)
        return whole, whole, views


# The list of views, the loop's variable, and the argument of getrefcount itself.
_REFERENCES_WHEN_FREE = 3
