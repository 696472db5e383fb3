"""What part of the current global batch this rank holds, as a number that a graph can read.

A training loop of the user's own gets its data in one place and applies gradients in another.
The share of the batch that was handed out last goes from there to here, through a variable: a
step that TensorFlow has traced once reads it anew each time it runs.
"""

from __future__ import annotations

import tensorflow as tf

from tarantella.runtime import world

_counts: tuple[int, int] | None = None
_share: tf.Variable | None = None


def current() -> tf.Tensor:
    """This rank's share of the current global batch, in float64.

    Where no batch was handed out, all ranks hold equal parts.
    """
    return tf.convert_to_tensor(_variable())


def current_counts() -> tuple[int, int]:
    """How many samples this rank holds, and how many there are in the current global batch."""
    return _counts or (1, world.get_size())


def set_current(count: int, total: int) -> None:
    """Makes `count` of `total` samples this rank's share from now on."""
    global _counts
    _counts = (count, total)
    _variable().assign(share_of(count, total))


def share_of(count: int, total: int) -> float:
    """The share that `count` of `total` samples are."""
    return count / total if total else 0.0


def _variable() -> tf.Variable:
    global _share
    if _share is None:
        with tf.init_scope(), tf.device("CPU:0"):  # it may be needed first while a step is traced
            _share = tf.Variable(share_of(*current_counts()), trainable=False, dtype=tf.float64)
    return _share
