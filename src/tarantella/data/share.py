"""Which share of the current global batch this rank holds, as a number that a graph can read.

A custom training loop gets its data in one place and applies gradients in another. The share of
the batch that was handed out last goes from the one to the other through a variable: a step that
TensorFlow has traced once reads it anew each time it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import tensorflow as tf

from tarantella.runtime import world


class ThreadShares:
    """A share for each thread that makes graphs, so that threads do not disturb each other.

    A graph keeps reading the variable of the thread that made it. If that thread no longer
    uses its variable, whoever writes a share writes this one, too.
    """

    def __init__(self) -> None:
        self._variables: dict[int, tf.Variable] = {}

    def own(self, initial: float = 1.0) -> tf.Variable:
        """The variable of this thread."""
        thread = threading.get_ident()
        if thread not in self._variables:
            with tf.init_scope(), tf.device("CPU:0"):  # a step may be being traced
                self._variables[thread] = tf.Variable(initial, trainable=False, dtype=tf.float64)
        return self._variables[thread]

    def to_write(self, used_by: Collection[int]) -> list[tf.Variable]:
        """The variable of this thread, and those of threads that do not use theirs.

        Args:
            used_by: The threads that use theirs.
        """
        own = self.own()
        others = [v for thread, v in list(self._variables.items()) if thread not in used_by]
        return [own, *(variable for variable in others if variable is not own)]


_shares = ThreadShares()
# By thread: the samples of the batch handed out last, and how many loops are under way.
_counts: dict[int, tuple[int, int]] = {}
_loops: dict[int, int] = {}
_last: tuple[int, int] | None = None


def current() -> tf.Tensor:
    """This rank's share of the current global batch, in float64.

    Where no batch was handed out, all ranks hold equal shares.
    """
    return tf.convert_to_tensor(_shares.own(share_of(*current_counts())))


def current_counts() -> tuple[int, int]:
    """How many samples this rank holds, and how many there are in the current global batch."""
    thread = threading.get_ident()
    if thread in _loops:
        return _counts[thread]
    return _last or (1, world.get_size())


@contextmanager
def loop() -> Iterator[tuple[int, int]]:
    """A loop over batches in this thread, with the samples of the batch of a loop around it."""
    thread = threading.get_ident()
    outer = _counts[thread] = current_counts()
    _loops[thread] = _loops.get(thread, 0) + 1
    try:
        yield outer
    finally:  # perhaps in another thread, if this one has left the loop before its end
        _loops[thread] -= 1
        if not _loops[thread]:
            del _loops[thread], _counts[thread]


def set_current(count: int, total: int) -> None:
    """Makes `count` of `total` samples this rank's share from now on."""
    global _last
    _last = count, total
    thread = threading.get_ident()
    if thread in _loops:
        _counts[thread] = count, total
    for variable in _shares.to_write(used_by=_loops.keys()):
        variable.assign(share_of(count, total))


def share_of(count: int, total: int) -> float:
    """The share that `count` of `total` samples make up."""
    return count / total if total else 0.0
