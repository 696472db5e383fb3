"""What a rank adds to gradients, the state of layers and that of metrics in a step with one sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella.comm.buckets import Bucket, fuse
from tarantella.graph.device_channel import LARGEST_BUCKET_BYTES
from tarantella.graph.engine import channel, compiles_sums, device_hint
from tarantella.graph.packing import Packing, spec_of
from tarantella.keras import gradients, metrics
from tarantella.keras.slots import SENT_AS, Slots
from tarantella.keras.step import DeferredStep


class Contributions:
    """What this rank adds, in the order in which variables are updated.

    Args:
        step: The step that was taken, or traced.
        metric_state: The variables of the metrics whose results are needed.

    Attributes:
        tensors: Gradients, the state of layers, and that of metrics.
        exact: The positions of those that are not gradients, and so are never rounded.
    """

    def __init__(self, step: DeferredStep, metric_state: list[Any]) -> None:
        self.step = step
        self.metric_state = metric_state
        of_gradients, of_layers = step.contributions()
        self.tensors = [*of_gradients, *of_layers, *metrics.contributions(metric_state)]
        self._ends = len(of_gradients), len(of_gradients) + len(of_layers)
        self.exact = set(range(len(of_gradients), len(self.tensors)))

    def apply(self, sums: Sequence[Any], total: tf.Tensor) -> list[tf.Tensor]:
        """Updates variables with the sums over the ranks.

        Args:
            sums: The sums of the tensors.
            total: How many samples the global batch has.

        Returns:
            The sums of the state of metrics.
        """
        gradients_end, layers_end = self._ends
        # In the order of the step: some layers write variables that are trained, too.
        self.step.layer_state.assign(sums[gradients_end:layers_end], total)
        self.step.apply(list(sums[:gradients_end]))
        return list(sums[layers_end:])


class PackedContributions(Contributions):
    """The same, in the form in which a compiled step sums them.

    For TensorFlow's collectives, XLA packs it all into the few flat tensors that they want. Sparse
    gradients are left as they are, unless everything fits into one tensor.

    Args:
        step: The step that was traced.
        metric_state: The variables of the metrics whose results are needed.
        samples: The data of the step.
        most: The most samples that any rank has in the step, if that is known.

    Attributes:
        is_one_sum: Whether it is all packed into one tensor that XLA can sum.
        exact: The positions in the packed contributions of those that are not gradients, unless
            they are packed together.
    """

    def __init__(
        self, step: DeferredStep, metric_state: list[Any], samples: Any, most: tf.Tensor | None
    ) -> None:
        super().__init__(step, metric_state)
        is_dense = [isinstance(tensor, tf.Tensor) for tensor in self.tensors]
        self._dense = [i for i, dense in enumerate(is_dense) if dense]
        self._others = [i for i, dense in enumerate(is_dense) if not dense]  # sparse, or None
        dense = [self.tensors[i] for i in self._dense]
        buckets = _buckets(dense)
        self._packing = Packing(dense, buckets)
        self.exact = {at for at, i in enumerate(self._dense) if i in self.exact}
        self._slots = self._all_slots(samples, most) if _is_summed_by_xla(buckets) else None
        self.is_one_sum = self._slots is not None

    def _all_slots(self, samples: Any, most: tf.Tensor | None) -> dict[int, Slots] | None:
        """The places for the slices of each sparse gradient; None if one has none."""
        found = {}
        dtype = self.tensors[self._dense[0]].dtype
        for i in self._others:
            slices = self.tensors[i]
            if slices is None:
                continue
            # What sparse and ragged samples consist of has no row for each of them.
            rows = [leaf for leaf in tf.nest.flatten(samples) if isinstance(leaf, tf.Tensor)]
            slots = None if most is None else Slots.of(slices, rows)
            if slots is None or slices.values.dtype != dtype:
                return None
            found[i] = slots
        return found

    def packed(self, most: tf.Tensor | None) -> list[Any]:
        """The contributions, of which only those that are not packed are left as they are."""
        dense = self._packing.pack([self.tensors[i] for i in self._dense])
        if self._slots is None:
            return [*dense, *(self.tensors[i] for i in self._others)]
        filled = [slots.filled(self.tensors[i], most) for i, slots in self._slots.items()]
        return [tf.concat([*dense, *filled], 0) if filled else dense[0]]

    def apply_packed(
        self, packed: list[Any], total: tf.Tensor, most: tf.Tensor | None
    ) -> list[tf.Tensor]:
        """Updates variables with the sums of the packed contributions, as `apply` does.

        Args:
            packed: The sums.
            total: How many samples the global batch has.
            most: The most samples that any rank has in it.
        """
        sums = self._unpacked(packed, most)
        return self.apply([sums[i] for i in range(len(sums))], total)

    def _unpacked(self, packed: list[Any], most: tf.Tensor | None) -> dict[int, Any]:
        sums: dict[int, Any] = dict.fromkeys(self._others)
        if self._slots:
            sizes = [slots.size(most) for slots in self._slots.values()]
            dense, *filled = tf.split(packed[0], [self._packing.size, *sizes])
            for (i, slots), part in zip(self._slots.items(), filled, strict=True):
                sums[i] = slots.slices(part)
            packed = [dense]
        elif self._slots is None:
            flat_tensors = len(packed) - len(self._others)
            sums.update(zip(self._others, packed[flat_tensors:], strict=True))
            packed = packed[:flat_tensors]
        sums.update(zip(self._dense, self._packing.unpack(packed), strict=True))
        return sums


def summed(
    own: list[Any], exact: set[int], gradient_type: str, forward_was_noted: bool = False
) -> list[Any]:
    """The sums of contributions over the ranks.

    Args:
        own: The contributions of this rank.
        exact: The positions of those that are not gradients.
        gradient_type: The type in which gradients cross the network.
        forward_was_noted: Whether a timeline has the forward pass already.
    """
    if device_hint() or gradient_type == "float32":
        return gradients.sum_over_ranks(own, channel("gradients"), forward_was_noted)
    of_gradients = [None if i in exact else one for i, one in enumerate(own)]
    sums = gradients.sum_over_ranks(
        of_gradients, channel("gradients", gradient_type), forward_was_noted
    )
    positions = sorted(exact)
    everything = np.iinfo(np.int64).max
    others = channel("gradients").allreduce([own[i] for i in positions], everything)
    for i, total in zip(positions, others, strict=True):
        sums[i] = total
    return sums


def _buckets(tensors: Sequence[tf.Tensor]) -> list[Bucket]:
    threshold = LARGEST_BUCKET_BYTES if device_hint() else 0
    return fuse([spec_of(tensor) for tensor in tensors], threshold)


def _is_summed_by_xla(buckets: Sequence[Bucket]) -> bool:
    """Whether XLA can sum them. The order of several sums would be its own on every rank."""
    return compiles_sums() and len(buckets) == 1 and tf.as_dtype(buckets[0].dtype) in SENT_AS
