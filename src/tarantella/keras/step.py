"""One training or evaluation step of one rank, made to count as its part of the global step.

While a step runs (or is traced), the places where Keras turns samples into one number are
led through here:

- A rank holds n of the N samples of the global batch. What its code computes as a mean over
  its samples counts n/N, its *share*; a loss is multiplied with it before the gradients are
  taken, so that the plain sum of the ranks' gradients is the gradient of the global loss.
- What Keras computes as a sum over samples is divided by the share first; what Keras divides
  by something other than N (a mask's valid entries, the sum of the sample weights) gets the
  divisor of the global batch.
- The gradients are summed over the ranks when they are handed to an optimizer.
- The state of metrics is summed over the ranks when a result is asked for.
- Moments that are synchronized are those of the global batch.
- The state that layers have written is put together at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella.comm.graph import Channel
from tarantella.comm.phases import end_phase
from tarantella.comm.turns import in_turn
from tarantella.data.parts import Part
from tarantella.keras import gradients, internals
from tarantella.keras.layer_state import LayerState
from tarantella.keras.normalization import GlobalMoments
from tarantella.runtime import world

_SUMMING_REGULARIZERS = (
    keras.regularizers.L1,
    keras.regularizers.L2,
    keras.regularizers.L1L2,
)

_current: list[Step] = []


def current() -> Step | None:
    """The step that is being run or traced, if any."""
    return _current[-1] if _current else None


class Step:
    """What this rank knows of the step it takes.

    Args:
        model: The model that takes it.
        part: The data.
        shares_logs: Whether the results of metrics are those of all ranks, not of this one.
    """

    def __init__(self, model: keras.Model, part: Part, shares_logs: bool = True) -> None:
        self._model = model
        self._shares_logs = shares_logs
        self._has_samples = part.count > 0
        count = tf.cast(part.count, tf.float64)
        total = tf.cast(part.total, tf.float64)
        self.share = count / total
        # A rank without samples computes on one that counts for nothing.
        self._inflation = total / tf.maximum(count, 1.0)
        self._gradients = gradients.channel()
        self._losses = Channel("losses")
        self._metrics = Channel("metrics")
        self._weighted_for: set[int] = set()
        self._nested = False
        self._trained = False
        self._can_be_empty = _can_be_empty(part)
        self._global_numbers: list[tf.Tensor] = []
        self._moments = GlobalMoments(self.share, lambda: bool(self._weighted_for))
        self.layer_state = LayerState(model, part)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Leads Keras's reductions through this step."""
        optimizer, metric = internals.BaseOptimizer, keras.metrics.Metric
        replacements = [
            *internals.wrapped_reduction(self._wrap_reduction),
            *self._inflated_activity_regularizers(),
            *internals.wrapped_methods(optimizer, "scale_loss", self._wrap_scale_loss),
            *internals.wrapped_methods(optimizer, "apply", self._wrap_apply),
            *internals.wrapped_methods(metric, "result", self._wrap_result),
            *internals.wrapped_methods(metric, "update_state", self._wrap_update),
            *self._moments.replacements(),
        ]
        _current.append(self)
        try:
            with internals.replaced(replacements), self.layer_state.recorded():
                yield
            self.layer_state.combine(self._trained)
        finally:
            _current.pop()

    @contextmanager
    def _outermost(self) -> Iterator[None]:
        """Keras's own calls within a call that was led through here are left alone."""
        self._nested = True
        try:
            yield
        finally:
            self._nested = False

    # Losses

    def _wrap_reduction(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(reduce)
        def reduce_globally(
            values: Any,
            sample_weight: Any = None,
            mask: Any = None,
            reduction: str | None = "sum_over_batch_size",
            dtype: Any = None,
        ) -> Any:
            loss = reduce(values, sample_weight, mask, reduction, dtype)
            values = keras.ops.convert_to_tensor(values, dtype=dtype)
            if reduction in (None, "none") or values.shape.rank == 0:
                return loss
            if reduction == "sum":
                return loss * tf.cast(self._inflation, loss.dtype)
            if reduction == "mean_with_sample_weight":
                weights = internals.merged_sample_weight(values, sample_weight, mask, dtype)
                epsilon = 0.0
            else:
                weights = mask
                epsilon = internals.mask_epsilon()
            if weights is None:
                return loss
            return loss * tf.cast(self._correction(weights, epsilon), loss.dtype)

        return reduce_globally

    def _correction(self, weights: Any, epsilon: float) -> tf.Tensor:
        """Exchanges the divisor of this part, the sum of `weights`, for the global one."""
        own = tf.reduce_sum(tf.cast(keras.ops.convert_to_tensor(weights), tf.float64))
        own = tf.stop_gradient(own)
        counted = tf.where(self._has_samples, own, tf.zeros_like(own))
        (everyones,) = in_turn("losses", lambda: self._losses.allreduce([counted], threshold=0))
        return tf.math.divide_no_nan((own + epsilon) * self._inflation, everyones + epsilon)

    def _inflated_activity_regularizers(self) -> list[internals.Replacement]:
        """Where Keras does not divide what a regularizer sums up over the batch."""
        layers = [
            layer
            for layer in internals.flat_layers(self._model)
            if isinstance(layer.activity_regularizer, _SUMMING_REGULARIZERS)
        ]
        if not layers or not internals.activity_losses_are_sums():
            return []

        def inflated(regularizer: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def regularize(outputs: Any) -> Any:
                loss = regularizer(outputs)
                return loss * tf.cast(self._inflation, loss.dtype)

            return regularize

        name = "activity_regularizer"
        return [(layer, name, inflated(layer.activity_regularizer)) for layer in layers]

    def _wrap_scale_loss(self, scale_loss: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(scale_loss)
        def scale_share_of_loss(optimizer: Any, loss: Any) -> Any:
            if self._nested:
                return scale_loss(optimizer, loss)
            self._weighted_for.add(id(optimizer))
            loss = keras.ops.convert_to_tensor(loss)
            end_phase("forward", loss)
            # A loss that is not reduced is summed up by the gradients: every sample counts 1.
            weight = self.share if loss.shape.rank == 0 else self._has_samples
            loss = loss * tf.cast(weight, loss.dtype)
            with self._outermost():
                return scale_loss(optimizer, loss)

        return scale_share_of_loss

    # Gradients

    def _wrap_apply(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(apply)
        def apply_sums(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if self._nested:
                return apply(optimizer, grads, trainable_variables)
            self._trained = True
            grads = list(grads)
            if trainable_variables is not None:
                trainable_variables = list(trainable_variables)
                gradients.give_shapes(grads, trainable_variables)
            has_scaled_loss = id(optimizer) in self._weighted_for
            if not has_scaled_loss:
                grads = gradients.weighted(grads, self.share)
            self._weighted_for.discard(id(optimizer))
            grads = gradients.sum_over_ranks(grads, self._gradients, has_scaled_loss)
            with self._outermost():
                result = apply(optimizer, grads, trainable_variables)
            gradients.end_update(trainable_variables or self._model.trainable_variables)
            return result

        return apply_sums

    # Metrics

    def _wrap_update(self, update_state: Callable[..., Any]) -> Callable[..., Any]:
        if update_state in (keras.metrics.Mean.update_state, keras.metrics.Sum.update_state):
            update_state = self._with_share(update_state)

        @wraps(update_state)
        def update_counted(metric: Any, *args: Any, **kwargs: Any) -> Any:
            if self._nested or internals.in_stateless_scope():
                return update_state(metric, *args, **kwargs)
            with self._outermost():
                if self._can_be_empty:
                    internals.build_metric(metric, args, kwargs)
                before = self._values_now(metric.variables)
                result = update_state(metric, *args, **kwargs)
                self._keep_only_what_counted(before)
                return result

        return update_counted

    def _with_share(self, update_state: Callable[..., Any]) -> Callable[..., Any]:
        """A number that was computed from this part counts with the part's share.

        Without that, a mean over ranks of unequal parts would not be the mean over samples.
        Keras's own tracker of the loss passes the size of the part as a weight, which is right.
        """

        @wraps(update_state)
        def update_with_share(metric: Any, values: Any, sample_weight: Any = None) -> Any:
            number = keras.ops.convert_to_tensor(values)
            if number.shape.rank == 0 and number.dtype.is_floating and sample_weight is None:
                sample_weight = tf.cast(self.share, number.dtype)
            return update_state(metric, values, sample_weight)

        return update_with_share

    def _wrap_result(self, result: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(result)
        def global_result(metric: Any) -> Any:
            if self._nested or internals.in_stateless_scope():
                return result(metric)
            return self.results_of(lambda: result(metric), [metric])

        return global_result

    def results_of(self, compute: Callable[[], Any], metrics: Iterable[Any]) -> Any:
        """What `compute` makes of the state that metrics have over all ranks."""
        with self._outermost():
            if self._shares_logs:
                results = global_results(compute, metrics, self._metrics)
            else:
                results = _values(compute())
        self._global_numbers.extend(keras.tree.flatten(results))
        return results

    def global_logs(self, logs: Any) -> Any:
        """The logs of a step, with numbers that are no metric's result averaged over samples."""
        if not isinstance(logs, dict):
            return logs
        own = [name for name, value in logs.items() if self._is_own_number(value)]
        shares = [logs[name] * tf.cast(self.share, logs[name].dtype) for name in own]
        sums = self._metrics.allreduce(shares, threshold=np.iinfo(np.int64).max)
        return {**logs, **dict(zip(own, sums, strict=True))}

    def _is_own_number(self, value: Any) -> bool:
        if not isinstance(value, tf.Tensor) or any(value is one for one in self._global_numbers):
            return False
        return bool(value.shape.rank == 0 and value.dtype.is_floating)

    # Ranks without a sample of their own

    def _values_now(self, variables: Iterable[Any]) -> list[tuple[Any, tf.Tensor]]:
        if not self._can_be_empty:
            return []
        return [(variable, tf.identity(variable.value)) for variable in variables]

    def _keep_only_what_counted(self, before: list[tuple[Any, tf.Tensor]]) -> None:
        """Sets metrics back to what they were, if this rank had no sample of its own."""
        for variable, value in before:
            variable.assign(tf.where(self._has_samples, variable.value, value))


def global_results(compute: Callable[[], Any], metrics: Iterable[Any], channel: Channel) -> Any:
    """What `compute` makes of the state that metrics have over all ranks.

    The ranks' values of a variable add up, unless it says itself (`aggregation`) that they are
    to be averaged, or that the master's stands for all.
    """
    combined = [variable for metric in metrics for variable in metric.variables]
    values = []
    for variable in combined:
        value = tf.convert_to_tensor(variable.value)
        if variable.aggregation == "only_first_replica" and not world.is_master_rank():
            value = tf.zeros_like(value)
        values.append(value)
    sums = channel.allreduce(values, threshold=np.iinfo(np.int64).max)
    for i, variable in enumerate(combined):
        if variable.aggregation == "mean":
            sums[i] = sums[i] / tf.cast(world.get_size(), sums[i].dtype)
    with keras.StatelessScope(state_mapping=list(zip(combined, sums, strict=True))):
        return _values(compute())  # a variable has its global value in here only


def _values(results: Any) -> Any:
    """The results of metrics, with the values of those that are variables."""
    return keras.tree.map_structure(
        lambda result: result.value if isinstance(result, keras.Variable) else result, results
    )


def _can_be_empty(part: Part) -> bool:
    """Whether this rank may have no sample, judged by the shapes known in advance."""
    leaves = [leaf for leaf in tf.nest.flatten(part.data) if leaf is not None]
    rows = {leaf.shape[0] for leaf in leaves if leaf.shape.rank}
    return bool(rows & {None, 1})
