"""One training or evaluation step of one rank, made to count as its part of the global step.

While a step runs (or is traced), the places where Keras turns samples into one number are
led through here:

- A rank holds n of the N samples of the global batch. What its code computes as a mean over
  its samples counts n/N, its *share*; a loss is multiplied with it before the gradients are
  taken, so that the plain sum of the ranks' gradients is the gradient of the global loss.
- What Keras computes as a sum over samples is divided by the share first; what Keras divides
  by something other than N (a mask's valid entries, the sum of the sample weights) gets the
  divisor of the global batch.
- A number that the user's code computes is a mean, a sum, or a function of such; its graph shows
  which (`batch_reductions`), and it is made to count like a mean.
- The gradients are summed over the ranks when they are handed to an optimizer.
- The state of metrics is summed over the ranks when a result is asked for.
- Moments that are synchronized are those of the global batch.
- The state that layers have written is put together at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella.data.micro_batch import MicroBatch
from tarantella.graph import engine
from tarantella.graph.channel import Channel
from tarantella.graph.ordering import in_program_order
from tarantella.graph.phases import end_phase
from tarantella.internals import keras as internals
from tarantella.keras import gradients
from tarantella.keras.batch_reductions import BatchGraph, Formula, Kind, Leaf
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

    def __init__(self, model: Any, part: MicroBatch, shares_logs: bool = True) -> None:
        self._model = model
        self._advice = model._tnt_advice
        self._shares_logs = shares_logs
        self._share = Share(tf.cast(part.count, tf.float64) / tf.cast(part.total, tf.float64))
        self._gradients = engine.channel("gradients")
        self._losses = engine.channel("losses")
        self._metrics = engine.channel("metrics")
        self._weighted_for: set[int] = set()
        self._nested = False
        self._builds_metric = False
        self._trained = False
        self._can_be_empty = _can_be_empty(part)
        self._graph = BatchGraph.of(part.data)
        self._global_numbers: list[tf.Tensor] = []
        self._moments = GlobalMoments(lambda: self.share, lambda: bool(self._weighted_for))
        self.layer_state = LayerState(model, part, self._graph.is_fixed, self._state_over_ranks)

    @property
    def share(self) -> tf.Tensor:
        """This rank's samples divided by those of all."""
        return self._share.value()

    @property
    def _has_samples(self) -> tf.Tensor:
        return self.share > 0

    @property
    def _inflation(self) -> tf.Tensor:
        """What makes a sum over this rank's samples count, with its share, as it is."""
        return tf.math.divide_no_nan(tf.ones((), tf.float64), self.share)

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
            (tf.GradientTape, "gradient", self._wrap_gradient(tf.GradientTape.gradient)),
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
            if values.shape.rank == 0:  # reduced by the user's loss function already
                return self.as_mean(loss, is_own_loss=True)
            if reduction in (None, "none"):
                return loss
            if reduction == "sum":
                return self._counted(loss * tf.cast(self._inflation, loss.dtype))
            if reduction == "mean_with_sample_weight":
                weights = internals.merged_sample_weight(values, sample_weight, mask, dtype)
                epsilon = 0.0
            else:
                weights = mask
                epsilon = internals.mask_epsilon()
            if weights is not None:
                loss = loss * tf.cast(self._correction(weights, epsilon), loss.dtype)
            return self._counted(loss)

        return reduce_globally

    def _counted(self, number: tf.Tensor) -> tf.Tensor:
        """Notes that a number counts with the share of this rank, as a mean over samples does."""
        self._graph.remember(number, Kind.MEAN)
        return number

    def as_mean(self, number: Any, is_own_loss: bool = False) -> Any:
        """A tensor that the user's code computed, made to count as a mean over samples does.

        With one entry for each sample it stands for their sum, as TensorFlow takes gradients and
        Keras adds up losses. It has to be called where the gradients of the result are recorded.
        """
        if not _is_float_tensor(number):
            return number
        kind, formula = self._kind_of(number, is_own_loss)
        if kind is Kind.SUM:
            number = number * tf.cast(self._inflation, number.dtype)
        elif kind is Kind.OTHER and formula is not None:
            value, terms = self._over_ranks(formula)
            # The value over all ranks, with gradients that lead to this rank's samples.
            number = tf.stop_gradient(value)
            for term, coefficient in terms:
                number += tf.reduce_sum(coefficient * (term - tf.stop_gradient(term)))
        return self._counted(number)

    def added_loss(self, loss: Any, total: Any) -> Any:
        """What Keras makes of something handed to `add_loss`, counting as a mean does."""
        if loss.shape.rank and self._kind_of(loss)[0] is Kind.SUM:
            return self._counted(total * tf.cast(self._inflation, total.dtype))
        return self.as_mean(total)

    def _kind_of(self, number: tf.Tensor, is_own_loss: bool = False) -> tuple[Kind, Formula | None]:
        known = self._graph.known_kind(number)
        if known is not None:
            return known, None
        if number.shape.rank and self._graph.is_batched(number):
            return Kind.SUM, None
        if isinstance(number, tf.__internal__.EagerTensor):
            if is_own_loss:
                self._advice.number_of_eager_step()
            return Kind.MEAN, None
        formula = self._graph.formula(number)
        if formula is None:
            self._advice.number_not_understood(number.op.name)
            return Kind.MEAN, None
        return formula.kind, formula

    def _over_ranks(self, formula: Formula) -> tuple[tf.Tensor, list[tuple[tf.Tensor, tf.Tensor]]]:
        """The value of a formula over the global batch, and the terms of its gradient.

        Each term is a tensor of this rank and the factor with which a change of it changes the
        value, divided by the share of this rank.
        """
        leaves = formula.leaves
        combined = [leaf for leaf in leaves if leaf.kind is not Kind.FIXED]
        weights = [self._weight(leaf) for leaf in combined]
        own = [
            tf.math.multiply_no_nan(tf.cast(leaf.tensor, tf.float64), weight)
            for leaf, weight in zip(combined, weights, strict=True)
        ]
        sums = in_program_order(
            "losses",
            lambda: self._losses.allreduce([*own, *weights], threshold=np.iinfo(np.int64).max),
        )
        of_all = {}
        factors = {}
        for leaf, weight, total, all_weights in zip(
            combined, weights, sums[: len(own)], sums[len(own) :], strict=True
        ):
            divisor = all_weights if leaf.kind is Kind.MEAN else tf.ones_like(all_weights)
            of_all[id(leaf)] = tf.cast(total / divisor, leaf.tensor.dtype)
            factors[id(leaf)] = tf.math.divide_no_nan(weight, divisor * self.share)
        values = [of_all.get(id(leaf), leaf.tensor) for leaf in leaves]
        value = formula.computed_from(values)
        terms = []
        for leaf, slope in zip(leaves, tf.gradients(value, values), strict=True):
            if slope is not None:
                slope = tf.stop_gradient(tf.convert_to_tensor(slope))
                factor = factors.get(id(leaf), tf.ones((), tf.float64))
                terms.append((leaf.tensor, slope * tf.cast(factor, slope.dtype)))
        return value, terms

    def _state_over_ranks(self, value: tf.Tensor) -> tf.Tensor:
        """What a layer's state would be after a step with the global batch; a mean can wait."""
        if _current_graph() is None or not self._share.is_of_current_graph():
            return value  # in a branch, say, that not all ranks may take
        formula = self._graph.formula(value) if value.shape.is_fully_defined() else None
        if formula is None or formula.kind not in (Kind.SUM, Kind.OTHER):
            return value
        return self._over_ranks(formula)[0]

    def _weight(self, leaf: Leaf) -> tf.Tensor:
        """With what a mean or sum of this rank goes into that of all."""
        if leaf.kind is not Kind.MEAN:
            return tf.cast(self._has_samples, tf.float64)
        if leaf.entries is None:
            return self.share
        return tf.where(self._has_samples, leaf.entries, tf.zeros_like(leaf.entries))

    def _correction(self, weights: Any, epsilon: float) -> tf.Tensor:
        """Exchanges the divisor of this part, the sum of `weights`, for the global one."""
        own = tf.reduce_sum(tf.cast(keras.ops.convert_to_tensor(weights), tf.float64))
        own = tf.stop_gradient(own)
        counted = tf.where(self._has_samples, own, tf.zeros_like(own))
        (everyones,) = in_program_order(
            "losses", lambda: self._losses.allreduce([counted], threshold=0)
        )
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
            loss = self.as_mean(loss)
            loss = loss * tf.cast(self.share, loss.dtype)
            with self._outermost():
                loss = scale_loss(optimizer, loss)
            self._graph.remember(loss, Kind.SUM)
            return loss

        return scale_share_of_loss

    def _wrap_gradient(self, gradient: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(gradient)
        def gradient_of_mean(
            tape: tf.GradientTape,
            target: Any,
            sources: Any,
            output_gradients: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            # With an optimizer's `scale_loss`, the loss has the share of this rank already.
            trains = any(map(_is_variable, keras.tree.flatten(sources)))
            if trains and not self._weighted_for:
                target, output_gradients = self._as_means(target, output_gradients)
            return gradient(tape, target, sources, output_gradients, *args, **kwargs)

        return gradient_of_mean

    def _as_means(self, target: Any, output_gradients: Any) -> tuple[Any, Any]:
        """What to take gradients of, in place of what was computed, and the gradients of that.

        The tape records no more: other than in `as_mean`, nothing can be multiplied.
        """
        targets = tf.nest.flatten(target)
        given = [None] * len(targets)
        if output_gradients is not None:
            given = tf.nest.flatten(output_gradients)
        kinds = [
            self._kind_of(one, is_own_loss=True) if _is_float_tensor(one) else (Kind.MEAN, None)
            for one in targets
        ]
        if not any(kind in (Kind.SUM, Kind.OTHER) for kind, _ in kinds):
            return target, output_gradients
        pairs: list[tuple[Any, Any]] = []
        for one, upstream, (kind, formula) in zip(targets, given, kinds, strict=True):
            upstream = tf.ones_like(one) if upstream is None else upstream
            if kind is Kind.SUM:
                upstream *= tf.cast(self._inflation, one.dtype)
            if kind is Kind.OTHER and formula is not None:
                _, terms = self._over_ranks(formula)
                pairs.extend((term, upstream * factor) for term, factor in terms)
            else:
                pairs.append((one, upstream))
        return [one for one, _ in pairs], [upstream for _, upstream in pairs]

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
            with self._outermost(), self.layer_state.unrecorded():
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
                    self._build_metric(metric, args, kwargs)
                before = self._values_now(metric.variables)
                result = update_state(metric, *args, **kwargs)
                self._keep_only_what_counted(before)
                return result

        return update_counted

    def _build_metric(self, metric: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Creates a metric's variables; what is computed for that is thrown away."""
        self._builds_metric = True
        try:
            internals.build_metric(metric, args, kwargs)
        finally:
            self._builds_metric = False

    def _with_share(self, update_state: Callable[..., Any]) -> Callable[..., Any]:
        """A number that was computed from this part counts with the part's share.

        Without that, a mean over ranks of unequal parts would not be the mean over samples.
        Keras's own tracker of the loss passes the size of the part as a weight, which is right.
        """

        @wraps(update_state)
        def update_with_share(metric: Any, values: Any, sample_weight: Any = None) -> Any:
            numbers = keras.ops.convert_to_tensor(values)
            if isinstance(numbers, keras.Variable):
                numbers = numbers.value
            if numbers.dtype.is_floating and not self._graph.is_batched(numbers):
                if not self._builds_metric:
                    values = self.as_mean(numbers)
                share = tf.cast(self.share, numbers.dtype)
                if sample_weight is None:
                    sample_weight = tf.ones_like(numbers) * share
                elif self._is_fixed(sample_weight):
                    sample_weight = tf.cast(sample_weight, numbers.dtype) * share
            return update_state(metric, values, sample_weight)

        return update_with_share

    def _is_fixed(self, weight: Any) -> bool:
        """Whether a weight has nothing to do with this rank's samples, as far as can be known."""
        if self._graph.is_number_of_rows(weight):
            return False
        return not isinstance(weight, tf.Tensor) or self._graph.is_fixed(weight)

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
        shares = [self.as_mean(logs[name]) * tf.cast(self.share, logs[name].dtype) for name in own]
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


class Share:
    """This rank's share of the global batch, for all functions that a step calls.

    A tensor is of use in its own graph only. A function of the user's that is traced in one step
    and called by others as well reads a variable instead, which each step writes.
    """

    def __init__(self, value: tf.Tensor) -> None:
        self._value = value
        self._graph = _current_graph()
        _share_of_step().assign(value)

    def is_of_current_graph(self) -> bool:
        return _current_graph() is self._graph

    def value(self) -> tf.Tensor:
        if self.is_of_current_graph():
            return self._value
        return tf.convert_to_tensor(_share_of_step())


def _current_graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


@cache
def _share_of_step() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(1.0, trainable=False, dtype=tf.float64)


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


def _is_float_tensor(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def _is_variable(source: Any) -> bool:
    return isinstance(source, (tf.Variable, keras.Variable))


def _can_be_empty(part: MicroBatch) -> bool:
    """Whether this rank may have no sample, judged by the shapes known in advance."""
    leaves = [leaf for leaf in tf.nest.flatten(part.data) if leaf is not None]
    rows = {leaf.shape[0] for leaf in leaves if leaf.shape.rank}
    return bool(rows & {None, 1})
