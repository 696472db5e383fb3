"""Sums over the ranks as operations of a TensorFlow graph: what all engines have in common.

An engine of sums is a subclass of `Channel` in a file of its own; `engine` chooses one. It says how
buckets of tensors are summed, and how the slices of all ranks are put together. Here tensors are
cast to types that can be added, fused into buckets, and cast back; and operations are put in order.

Each purpose has a communicator of its own, on which every rank issues the same collectives in the
same order: control dependencies make that order part of the graph. Purposes are independent of
each other, so a small exchange never waits behind a large one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tarantella.comm.buckets import Bucket, fuse
from tarantella.comm.fusion import best_threshold
from tarantella.graph.packing import spec_of
from tarantella.runtime import world


class Channel(ABC):
    """The collectives of one purpose in one graph, in one fixed order.

    Args:
        purpose: One of `world.PURPOSES`.

    Attributes:
        ADDED_AS: The types in which values of other types are added. A sum of booleans is true if
            one of them is.
    """

    ADDED_AS: ClassVar[dict[tf.DType, tf.DType]] = {tf.bool: tf.int32}

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose

    def allreduce(self, tensors: Sequence[tf.Tensor], threshold: int | None) -> list[tf.Tensor]:
        """The sums over all ranks of tensors whose static shapes are known.

        Args:
            tensors: In the order in which they become ready, the same on all ranks.
            threshold: Tensors of fewer bytes are fused into messages of at least that many; None:
                of as many as cost least.
        """
        wide = [self._as_sent(tensor) for tensor in tensors]
        sums: list[Any] = [None] * len(wide)
        specs = [spec_of(tensor) for tensor in wide]
        if threshold is None:
            threshold = best_threshold(tuple(specs), world.get_host_count())
        buckets = fuse(specs, threshold)
        for member, result in self._sums(wide, buckets).items():
            result.set_shape(wide[member].shape)
            sums[member] = tf.cast(result, tensors[member].dtype)
        return sums

    @abstractmethod
    def allreduce_with_slices(
        self,
        tensors: Sequence[tf.Tensor],
        slices: Sequence[tf.IndexedSlices],
        threshold: int | None,
    ) -> tuple[list[tf.Tensor], list[tf.IndexedSlices]]:
        """The sums of tensors as in `allreduce`, and the slices of all ranks.

        For each of `slices`, they come one after the other, in the order of the ranks. Each rank
        may have a different number of them.
        """

    @abstractmethod
    def _sums(self, tensors: list[tf.Tensor], buckets: list[Bucket]) -> dict[int, tf.Tensor]:
        """The sums of tensors over all ranks, by their positions in `tensors`.

        Args:
            tensors: Of types that are not in `ADDED_AS`.
            buckets: Which of them share a message, in the order of the messages.
        """

    def _as_sent(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.cast(tensor, self.ADDED_AS.get(tensor.dtype, tensor.dtype))

    def _last(self, kind: str) -> list[tf.Tensor]:
        """The results of the last operation of a kind for this purpose, in the graph being made."""
        known = getattr(tf.compat.v1.get_default_graph(), "_tnt_last", {})
        return [] if tf.executing_eagerly() else known.get((self._purpose, kind), [])

    def _keep_last(self, kind: str, results: list[tf.Tensor]) -> None:
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            graph._tnt_last = getattr(graph, "_tnt_last", {}) | {(self._purpose, kind): results[:1]}
