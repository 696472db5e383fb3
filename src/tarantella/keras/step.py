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

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tarantella.data.micro_batch import MicroBatch
from tarantella.graph.compiling import is_compiling, refuse
from tarantella.graph.engine import channel, device_hint
from tarantella.internals import keras as internals
from tarantella.keras import gradients, hooks, step_share
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


def prepare() -> None:
    """Makes the variables of all steps; TensorFlow traces a function twice that makes some."""
    device_hint()
    step_share.prepare()


class Step:
    """What this rank knows of the step it takes.

    Args:
        model: The model that takes it.
        micro_batch: The data.
        needs_logs: Whether the metrics that Keras returns are those of all ranks, not of this one.

    Attributes:
        numbers: The numbers in the user's code, over all ranks.
        metrics: The metrics of the step.
        layer_state: What layers write in the step.
        has_trained: Whether gradients were handed to an optimizer.
    """

    def __init__(self, model: Any, micro_batch: MicroBatch, needs_logs: bool = True) -> None:
        self._model = model
        self._share = StepShare(micro_batch)
        self._gradients = channel("gradients", model._tnt_gradient_type)
        self.has_trained = False
        self._needs_logs = needs_logs
        graph = BatchGraph.of(micro_batch.data)
        self.numbers = GlobalNumbers(self._share, graph, model._tnt_advice)
        self.metrics = Metrics(micro_batch, self._share, graph, self.numbers)
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
            self._end()
        finally:
            _current.reset(before)

    def results(self, compute: Callable[[], Any], metrics: Iterable[Any]) -> Any:
        """What Keras's `get_metrics_result` returns in this step."""
        return self.metrics.results_of(compute, metrics, over_ranks=self._needs_logs)

    def _end(self) -> None:
        self.layer_state.combine(self.has_trained)

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
        grads, trainable_variables, has_scaled_loss = self._own_gradients(
            optimizer, grads, trainable_variables
        )
        grads = gradients.sum_over_ranks(grads, self._gradients, has_scaled_loss)
        return self._update(apply, optimizer, grads, trainable_variables)

    def _own_gradients(
        self, optimizer: Any, grads: Any, trainable_variables: Any
    ) -> tuple[list[Any], Any, bool]:
        """What this rank adds to the gradients, the variables, and whether the loss was scaled."""
        self.has_trained = True
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            gradients.give_shapes(grads, trainable_variables)
        has_scaled_loss = self._losses.take_scaled(optimizer)
        if not has_scaled_loss:
            grads = gradients.weighted(grads, self._share.value())
        return grads, trainable_variables, has_scaled_loss

    def _update(
        self, apply: Handler, optimizer: Any, grads: list[Any], trainable_variables: Any
    ) -> Any:
        # What an optimizer writes is the same on all ranks.
        with hooks.handling({**self.metrics.nested(), hooks.ASSIGN_VARIABLE: None}):
            result = apply(optimizer, grads, trainable_variables)
        gradients.end_update(trainable_variables or self._model.trainable_variables)
        return result


@dataclass(frozen=True)
class Update:
    """An update of variables that is still to come.

    Attributes:
        apply: Keras's function that applies it.
        optimizer: The optimizer.
        gradients: What this rank adds to the gradients.
        variables: The variables, if they were named.
    """

    apply: Handler
    optimizer: Any
    gradients: list[Any]
    variables: Any


class DeferredStep(Step):
    """A step of Keras that leaves its sums over the ranks, and the update, to the caller.

    So everything can be summed together. What comes after the update in the step must not depend
    on it: `one_sum_step` makes sure of that beforehand, `compiled_step` looks at the graph.

    Attributes:
        has_update: Whether there is an update.
        forward_was_noted: Whether a timeline has the forward pass already.
    """

    def __init__(self, model: Any, micro_batch: MicroBatch) -> None:
        super().__init__(model, micro_batch)
        self.forward_was_noted = False
        self._deferred: Update | None = None
        self._before_update = 0  # operations in the graph

    @property
    def has_update(self) -> bool:
        return self._deferred is not None

    def results(self, compute: Callable[[], Any], metrics: Iterable[Any]) -> Any:
        return {}  # the sums that they are made of come later

    def contributions(self) -> tuple[list[Any], list[tf.Tensor]]:
        """What this rank adds to the gradients, and to the state of layers."""
        of_gradients = [] if self._deferred is None else self._deferred.gradients
        return of_gradients, self.layer_state.contributions(self.has_trained)

    def apply(self, grads: list[Any]) -> None:
        """Updates the variables with the sums of the ranks' gradients."""
        if self._deferred is not None:
            own = self._deferred
            self._update(own.apply, own.optimizer, grads, own.variables)

    def reads_updated_variables(self) -> bool:
        """Whether the step goes on with variables that the update writes."""
        if self._deferred is None:
            return False
        graph = tf.compat.v1.get_default_graph()
        updated = [*self._model.trainable_variables, *self._deferred.optimizer.variables]
        handles = {id(internals.tf_variable(variable).handle) for variable in updated}
        names = {inner.name for outer, inner in graph.captures if id(outer) in handles}
        return any(
            argument.name in names
            for operation in graph.get_operations()[self._before_update :]
            for argument in operation.inputs
        )

    def _apply(
        self, apply: Handler, optimizer: Any, grads: Any, trainable_variables: Any = None
    ) -> Any:
        if not self._is_update_of_keras(optimizer, apply):
            if is_compiling():
                refuse("an update in the model's own code, or the first one of an optimizer")
            return super()._apply(apply, optimizer, grads, trainable_variables)
        grads, variables, self.forward_was_noted = self._own_gradients(
            optimizer, grads, trainable_variables
        )
        self._deferred = Update(apply, optimizer, grads, variables)
        if is_compiling():
            self._before_update = len(tf.compat.v1.get_default_graph().get_operations())
        return None

    def _is_update_of_keras(self, optimizer: Any, apply: Handler) -> bool:
        """Whether this is the update of Keras's step, and the whole of it.

        The user's code may have taken others before, and may go on after Keras's `apply`.
        """
        is_first = self._deferred is None and optimizer.built
        is_models = optimizer is self._model.optimizer and self._losses.is_scaled_for(optimizer)
        is_whole = "apply" not in vars(optimizer) and hooks.unhooked(type(optimizer).apply) is apply
        return is_first and is_models and is_whole

    def _end(self) -> None:
        """The state of layers is combined after the sums."""
