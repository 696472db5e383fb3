"""Numbers in the user's code, made to count as numbers of the global batch.

A number is a mean over samples, a sum, or a function of these; its graph shows which
(`batch_reductions`). Whatever it is, it is made to count as a mean does: multiplied by the shares
of the ranks and summed over them, it is the number of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella.graph.engine import channel
from tarantella.graph.ordering import in_program_order
from tarantella.keras.advice import Advice
from tarantella.keras.batch_reductions import BatchGraph, Formula, Operand, Reduction, is_eager
from tarantella.keras.step_share import StepShare

Term = tuple[tf.Tensor, tf.Tensor]


class GlobalNumbers:
    """What the numbers of one step are over the samples of all ranks.

    Args:
        share: This rank's share.
        graph: How tensors depend on the samples.
        advice: Tells the user what was not understood.
    """

    def __init__(self, share: StepShare, graph: BatchGraph, advice: Advice) -> None:
        self._share = share
        self._graph = graph
        self._advice = advice
        self._channel = channel("losses")

    def note_mean(self, number: tf.Tensor) -> tf.Tensor:
        """Notes that a number counts with the share of this rank, as a mean over samples does."""
        self._graph.remember(number, Reduction.MEAN)
        return number

    def note_sum(self, number: tf.Tensor) -> tf.Tensor:
        """Notes that the ranks' numbers add up."""
        self._graph.remember(number, Reduction.SUM)
        return number

    def as_mean(self, number: Any, is_own_loss: bool = False) -> Any:
        """A tensor that the user's code computed, made to count as a mean over samples does.

        With one entry for each sample it stands for their sum, as TensorFlow takes gradients and
        Keras adds up losses. It has to be called where the gradients of the result are recorded.

        Args:
            number: The tensor; anything else is returned as it is.
            is_own_loss: Whether it is what the user's own loss function returned.
        """
        if not is_float_tensor(number):
            return number
        kind, formula = self._kind_of(number, is_own_loss)
        if kind is Reduction.SUM:
            number = self._share.divide(number)
        elif kind is Reduction.OTHER and formula is not None:
            value, terms = self._over_ranks(formula)
            # The value over all ranks, with gradients that lead to this rank's samples.
            number = tf.stop_gradient(value)
            for term, coefficient in terms:
                number += tf.reduce_sum(coefficient * (term - tf.stop_gradient(term)))
        return self.note_mean(number)

    def added_loss(self, loss: Any, total: Any) -> Any:
        """What Keras makes of something handed to `add_loss`, counting as a mean does."""
        if loss.shape.rank and self._kind_of(loss)[0] is Reduction.SUM:
            return self.note_mean(self._share.divide(total))
        return self.as_mean(total)

    def targets_as_means(self, target: Any, output_gradients: Any) -> tuple[Any, Any]:
        """What to take gradients of, in place of what was computed, and the gradients of that.

        The tape has stopped recording: unlike in `as_mean`, nothing can be multiplied.
        """
        targets = tf.nest.flatten(target)
        given = [None] * len(targets)
        if output_gradients is not None:
            given = tf.nest.flatten(output_gradients)
        kinds = [
            self._kind_of(one, is_own_loss=True) if is_float_tensor(one) else (Reduction.MEAN, None)
            for one in targets
        ]
        if not any(kind in (Reduction.SUM, Reduction.OTHER) for kind, _ in kinds):
            return target, output_gradients
        pairs: list[tuple[Any, Any]] = []
        for one, upstream, (kind, formula) in zip(targets, given, kinds, strict=True):
            upstream = tf.ones_like(one) if upstream is None else upstream
            if kind is Reduction.SUM:
                upstream *= tf.cast(self._share.inverse(), one.dtype)
            if kind is Reduction.OTHER and formula is not None:
                _, terms = self._over_ranks(formula)
                pairs.extend((term, upstream * factor) for term, factor in terms)
            else:
                pairs.append((one, upstream))
        return [one for one, _ in pairs], [upstream for _, upstream in pairs]

    def state(self, value: tf.Tensor) -> tf.Tensor:
        """What a layer's state would be after a step with the global batch; a mean can wait."""
        if tf.executing_eagerly() or not self._share.is_of_current_graph():
            return value  # in a branch, say, that not all ranks may take
        formula = self._graph.formula(value) if value.shape.is_fully_defined() else None
        if formula is None or formula.kind not in (Reduction.SUM, Reduction.OTHER):
            return value
        return self._over_ranks(formula)[0]

    def sums_over_ranks(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums over the ranks of what the step or a function that it calls has computed."""
        everything = np.iinfo(np.int64).max
        return in_program_order("losses", lambda: self._channel.allreduce(tensors, everything))

    def _kind_of(
        self, number: tf.Tensor, is_own_loss: bool = False
    ) -> tuple[Reduction, Formula | None]:
        known = self._graph.known_kind(number)
        if known is not None:
            return known, None
        if number.shape.rank and self._graph.is_batched(number):
            return Reduction.SUM, None
        if is_eager(number):
            if is_own_loss:
                self._advice.number_of_eager_step()
            return Reduction.MEAN, None
        formula = self._graph.formula(number)
        if formula is None:
            self._advice.number_not_understood(number.op.name)
            return Reduction.MEAN, None
        return formula.kind, formula

    def _over_ranks(self, formula: Formula) -> tuple[tf.Tensor, list[Term]]:
        """The value of a formula over the global batch, and the terms of its gradient.

        Each term is a tensor of this rank and the factor with which a change of it changes the
        value, divided by the share of this rank.
        """
        operands = formula.operands
        combined = [operand for operand in operands if operand.kind is not Reduction.FIXED]
        weights = [self._weight(operand) for operand in combined]
        own = [
            tf.math.multiply_no_nan(tf.cast(operand.tensor, tf.float64), weight)
            for operand, weight in zip(combined, weights, strict=True)
        ]
        sums = self.sums_over_ranks([*own, *weights])
        of_all = {}
        factors = {}
        for operand, weight, total, all_weights in zip(
            combined, weights, sums[: len(own)], sums[len(own) :], strict=True
        ):
            divisor = all_weights if operand.kind is Reduction.MEAN else tf.ones_like(all_weights)
            of_all[id(operand)] = tf.cast(total / divisor, operand.tensor.dtype)
            factors[id(operand)] = tf.math.divide_no_nan(weight, divisor * self._share.value())
        values = [of_all.get(id(operand), operand.tensor) for operand in operands]
        value = formula.computed_from(values)
        terms = []
        for operand, slope in zip(operands, tf.gradients(value, values), strict=True):
            if slope is not None:
                slope = tf.stop_gradient(tf.convert_to_tensor(slope))
                factor = factors.get(id(operand), tf.ones((), tf.float64))
                terms.append((operand.tensor, slope * tf.cast(factor, slope.dtype)))
        return value, terms

    def _weight(self, operand: Operand) -> tf.Tensor:
        """The weight of this rank's mean or sum in that of all ranks."""
        if operand.kind is not Reduction.MEAN:
            return tf.cast(self._share.has_samples(), tf.float64)
        if operand.entries is None:
            return self._share.value()
        return tf.where(self._share.has_samples(), operand.entries, tf.zeros_like(operand.entries))


def is_float_tensor(value: Any) -> bool:
    """Whether something is a tensor of fractions."""
    return isinstance(value, tf.Tensor) and value.dtype.is_floating
