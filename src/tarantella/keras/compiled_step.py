"""A training step of Keras, compiled by XLA.

Gradients, the state of layers and that of metrics are summed over the ranks together. Where XLA can
compile that sum, the whole step is one function. Otherwise forward and backward pass become one
compiled function, the update another, and the sum comes between them. A step that needs a sum in
the middle, as masked losses do, cannot be compiled so. Then calls of the model are compiled alone
(`compiled_call`), as in a user's own `train_step`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tarantella.data.micro_batch import MicroBatch, most_samples
from tarantella.graph.compiling import compilable, compiling, refuse
from tarantella.graph.engine import device_hint, note_compiled_sum, sum_in_compiled
from tarantella.keras import metrics
from tarantella.keras.contributions import PackedContributions, summed
from tarantella.keras.step import DeferredStep
from tarantella.keras.step_share import StepShare
from tarantella.runtime import world


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
        most = most_samples(data, world.get_size())
    steps: list[DeferredStep] = []
    traced: list[PackedContributions] = []

    @tf.function(jit_compile=True, autograph=False)
    def compute(numbers: tf.Tensor, samples: Any, most: tf.Tensor | None) -> Any:
        count, total = tf.unstack(numbers)
        step = DeferredStep(model, MicroBatch(count, total, samples))
        steps.append(step)
        with compilable(), step.running():
            train_step(samples)
            if not step.has_update:
                refuse("a step without an update")
            if step.reads_updated_variables():
                refuse("something that depends on the updated variables")
        read = metrics.state_of(model.metrics) if results else []
        traced.append(PackedContributions(step, read, samples, most))
        return traced[-1].packed(most)

    @tf.function(jit_compile=True, autograph=False)
    def update(sums: list[Any], numbers: tf.Tensor, most: tf.Tensor | None) -> Any:
        of_metrics = traced[-1].apply_packed(sums, numbers[1], most)
        if results is None:
            return None
        return metrics.results_of_sums(results, traced[-1].metric_state, of_metrics)

    # Between CPUs, where the same is tested, XLA cannot compile the sum, only what is around it.
    @tf.function(jit_compile=device_hint() == "nccl", autograph=False)
    def whole(numbers: tf.Tensor, samples: Any, most: tf.Tensor | None) -> Any:
        with compiling():
            (own,) = compute(numbers, samples, most)
        return update([sum_in_compiled(own)], numbers, most)

    arguments = numbers, data.data, most
    with compiling() as trace:
        try:
            compute.get_concrete_function(*arguments)
        except Exception:
            if trace.refused:
                return RefusedStep([one for step in steps for one in step.layer_state.written])
            raise
    if traced[-1].is_one_sum:
        note_compiled_sum()
        return CompiledStep(traced[-1].step, whole(*arguments))
    with compiling():
        own = compute(*arguments)
    sums = summed(own, traced[-1].exact, model._tnt_gradient_type)
    return CompiledStep(traced[-1].step, update(sums, numbers, most))
