"""Few flat tensors in place of many: NCCL is fast with few, large messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tarantella.comm.buckets import Bucket, TensorSpec


class Packing:
    """How tensors are packed into flat ones, one for each bucket.

    It can be made in one function of TensorFlow and used in others.

    Args:
        tensors: The tensors, or others of the same shapes.
        buckets: Which of them go together.
    """

    def __init__(self, tensors: Sequence[tf.Tensor], buckets: Sequence[Bucket]) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._buckets = buckets

    @property
    def size(self) -> int:
        """How many values there are."""
        return sum(spec.size for bucket in self._buckets for spec in bucket.specs)

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors, one after the other in flat ones."""
        flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
        return [_joined([flat[i] for i in bucket.members]) for bucket in self._buckets]

    def unpack(self, packed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors in their own shapes again."""
        tensors: list[tf.Tensor] = [None] * len(self._shapes)
        for bucket, flat in zip(self._buckets, packed, strict=True):
            for i, piece in zip(bucket.members, _split(flat, bucket), strict=True):
                tensors[i] = tf.reshape(piece, self._shapes[i])
        return tensors


def spec_of(tensor: tf.Tensor) -> TensorSpec:
    """Shape and dtype of a tensor."""
    return TensorSpec(tuple(tensor.shape), np.dtype(tensor.dtype.as_numpy_dtype))


def _joined(tensors: list[tf.Tensor]) -> tf.Tensor:
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0)


def _split(flat: tf.Tensor, bucket: Bucket) -> Sequence[tf.Tensor]:
    sizes = [spec.size for spec in bucket.specs]
    return [flat] if len(sizes) == 1 else tf.split(flat, sizes)
