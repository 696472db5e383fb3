"""The functions that operations of a TensorFlow graph call."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

CALLS = ("PartitionedCall", "StatefulPartitionedCall")

# Attributes of the graph of a function.
_OUTER_GRAPH = "outer_graph"
_CONTROL_DEPENDENCIES = "experimental_acd_manager"


def called_graph(operation: tf.Operation, attribute: str = "f") -> Any | None:
    """The graph of the function that an attribute of an operation names, if it is known."""
    function = operation.graph._get_function(operation.get_attr(attribute).name)
    return None if function is None else function.graph


def enclosing_graphs() -> list[Any] | None:
    """The graph being traced, and those of the functions that trace it; None if unknown."""
    graph = tf.compat.v1.get_default_graph()
    graphs = []
    while hasattr(graph, _OUTER_GRAPH):
        graphs.append(graph)
        graph = getattr(graph, _OUTER_GRAPH)
    return graphs or None


def run_independently(operation: tf.Operation) -> None:
    """Has TensorFlow run an operation for its effects, but not in the order of the program.

    Where TensorFlow has no such thing, the operation stays in program order: right, but slower.
    """
    manager = getattr(operation.graph, _CONTROL_DEPENDENCIES, None)
    run = getattr(manager, "run_independently", None)
    if run is not None:
        run(operation)
