"""Python functions as operations of a TensorFlow graph, for as long as there is the graph.

TensorFlow keeps every function that a graph calls for ever, with all that hangs on it: the
buffers of a model that is long gone, the data it was trained on. So it is given a function
that only knows where to find the real one, and graphs keep that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf


class _Kept:
    """A function that graphs keep."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


def host_call(
    function: Callable[..., Any],
    tensors: Sequence[tf.Tensor],
    dtypes: Any,
    stateful: bool = True,
    independent: bool = False,
) -> Any:
    """Calls a function of NumPy arrays, as `tf.numpy_function` does.

    The function lives as long as the graph that is being made, or one around it.

    Args:
        function: The function.
        tensors: Its arguments.
        dtypes: The types of its results.
        stateful: Whether it has to be called each time.
        independent: Whether nothing but data and control dependencies say when it is called.
            Otherwise TensorFlow calls all such functions of a graph one after the other, in the
            order in which they were traced.
    """
    if tf.executing_eagerly():
        return tf.numpy_function(function, tensors, dtypes, stateful)
    kept = _Kept(function)
    for graph in _graphs():
        graph._tnt_functions = [*getattr(graph, "_tnt_functions", []), kept]
    find = weakref.ref(kept)

    def call(*arrays: Any) -> Any:
        there = find()
        if there is None:
            raise RuntimeError("A function was called whose graph is gone.")
        return there.function(*arrays)

    results = tf.numpy_function(call, tensors, dtypes, stateful)
    if independent:
        _release(tf.nest.flatten(results)[0].op)
    return results


def _release(operation: tf.Operation) -> None:
    """Has TensorFlow run an operation for its effects, but not in the order of the program."""
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)


def _graphs() -> Iterator[Any]:
    """The graph of the function that is being traced, and those of functions that trace it."""
    graph = tf.compat.v1.get_default_graph()
    while hasattr(graph, "outer_graph"):
        yield graph
        graph = graph.outer_graph
