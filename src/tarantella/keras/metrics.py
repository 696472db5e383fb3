"""Metrics of one step, as metrics of the global batch.

Each rank updates the state of its metrics with its own samples. The state is summed over the
ranks when a result is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella.data.micro_batch import MicroBatch
from tarantella.graph.channel import Channel
from tarantella.graph.engine import channel
from tarantella.internals import keras as internals
from tarantella.keras import hooks
from tarantella.keras.batch_reductions import BatchGraph
from tarantella.keras.global_numbers import GlobalNumbers
from tarantella.keras.hooks import Handler, Hook
from tarantella.keras.step_share import StepShare
from tarantella.runtime import world


class Metrics:
    """The metrics of one step.

    Args:
        micro_batch: The data.
        share: This rank's share of the global batch.
        graph: How tensors depend on the samples.
        numbers: The numbers in the user's code, over all ranks.
    """

    def __init__(
        self,
        micro_batch: MicroBatch,
        share: StepShare,
        graph: BatchGraph,
        numbers: GlobalNumbers,
    ) -> None:
        self._share = share
        self._graph = graph
        self._numbers = numbers
        self._channel = channel("metrics")
        self._can_be_empty = _can_be_empty(micro_batch)
        self._global_results: list[tf.Tensor] = []

    def handlers(self) -> dict[Hook, Handler]:
        """The handlers for the hooks in Keras."""
        return {hooks.UPDATE_METRIC: self._update, hooks.METRIC_RESULT: self._result}

    def nested(self) -> dict[Hook, Handler | None]:
        """The handlers within a call that a step handles.

        What Keras calls there is left alone, but numbers always count with this rank's share.
        """
        return {**dict.fromkeys(hooks.OUTERMOST_ONLY), hooks.UPDATE_METRIC: self._update_nested}

    def _update(self, update_state: Handler, metric: Any, *args: Any, **kwargs: Any) -> Any:
        if internals.in_stateless_scope():
            return self._update_nested(update_state, metric, *args, **kwargs)
        with hooks.handling(self.nested()):
            if self._can_be_empty and not internals.has_all_variables(metric):
                with hooks.handling({hooks.UPDATE_METRIC: self._update_symbolically}):
                    internals.build_metric(metric, args, kwargs)
            before = self._values_now(metric.variables)
            result = self._update_nested(update_state, metric, *args, **kwargs)
            self._keep_only_what_counted(before)
            return result

    def _update_nested(self, update_state: Handler, metric: Any, *args: Any, **kwargs: Any) -> Any:
        if _records_numbers(update_state):
            as_mean, share = self._numbers.as_mean, self._share.value()
            return self._update_with_share(update_state, metric, as_mean, share, *args, **kwargs)
        return update_state(metric, *args, **kwargs)

    def _update_symbolically(
        self, update_state: Handler, metric: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """The same, where the result is discarded, and any share will do."""
        if _records_numbers(update_state):
            share = tf.ones((), tf.float64)
            return self._update_with_share(
                update_state, metric, tf.identity, share, *args, **kwargs
            )
        return update_state(metric, *args, **kwargs)

    def _update_with_share(
        self,
        update_state: Handler,
        metric: Any,
        as_mean: Callable[[tf.Tensor], tf.Tensor],
        share: tf.Tensor,
        values: Any,
        sample_weight: Any = None,
    ) -> Any:
        """A number that was computed from this micro-batch counts with its share.

        Without that, a mean over ranks of unequal micro-batches would not be the mean over
        samples. Keras's own tracker of the loss passes the size of the micro-batch as a weight,
        which is right.
        """
        numbers = keras.ops.convert_to_tensor(values)
        if isinstance(numbers, keras.Variable):
            numbers = numbers.value
        if numbers.dtype.is_floating and not self._graph.is_batched(numbers):
            values = as_mean(numbers)
            share = tf.cast(share, numbers.dtype)
            if sample_weight is None:
                sample_weight = tf.ones_like(numbers) * share
            elif self._is_fixed(sample_weight):
                sample_weight = tf.cast(sample_weight, numbers.dtype) * share
        return update_state(metric, values, sample_weight)

    def _is_fixed(self, weight: Any) -> bool:
        """Whether a weight does not depend on this rank's samples, as far as can be known."""
        if self._graph.is_number_of_rows(weight):
            return False
        return not isinstance(weight, tf.Tensor) or self._graph.is_fixed(weight)

    def _result(self, result: Handler, metric: Any) -> Any:
        if internals.in_stateless_scope():
            return result(metric)
        return self.results_of(lambda: result(metric), [metric])

    def results_of(
        self, compute: Callable[[], Any], metrics: Iterable[Any], over_ranks: bool = True
    ) -> Any:
        """What `compute` makes of the state that metrics have over all ranks, or on this one."""
        with hooks.handling(self.nested()):
            if over_ranks:
                results = global_results(compute, metrics, self._channel)
            else:
                results = _values(compute())
        self._global_results.extend(keras.tree.flatten(results))
        return results

    def global_logs(self, logs: Any) -> Any:
        """The logs of a step, with numbers that are no metric's result averaged over samples."""
        if not isinstance(logs, dict):
            return logs
        own = [name for name, value in logs.items() if self._is_own_number(value)]
        shares = [self._share.times(self._numbers.as_mean(logs[name])) for name in own]
        sums = self._channel.allreduce(shares, threshold=np.iinfo(np.int64).max)
        return {**logs, **dict(zip(own, sums, strict=True))}

    def _is_own_number(self, value: Any) -> bool:
        if not isinstance(value, tf.Tensor) or any(value is one for one in self._global_results):
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
            variable.assign(tf.where(self._share.has_samples(), variable.value, value))


