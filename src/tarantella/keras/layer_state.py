"""State that layers write while they are trained, combined over the ranks in every step.

Moving averages of batch normalization, counters, the vectors of spectral normalization, a
codebook: each rank computes them from its micro-batch. At the end of the step they are combined,
so that all ranks always hold the same state, and validation, saving and callbacks need nothing
special. Weights that no layer writes, such as frozen ones, cost nothing.

What a variable becomes depends on its `aggregation`, as in Keras:

- "none" and "mean": the mean over the ranks, weighted by their numbers of samples; or what its
  formula gives for the global batch, where a graph shows that it is not a mean but, say, a sum;
- "sum": what it was before the step plus the changes of all ranks;
- "only_first_replica", and integers: the master's, which always has samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella.data.micro_batch import MicroBatch
from tarantella.errors import InputError
from tarantella.graph.compiling import is_compiling, refuse
from tarantella.graph.engine import channel
from tarantella.internals import keras as internals
from tarantella.keras import hooks, master_weights
from tarantella.keras.hooks import Handler, Hook
from tarantella.runtime import world

# Marks variables that layers were seen to write in training. A user's function that is already
# traced keeps writing them, and no hook sees it.
_WRITTEN = "_tnt_written_in_training"


class LayerState:
    """The state of a model's layers in one step of this rank.

    Args:
        model: The model.
        micro_batch: The data.
        is_fixed: Tells whether a tensor is known to be the same on all ranks.
        over_ranks: Returns what a tensor is over the samples of all ranks, if that is not the
            mean of the ranks' and can be known; otherwise the tensor.
    """

    def __init__(
        self,
        model: keras.Model,
        micro_batch: MicroBatch,
        is_fixed: Callable[[tf.Tensor], bool],
        over_ranks: Callable[[tf.Tensor], tf.Tensor] = lambda value: value,
    ) -> None:
        _check_stateful_layers(model, micro_batch)
        self._model = model
        self._micro_batch = micro_batch
        self._is_fixed = is_fixed
        self._over_ranks = over_ranks
        self._has_samples = micro_batch.count > 0
        self._written: dict[int, Any] = {}
        self._combining: list[Any] = []
        self._before = {
            id(variable): tf.identity(variable.value)
            for variable in self._variables()
            if variable.aggregation == "sum"
        }
        if self._before and is_compiling():
            refuse("a variable whose changes add up")

    def _variables(self) -> list[Any]:
        return [*self._model.non_trainable_variables, *self._model.trainable_variables]

    def handlers(self) -> dict[Hook, Handler]:
        """The handlers for the hooks in Keras."""
        return {hooks.ASSIGN_VARIABLE: self._assign}

    def _assign(self, assign: Handler, variable: Any, value: Any) -> Any:
        if not internals.in_stateless_scope():
            value = self._record(variable, value)
        return assign(variable, value)

    def _record(self, variable: Any, value: Any) -> Any:
        """Notes that a variable is written, and returns what to write."""
        # What a step makes of weights alone, as their moving averages, needs no combining.
        is_tensor = isinstance(value, tf.Tensor)
        if variable.trainable and (not is_tensor or self._is_fixed(value)):
            return value
        self._written[id(variable)] = variable
        is_of_model = any(variable is one for one in self._variables())
        if is_tensor and is_of_model and variable.aggregation in ("none", "mean"):
            return self._over_ranks(value)
        return value

    def note_written(self, variables: Sequence[Any]) -> None:
        """Notes that variables are written where no hook sees it."""
        self._written.update({id(variable): variable for variable in variables})

    @property
    def written(self) -> list[Any]:
        """The variables that layers have written so far; not those that an optimizer has."""
        return [variable for variable in self._variables() if id(variable) in self._written]

    def combine(self, trained: bool) -> None:
        """Gives all ranks the same state, of all their samples.

        Args:
            trained: Whether the step was one of training.
        """
        contributions = self.contributions(trained)
        # No rank waits for it before the next step; it begins when the layers have written.
        sums = channel("layers").allreduce(contributions, threshold=np.iinfo(np.int64).max)
        self.assign(sums, self._micro_batch.total)

    def contributions(self, trained: bool) -> list[tf.Tensor]:
        """What this rank adds to the state of layers.

        Args:
            trained: Whether the step was one of training.
        """
        self._combining = self._to_combine(trained)
        return [self._contribution(variable) for variable in self._combining]

    def assign(self, sums: Sequence[tf.Tensor], samples: tf.Tensor) -> None:
        """Makes the sums of all ranks' contributions the state of the layers.

        Args:
            sums: The sums, in the order of the contributions.
            samples: How many samples the global batch has.
        """
        for variable, total in zip(self._combining, sums, strict=True):
            variable.assign(self._combined(variable, total, samples))

    def _to_combine(self, trained: bool) -> list[Any]:
        layers = internals.flat_layers(self._model)
        left_out = {id(v) for layer in layers for v in _left_to_ranks(layer)}
        written = {id(variable) for variable in self.written}
        if trained:
            for variable in self.written:
                setattr(variable, _WRITTEN, True)
            frozen = {id(v) for layer in layers if not layer.trainable for v in layer.variables}
            before = {id(v) for v in self._variables() if hasattr(v, _WRITTEN)}
            written |= before - frozen
        written -= left_out
        return [
            variable
            for variable in self._variables()
            if id(variable) in written and not master_weights.is_seed(variable)
        ]

    def _contribution(self, variable: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(variable.value)
        if id(variable) in self._before:
            change = _addable(value) - _addable(self._before[id(variable)])
            return tf.where(self._has_samples, change, tf.zeros_like(change))
        if _is_averaged(variable):
            # Counts keep whole numbers whole, where shares would round. A rank without samples
            # contributes zeros, whatever it computed.
            value = _addable(value)
            return tf.math.multiply_no_nan(value, tf.cast(self._micro_batch.count, value.dtype))
        return value if world.is_master_rank() else tf.zeros_like(value)

    def _combined(self, variable: Any, total: tf.Tensor, samples: tf.Tensor) -> tf.Tensor:
        if id(variable) in self._before:
            total += _addable(self._before[id(variable)])
        elif _is_averaged(variable):
            total /= tf.cast(samples, total.dtype)
        return tf.cast(total, variable.dtype)


def _is_averaged(variable: Any) -> bool:
    is_fraction = tf.as_dtype(variable.dtype).is_floating
    return bool(is_fraction and variable.aggregation != "only_first_replica")


def _addable(value: tf.Tensor) -> tf.Tensor:
    """In a type in which the samples of a batch can be added up."""
    return tf.cast(value, tf.float32) if value.dtype in (tf.float16, tf.bfloat16) else value


def _left_to_ranks(layer: keras.layers.Layer) -> list[Any]:
    """The variables of a layer that need no combining."""
    if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
        return list(layer.non_trainable_variables)  # of the global batch already
    return []


def _check_stateful_layers(model: keras.Model, micro_batch: MicroBatch) -> None:
    """Raises an error if a stateful layer is not made for the size of a micro-batch."""
    leaves = [leaf for leaf in tf.nest.flatten(micro_batch.data) if isinstance(leaf, tf.Tensor)]
    rows = next((leaf.shape[0] for leaf in leaves if leaf.shape.rank), None)
    for layer in internals.flat_layers(model):
        if not (isinstance(layer, keras.layers.RNN) and layer.stateful and layer.states):
            continue
        expected = int(tf.nest.flatten(layer.states)[0].shape[0])
        if rows is not None and rows != expected:
            raise InputError(
                f"The layer '{layer.name}' is stateful and made for {expected} samples, but rank "
                f"{world.get_rank()} has {rows} of a batch. Make the model for micro-batches, "
                f"`keras.Input(batch_shape=({rows}, ...))`, with a global batch size that is a "
                "multiple of the number of ranks."
            )
