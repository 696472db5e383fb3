"""This rank's share of the global batch in one step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from tarantella.data.micro_batch import MicroBatch
from tarantella.data.share import ThreadShares
from tarantella.graph.compiling import is_compiling, refuse
from tarantella.keras.thread_functions import training_threads

_shares = ThreadShares()


def prepare() -> None:
    """Makes the variable of this thread."""
    _shares.own()


class StepShare:
    """This rank's samples divided by those of all, for every function that a step calls.

    A tensor can be used only in its own graph. A user's function that is traced in one step and
    called by others as well reads a variable instead, which each step writes.
    """

    def __init__(self, micro_batch: MicroBatch) -> None:
        with nullcontext() if is_compiling() else tf.device("CPU:0"):  # where the numbers are
            count, total = (tf.cast(n, tf.float64) for n in (micro_batch.count, micro_batch.total))
            self._value = count / total
        self._graph = _current_graph()
        self._variable = _shares.own()
        if is_compiling():  # the variable is in host memory, where XLA cannot write
            return
        for variable in _shares.to_write(used_by=training_threads()):
            variable.assign(self._value)

    def is_of_current_graph(self) -> bool:
        """Whether the step itself is being traced or run, and not a function that it calls."""
        return _current_graph() is self._graph

    def value(self) -> tf.Tensor:
        """The share, in float64."""
        if self.is_of_current_graph():
            return self._value
        if is_compiling():
            refuse("a function in a step that reads the share of this rank")
        return tf.convert_to_tensor(self._variable)

    def has_samples(self) -> tf.Tensor:
        """Whether this rank has a sample of its own."""
        return self.value() > 0

    def times(self, number: tf.Tensor) -> tf.Tensor:
        """A mean over this rank's samples, as its contribution to that of the global batch."""
        return number * tf.cast(self.value(), number.dtype)

    def inverse(self) -> tf.Tensor:
        """One divided by the share; 0 if the share is 0."""
        return tf.math.divide_no_nan(tf.ones((), tf.float64), self.value())

    def divide(self, number: tf.Tensor) -> tf.Tensor:
        """A sum over this rank's samples, divided by the share that it is multiplied by later."""
        return number * tf.cast(self.inverse(), number.dtype)


def _current_graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