def global_results(compute: Callable[[], Any], metrics: Iterable[Any], channel: Channel) -> Any:
    """What `compute` makes of the state that metrics have over all ranks."""
    variables = state_of(metrics)
    sums = channel.allreduce(contributions(variables), threshold=np.iinfo(np.int64).max)
    return results_of_sums(compute, variables, sums)


def state_of(metrics: Iterable[Any]) -> list[Any]:
    """The variables of metrics."""
    return [variable for metric in metrics for variable in metric.variables]


def contributions(variables: Iterable[Any]) -> list[tf.Tensor]:
    """What this rank adds to the state of metrics.

    The ranks' values of a variable add up, unless its `aggregation` says that they are to be
    averaged, or that the master's value stands for all.
    """
    values = []
    for variable in variables:
        value = tf.convert_to_tensor(variable.value)
        if variable.aggregation == "only_first_replica" and not world.is_master_rank():
            value = tf.zeros_like(value)
        values.append(value)
    return values


def results_of_sums(
    compute: Callable[[], Any], variables: Sequence[Any], sums: Sequence[tf.Tensor]
) -> Any:
    """What `compute` makes of the sums of all ranks' contributions."""
    values = [
        total / tf.cast(world.get_size(), total.dtype) if variable.aggregation == "mean" else total
        for variable, total in zip(variables, sums, strict=True)
    ]
    with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
        return _values(compute())  # a variable has its global value in here only


def _values(results: Any) -> Any:
    """The results of metrics, with the values of those that are variables."""
    return keras.tree.map_structure(
        lambda result: result.value if isinstance(result, keras.Variable) else result, results
    )


def _records_numbers(update_state: Handler) -> bool:
    """Whether this is the method of Keras that records numbers which users may compute."""
    recording = (keras.metrics.Mean.update_state, keras.metrics.Sum.update_state)
    return update_state in map(hooks.unhooked, recording)


def _can_be_empty(micro_batch: MicroBatch) -> bool:
    """Whether this rank may have no sample, judged by the shapes known in advance."""
    leaves = [leaf for leaf in tf.nest.flatten(micro_batch.data) if leaf is not None]
    rows = {leaf.shape[0] for leaf in leaves if leaf.shape.rank}
    return bool(rows & {None, 1})
