"""Sums of gradients over the ranks, while the rest of the gradients is being computed.

Each bucket is handed in by an operation of its own, as soon as its members are there. Another
operation waits for the sums, of several buckets at once. All ranks hand in and wait in the same
order: control dependencies make it part of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella.comm.background_allreduce import Flow, Message, flow
from tarantella.comm.buckets import Bucket, fuse
from tarantella.graph.channel import Channel, from_wide, specs_of, to_wide
from tarantella.graph.result_buffers import ReusedMemory

# Sums are handed on to TensorFlow when there are at least as many bytes of them, so that
# variables are updated with the first ones while others are on their way.
_HANDED_ON_BYTES = 4 << 20


class OverlappedChannel(Channel):
    """A channel whose sums go on in the background.

    Args:
        purpose: One of `world.PURPOSES`, for sums.
        sparse_purpose: Another, for what is not summed.
    """

    def __init__(self, purpose: str, sparse_purpose: str) -> None:
        super().__init__(sparse_purpose)
        self._purpose = purpose
        self._flow = flow(purpose)

    def allreduce(self, tensors: Sequence[tf.Tensor], threshold: int) -> list[tf.Tensor]:
        wide = to_wide(tensors)
        sums: list[Any] = [None] * len(wide)
        for group in _groups(fuse(specs_of(wide), threshold)):
            travels = [_Travel(bucket, self._flow, self._lane(bucket)) for bucket in group]
            for travel in travels:
                self._send(travel, [wide[member] for member in travel.bucket.members])
            members = [member for bucket in group for member in bucket.members]
            results = self._receive(travels, [wide[member].dtype for member in members])
            for member, result in zip(members, results, strict=True):
                result.set_shape(wide[member].shape)
                sums[member] = result
        return from_wide(sums, tensors)

    def _send(self, travel: _Travel, tensors: list[tf.Tensor]) -> None:
        with tf.control_dependencies(self._last("send")):
            self._keep_last("send", self._call(travel.send, tensors, [tf.bool]))

    def _receive(self, travels: list[_Travel], dtypes: list[tf.DType]) -> list[tf.Tensor]:
        def receive() -> list[np.ndarray]:
            return [array for travel in travels for array in travel.receive()]

        with tf.control_dependencies([*self._last("send"), *self._last("receive")]):
            results = self._call(receive, [], dtypes)
        self._keep_last("receive", results)
        return results


class _Travel:
    """A bucket on its way: in each step once."""

    def __init__(self, bucket: Bucket, through: Flow, name: str) -> None:
        self.bucket = bucket
        self._name = name
        self._flow = through
        self._memory = ReusedMemory(bucket)
        self._sent: tuple[Message, list[np.ndarray]] | None = None

    def send(self, *arrays: np.ndarray) -> bool:
        if self._sent is not None:
            raise RuntimeError("A step before this one has failed, and its gradients are not back.")
        source, target, views = self._memory.load(arrays)
        message = Message(source, target, self._name)
        self._sent = message, views
        self._flow.send(message)
        return True

    def receive(self) -> list[np.ndarray]:
        assert self._sent is not None
        (message, views), self._sent = self._sent, None
        self._flow.wait(message)
        return views


def _groups(buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """Buckets whose sums are handed on together."""
    groups: list[list[Bucket]] = []
    size = _HANDED_ON_BYTES
    for bucket in buckets:
        if size >= _HANDED_ON_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(bucket)
        size += bucket.nbytes
    return groups
