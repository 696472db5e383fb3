"""A training step of Keras with one sum over the ranks: of gradients, layers' state and metrics.

Each sum is a call into Python and a wait for the slowest rank, which is most of what a small step
costs. So the update comes last, after the metrics have seen the batch, and all is summed before it.
In a step of Keras, only metrics come after the update; those of Keras do not read what it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tarantella.data.micro_batch import MicroBatch
from tarantella.internals import keras as internals
from tarantella.keras import metrics
from tarantella.keras.contributions import Contributions, summed
from tarantella.keras.step import DeferredStep


def is_possible(model: Any) -> bool:
    """Whether the step that Keras defines for a model can be taken like this.

    All variables that it needs must exist.
    """
    return (
        not tf.executing_eagerly()  # where order is what the user sees
        and bool(model.trainable_weights)
        and internals.only_keras_sees_updates(model)
    )


def take(
    model: Any,
    data: MicroBatch,
    train_step: Callable[[Any], Any],
    results: Callable[[], Any] | None,
    written: Sequence[Any] = (),
) -> tuple[DeferredStep, Any]:
    """Takes a step that Keras defines.

    Args:
        model: The model.
        data: The data.
        train_step: A function of the samples; what it returns is ignored.
        results: Returns the results of the model's metrics, if those of all ranks are needed.
        written: Variables that layers are known to write.

    Returns:
        The step, and the results of metrics over all ranks, if they were needed.
    """
    step = DeferredStep(model, data)
    step.layer_state.note_written(written)
    with step.running():
        train_step(data.data)
    own = Contributions(step, metrics.state_of(model.metrics) if results else [])
    sums = summed(own.tensors, own.exact, model._tnt_gradient_type, step.forward_was_noted)
    of_metrics = own.apply(sums, data.total)
    if results is None:
        return step, None
    return step, metrics.results_of_sums(results, own.metric_state, of_metrics)
