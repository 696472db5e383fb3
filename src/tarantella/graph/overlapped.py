"""Sums of gradients over the ranks, while the rest of the gradients is being computed.

Each bucket is sent by an operation of its own, as soon as its members are ready. Another operation
waits for the sums, of several buckets at once. All ranks send and wait in the same order: control
dependencies make it part of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tarantella.comm.background_allreduce import (
    BackgroundAllreduce,
    Message,
    background_allreduce,
)
from tarantella.comm.buckets import Bucket
from tarantella.graph.host_channel import HostChannel
from tarantella.graph.result_buffers import ResultBuffers
from tarantella.runtime import world

# Sums are passed to TensorFlow when there are at least this many bytes of them, so that variables
# are updated with the first ones while others are on their way.
_HANDED_ON_BYTES = 4 << 20


class OverlappedChannel(HostChannel):
    """A channel that sums in the background.

    Args:
        purpose: One of `world.PURPOSES`, for sums.
        sparse_purpose: Another, for what is not summed.
        sent_as: The type of 16 bits in which arrays of floating-point numbers are sent; None:
            their own type.
    """

    def __init__(self, purpose: str, sparse_purpose: str, sent_as: tf.DType | None = None) -> None:
        super().__init__(sparse_purpose)
        self._purpose = purpose
        self._sent_as = sent_as
        self._background = background_allreduce(world.communicator(purpose))

    def _sums(self, tensors: list[tf.Tensor], buckets: list[Bucket]) -> dict[int, tf.Tensor]:
        sums: dict[int, tf.Tensor] = {}
        for group in _groups(buckets):
            sent = [
                BucketInFlight(bucket, self._background, self._lane([bucket])) for bucket in group
            ]
            for each in sent:
                self._send(each, [tensors[member] for member in each.bucket.members])
            members = [member for bucket in group for member in bucket.members]
            results = self._receive(sent, [tensors[member].dtype for member in members])
            sums.update(zip(members, results, strict=True))
        return sums

    def _as_sent(self, tensor: tf.Tensor) -> tf.Tensor:
        # Scalars are not worth it, and TensorFlow makes no array of one in bfloat16.
        if self._sent_as is None or not tensor.dtype.is_floating or tensor.shape.rank == 0:
            return super()._as_sent(tensor)
        return tf.cast(tensor, self._sent_as)

    def _send(self, bucket: BucketInFlight, tensors: list[tf.Tensor]) -> None:
        with tf.control_dependencies(self._last("send")):
            self._keep_last("send", self._call(bucket.send, tensors, [tf.bool]))

    def _receive(self, buckets: list[BucketInFlight], dtypes: list[tf.DType]) -> list[tf.Tensor]:
        def receive() -> list[np.ndarray]:
            return [array for bucket in buckets for array in bucket.receive()]

        with tf.control_dependencies([*self._last("send"), *self._last("receive")]):
            results = self._call(receive, [], dtypes)
        self._keep_last("receive", results)
        return results


class BucketInFlight:
    """A bucket on its way: once in each step.

    Args:
        bucket: The bucket.
        background: What sums it.
        lane: Where it is in a timeline.
    """

    def __init__(self, bucket: Bucket, background: BackgroundAllreduce, lane: str) -> None:
        self.bucket = bucket
        self._lane = lane
        self._background = background
        self._buffers = ResultBuffers(bucket)
        self._sent: tuple[Message, list[np.ndarray]] | None = None

    def send(self, *arrays: np.ndarray) -> bool:
        if self._sent is not None:
            raise RuntimeError("An earlier step has failed, and its gradients have not arrived.")
        source, target, members = self._buffers.load(arrays)
        message = Message(source, target, self._lane)
        self._sent = message, members
        self._background.send(message)
        return True

    def receive(self) -> list[np.ndarray]:
        assert self._sent is not None
        (message, members), self._sent = self._sent, None
        self._background.wait(message)
        return members


def _groups(buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """Buckets whose sums are passed on together."""
    groups: list[list[Bucket]] = []
    size = _HANDED_ON_BYTES
    for bucket in buckets:
        if size >= _HANDED_ON_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(bucket)
        size += bucket.nbytes
    return groups
