"""Python functions as operations of a TensorFlow graph, for as long as the graph exists.

TensorFlow keeps every function that a graph calls forever, with all that it refers to: the buffers
of a model that is long gone, the data it was trained on. So TensorFlow gets a function that only
knows where to find the real one, and graphs keep the real one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tarantella.internals.tensorflow import enclosing_graphs, run_independently


class _Kept:
    """A function that graphs keep."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


_kept_forever: list[_Kept] = []


def host_call(
    function: Callable[..., Any],
    tensors: Sequence[tf.Tensor],
    dtypes: Any,
    stateful: bool = True,
    independent: bool = False,
) -> Any:
    """Calls a function of NumPy arrays, as `tf.numpy_function` does.

    The function lives as long as the graph that is being traced, or one around it.

    Args:
        function: The function.
        tensors: Its arguments.
        dtypes: The types of its results.
        stateful: Whether it has to be called each time.
        independent: Whether only data and control dependencies say when it is called. Otherwise
            TensorFlow calls all such functions of a graph one after the other, in the order in
            which they were traced.
    """
    if tf.executing_eagerly():
        return tf.numpy_function(function, tensors, dtypes, stateful)
    kept = _Kept(function)
    _keep(kept)
    find = weakref.ref(kept)

    def call(*arrays: Any) -> Any:
        there = find()
        if there is None:
            raise RuntimeError("A function was called whose graph is gone.")
        return there.function(*arrays)

    results = tf.numpy_function(call, tensors, dtypes, stateful)
    if independent:
        run_independently(tf.nest.flatten(results)[0].op)
    return results


def call_when_computed(
    function: Callable[[], Any], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Calls a function as soon as tensors have been computed; what it returns is ignored.

    On a GPU, operations end before their results are there. A value of each tensor that is copied
    to the host shows when they are.

    Returns:
        A tensor that depends on the call.
    """

    def call(*values: Any) -> bool:
        del values
        function()
        return True

    copied: list[tf.Tensor] = []
    if _computes_ahead():
        copied = [tf.reshape(tensor, [-1])[:1] for tensor in tensors if _has_numbers(tensor)]
    with tf.control_dependencies([] if tf.executing_eagerly() else tensors):
        return tf.nest.flatten(host_call(call, copied, [tf.bool], independent=True))


def _computes_ahead() -> bool:
    """Whether operations of this rank end before their results are there."""
    return bool(tf.config.list_logical_devices("GPU"))


def _has_numbers(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_complex)


def _keep(function: _Kept) -> None:
    graphs = enclosing_graphs()
    if graphs is None:  # nothing says how long it is needed
        _kept_forever.append(function)
        return
    for graph in graphs:
        graph._tnt_functions = [*getattr(graph, "_tnt_functions", []), function]
