"""One training or evaluation step of one rank, as its share of the global step.

While a step runs (or is traced), it handles the calls in which Keras turns samples into one
number (`hooks`):

- losses count with this rank's share of the global batch (`losses`);
- gradients are summed over the ranks when they are handed to an optimizer;
- the state of metrics is summed over the ranks when a result is asked for (`metrics`);
- moments that are synchronized are those of the global batch (`normalization`);
- the state that layers have written is combined at the end of the step (`layer_state`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tarantella.data.micro_batch import MicroBatch
from tarantella.graph.engine import channel
from tarantella.keras import gradients, hooks
from tarantella.keras.batch_reductions import BatchGraph
from tarantella.keras.global_numbers import GlobalNumbers
from tarantella.keras.hooks import Handler, Hook
from tarantella.keras.layer_state import LayerState
from tarantella.keras.losses import Losses
from tarantella.keras.metrics import Metrics
from tarantella.keras.normalization import GlobalMoments
from tarantella.keras.step_share import StepShare

_current: ContextVar[Step | None] = ContextVar("step", default=None)


def current() -> Step | None:
    """The step that is being run or traced in this thread, if any."""
    return _current.get()


class Step:
    """What this rank knows of the step it takes.

    Args:
        model: The model that takes it.
        micro_batch: The data.
        global_results: Whether the results of metrics are those of all ranks, not of this one.

    Attributes:
        numbers: The numbers in the user's code, over all ranks.
        metrics: The metrics of the step.
        layer_state: What layers write in the step.
    """

    def __init__(self, model: Any, micro_batch: MicroBatch, global_results: bool = True) -> None:
        self._model = model
        self._share = StepShare(micro_batch)
        self._gradients = channel("gradients")
        self._trained = False
        graph = BatchGraph.of(micro_batch.data)
        self.numbers = GlobalNumbers(self._share, graph, model._tnt_advice)
        self.metrics = Metrics(micro_batch, self._share, graph, self.numbers, global_results)
        self._losses = Losses(model, self._share, self.numbers, self.metrics.nested())
        self._moments = GlobalMoments(self._share.value, self._losses.is_scaled)
        self.layer_state = LayerState(model, micro_batch, graph.is_fixed, self.numbers.state)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Makes this step handle Keras's hooks, and combines the state of layers at its end."""
        before = _current.set(self)
        try:
            with hooks.handling(self._handlers()):
                yield
            self.layer_state.combine(self._trained)
        finally:
            _current.reset(before)

    def _handlers(self) -> dict[Hook, Handler]:
        return {
            **self._losses.handlers(),
            hooks.APPLY_GRADIENTS: self._apply,
            **self.metrics.handlers(),
            **self._moments.handlers(),
            **self.layer_state.handlers(),
        }

    def _apply(
        self, apply: Handler, optimizer: Any, grads: Any, trainable_variables: Any = None
    ) -> Any:
        """Updates the variables with the sums of the ranks' gradients."""
        self._trained = True
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            gradients.give_shapes(grads, trainable_variables)
        has_scaled_loss = self._losses.take_scaled(optimizer)
        if not has_scaled_loss:
            grads = gradients.weighted(grads, self._share.value())
        grads = gradients.sum_over_ranks(grads, self._gradients, has_scaled_loss)
        # What an optimizer writes is the same on all ranks.
        with hooks.handling({**self.metrics.nested(), hooks.ASSIGN_VARIABLE: None}):
            result = apply(optimizer, grads, trainable_variables)
        gradients.end_update(trainable_variables or self._model.trainable_variables)
        return result
