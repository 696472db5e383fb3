"""The functions that operations of a TensorFlow graph call."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def called_graph(operation: tf.Operation, attribute: str = "f") -> Any | None:
    """The graph of the function that an attribute of an operation names, if it is known."""
    function = operation.graph._get_function(operation.get_attr(attribute).name)
    return None if function is None else function.graph
