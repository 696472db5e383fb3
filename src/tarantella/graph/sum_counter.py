"""The order of sums that TensorFlow takes by itself, and how far they have come.

No Python function runs when TensorFlow's collectives wait for other ranks. So each collective
writes to two variables, before and after it: TensorFlow keeps the order of all that writes to a
variable, and the watch for stalls reads from them whether this rank waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import tensorflow as tf

from tarantella.runtime import watch

Result = TypeVar("Result")


class SumCounter:
    """Counts the sums of one thread, which are taken one after the other.

    Args:
        purpose: What a rank waits in, for the watch.
    """

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        with tf.init_scope(), tf.device("CPU:0"):
            self._begun, self._done = (
                tf.Variable(0, trainable=False, dtype=tf.int64) for _ in range(2)
            )
        watch.also_watch(purpose, self.number_in_progress)

    def in_order(self, inputs: Sequence[tf.Tensor], communicate: Callable[[], Result]) -> Result:
        """Returns what `communicate` returns, after all sums that were traced before.

        Args:
            inputs: What has to be computed first. Only then does this rank wait for others.
            communicate: Returns a structure of tensors, the results of its collectives.
        """
        if tf.executing_eagerly():
            with watch.waiting(self._purpose):
                return communicate()
        with tf.control_dependencies(inputs):
            begin = self._begun.assign_add(1, read_value=False)
        with tf.control_dependencies([begin]):
            results = communicate()
        with tf.control_dependencies(tf.nest.flatten(results)):
            self._done.assign(self._begun, read_value=False)
        return results

    def number_in_progress(self) -> int | None:
        """The number of the sum that is being taken; None if there is none."""
        begun, done = int(self._begun.numpy()), int(self._done.numpy())
        return begun if begun != done else None


@cache
def sum_counter(hint: str, thread: str) -> SumCounter:
    """The counter of a thread.

    Args:
        hint: What TensorFlow's collectives use.
        thread: The thread's name; empty for the main thread.
    """
    del thread  # each has its own
    return SumCounter("a sum by NCCL" if hint == "nccl" else "a sum by TensorFlow's collectives")
