"""A training step of Keras, compiled by XLA except for what communicates.

Forward and backward pass become one compiled function, the update another. Between them, gradients,
the state of layers and that of metrics are summed over the ranks, together. A step that needs a sum
in the middle, as masked losses do, cannot be compiled so. Then calls of the model are compiled
alone (`compiled_call`), as in a user's own `train_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella.comm.buckets import fuse
from tarantella.data.micro_batch import MicroBatch
from tarantella.graph.compiling import compilable, compiling
from tarantella.graph.device_channel import LARGEST_BUCKET_BYTES
from tarantella.graph.engine import channel, device_hint
from tarantella.graph.packing import Packing, spec_of
from tarantella.keras import gradients, metrics
from tarantella.keras.step import DeferredStep
from tarantella.keras.step_share import StepShare


@dataclass(frozen=True)
class CompiledStep:
    """A step that was taken.

    Attributes:
        step: The step.
        results: The results of metrics over all ranks, if they were needed.
    """

    step: DeferredStep
    results: Any


@dataclass(frozen=True)
class RefusedStep:
    """A step that cannot be compiled.

    Attributes:
        written: The variables that layers wrote until then. Functions of the user that were traced
            will not be traced again, so that nobody else sees them write.
    """

    written: list[Any]


def take(
    model: Any,
    data: MicroBatch,
    train_step: Callable[[Any], Any],
    results: Callable[[], Any] | None,
) -> CompiledStep | RefusedStep:
    """Takes a step that Keras defines.

    Args:
        model: The model.
        data: The data.
        train_step: A function of the samples; what it returns is ignored.
        results: Returns the results of the model's metrics, if those of all ranks are needed.

    Returns:
        The step that was taken. A step that cannot be compiled is refused, and not taken.
    """
    StepShare(data)  # functions that are traced only once read it
    with tf.device("CPU:0"):  # so that one copy takes them to a GPU
        numbers = tf.stack([data.count, data.total])
    steps: list[DeferredStep] = []
    traced: list[_Contributions] = []

    @tf.function(jit_compile=True, autograph=False)
    def compute(numbers: tf.Tensor, samples: Any) -> Any:
        count, total = tf.unstack(numbers)
        micro_batch = MicroBatch(count, total, samples)
        step = DeferredStep(model, micro_batch)
        steps.append(step)
        with compilable(), step.running():
            train_step(samples)
        read = metrics.state_of(model.metrics) if results else []
        traced.append(_Contributions(step, read))
        return traced[-1].packed()

    with compiling() as trace:
        try:
            own = compute(numbers, data.data)
        except Exception:
            if trace.refused:
                return RefusedStep([one for step in steps for one in step.layer_state.written])
            raise
    sums = _sums(own, traced[-1].exact, model._tnt_gradient_type)

    @tf.function(jit_compile=True, autograph=False)
    def update(sums: list[Any], numbers: tf.Tensor) -> Any:
        of_metrics = traced[-1].apply(sums, total=numbers[1])
        if results is None:
            return None
        return metrics.results_of_sums(results, traced[-1].metric_state, of_metrics)

    return CompiledStep(traced[-1].step, update(sums, numbers))


def _sums(own: list[Any], exact: set[int], gradient_type: str) -> list[Any]:
    """The sums of packed contributions over the ranks.

    Args:
        own: The contributions of this rank.
        exact: The positions of those that are not gradients, which are never rounded.
        gradient_type: The type in which gradients cross the network.
    """
    if device_hint() or gradient_type == "float32":
        return gradients.sum_over_ranks(own, channel("gradients"))
    of_gradients = [None if i in exact else one for i, one in enumerate(own)]
    sums = gradients.sum_over_ranks(of_gradients, channel("gradients", gradient_type))
    positions = sorted(exact)
    everything = np.iinfo(np.int64).max
    others = channel("gradients").allreduce([own[i] for i in positions], everything)
    for i, total in zip(positions, others, strict=True):
        sums[i] = total
    return sums


class _Contributions:
    """What this rank adds to gradients, the state of layers and that of metrics.

    For TensorFlow's collectives, XLA packs it all into the few flat tensors that they want.

    Args:
        step: The step that was traced.
        metric_state: The variables of the metrics whose results are needed.

    Attributes:
        exact: The positions in the packed contributions of those that are not gradients, unless
            they are packed together.
    """

    def __init__(self, step: DeferredStep, metric_state: list[Any]) -> None:
        self.step = step
        self.metric_state = metric_state
        of_gradients = step.gradients()
        of_layers = step.layer_state.contributions(trained=True)
        self._tensors = [*of_gradients, *of_layers, *metrics.contributions(metric_state)]
        self._ends = len(of_gradients), len(of_gradients) + len(of_layers)
        is_dense = [isinstance(tensor, tf.Tensor) for tensor in self._tensors]
        self._dense = [i for i, dense in enumerate(is_dense) if dense]
        self._others = [i for i, dense in enumerate(is_dense) if not dense]  # sparse, or None
        self._packing = _packing([self._tensors[i] for i in self._dense])
        self.exact = {at for at, i in enumerate(self._dense) if i >= len(of_gradients)}

    def packed(self) -> list[Any]:
        """The contributions, of which only those that are not dense are left as they are."""
        dense = self._packing.pack([self._tensors[i] for i in self._dense])
        return [*dense, *(self._tensors[i] for i in self._others)]

    def apply(self, packed: list[Any], total: tf.Tensor) -> list[tf.Tensor]:
        """Updates variables with the sums over the ranks.

        Args:
            packed: The sums of the packed contributions.
            total: How many samples the global batch has.

        Returns:
            The sums of the state of metrics.
        """
        flat = len(packed) - len(self._others)
        dense = self._packing.unpack(packed[:flat])
        sums = dict(zip([*self._dense, *self._others], [*dense, *packed[flat:]], strict=True))
        in_order = [sums[i] for i in range(len(sums))]
        gradients_end, layers_end = self._ends
        # In the order of the step: some layers write variables that are trained, too.
        self.step.layer_state.assign(in_order[gradients_end:layers_end], total)
        self.step.apply(in_order[:gradients_end])
        return in_order[layers_end:]


def _packing(tensors: Sequence[tf.Tensor]) -> Packing:
    threshold = LARGEST_BUCKET_BYTES if device_hint() else 0
    return Packing(tensors, fuse([spec_of(tensor) for tensor in tensors], threshold))
