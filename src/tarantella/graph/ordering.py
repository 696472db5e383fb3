"""Collectives that keep their order wherever in a program they are asked for.

A channel keeps the order within one graph. A step may also communicate in functions that call
each other, in branches of a condition, or in gradients that TensorFlow computes later. There
TensorFlow keeps the order of all that writes to one variable: the order in which the program was
traced, the same on all ranks. So each collective writes to one, before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import tensorflow as tf

from tarantella.graph.engine import device_hint

Result = TypeVar("Result")


def in_program_order(purpose: str, communicate: Callable[[], Result]) -> Result:
    """Returns what `communicate` returns, after all collectives that were traced before.

    Args:
        purpose: One of `world.PURPOSES`; the order is kept for each on its own.
        communicate: Returns a structure of tensors, the results of its collectives.
    """
    if tf.executing_eagerly() or device_hint():  # whose channel keeps this order
        return communicate()
    written = _variable(purpose)
    with tf.control_dependencies([written.assign_add(1)]):
        results = communicate()
    received = [
        leaf for leaf in tf.nest.flatten(results, expand_composites=True) if leaf is not None
    ]
    with tf.control_dependencies(received):
        written.assign_add(1)
    return results


@cache
def _variable(purpose: str) -> tf.Variable:
    del purpose  # each has its own
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int64)
