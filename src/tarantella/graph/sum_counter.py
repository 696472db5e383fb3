"""The order of sums that TensorFlow takes by itself, and how far they have come.

No Python function runs when TensorFlow's collectives wait for other ranks. TensorFlow keeps the
order of all that writes to a variable, wherever in a program it is: so each collective writes to
one, before and after it. Two others tell the watch for stalls whether this rank waits.

On a GPU, operations end before their results are there. A collective that waited for an operation
on the CPU would be issued only when its values are computed, which costs half a millisecond. So the
variable of the order is on the GPU. The others are on the CPU, and no collective waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import tensorflow as tf

from tarantella.runtime import times, watch

Result = TypeVar("Result")

_BY_NCCL = "a sum by NCCL"


class SumCounter:
    """Counts the sums of one thread, which are taken one after the other.

    Args:
        purpose: What a rank waits in, for the watch.
        device: Where the sums are taken.
    """

    def __init__(self, purpose: str, device: str) -> None:
        self._purpose = purpose
        with tf.init_scope():
            with tf.device(device):
                self._order = tf.Variable(0.0, trainable=False)
            with tf.device("CPU:0"):
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
        with tf.control_dependencies([self._order.assign(0.0, read_value=False)]):
            results = communicate()
        ended = tf.nest.flatten(results)
        with tf.control_dependencies(ended):
            self._order.assign(0.0, read_value=False)
        with tf.control_dependencies([begin, *ended]):
            self._done.assign(self._begun, read_value=False)
        return results

    def number_in_progress(self) -> int | None:
        """The number of the sum that is being taken; None if there is none."""
        begun, done = int(self._begun.numpy()), int(self._done.numpy())
        return begun if begun != done else None


class CompiledSumCounter:
    """Counts the functions with a sum that XLA compiles, for the watch.

    Nothing on the CPU waits for such a sum. So the watch looks whether the GPU gets anything done.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._begun = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._probe: threading.Thread | None = None
        watch.also_watch(_BY_NCCL, self.number_in_progress)

    def note(self) -> None:
        """Such a function is about to run."""
        with tf.device("CPU:0"):
            self._begun.assign_add(1, read_value=False)

    def number_in_progress(self) -> int | None:
        """The number of the last function, if the GPU has not ended it; None if it has."""
        number = int(self._begun.numpy())
        if self._probe is None or not self._probe.is_alive():
            self._probe = threading.Thread(target=_use_gpu, daemon=True, name="tnt-gpu-probe")
            self._probe.start()
            self._probe.join(times.TIME_FOR_GPU_TO_ANSWER)
        return number if self._probe.is_alive() else None


def _use_gpu() -> None:
    """Computes something on the GPU, after all that it has been given before."""
    (tf.zeros(()) + 1.0).numpy()


@cache
def compiled_sum_counter() -> CompiledSumCounter:
    """The counter of this process."""
    return CompiledSumCounter()


@cache
def sum_counter(hint: str, thread: str) -> SumCounter:
    """The counter of a thread.

    Args:
        hint: What TensorFlow's collectives use.
        thread: The thread's name; empty for the main thread.
    """
    del thread  # each has its own
    if hint == "nccl":
        return SumCounter(_BY_NCCL, "GPU:0")
    return SumCounter("a sum by TensorFlow's collectives", "CPU:0")
