"""What the function of a `map`, `filter` or `interleave` does, as its traced graph shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tarantella.internals.tensorflow import (
    concrete,
    function_in,
    functions,
    input_spec,
    traced_again,
)

# Python functions, which may do anything.
PYTHON_NODES = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
# These pass their last inputs on to functions: all of them, or all but the one they branch on.
_CALLING_NODES = (
    *("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf"),
    *("Case", "StatelessCase", "While", "StatelessWhile"),
)
_WRITING_NODES = re.compile(
    "Assign.*Variable|Resource(Scatter|StridedSliceAssign)|LookupTable(Insert|Remove|Import)"
)


def nodes(function: Any) -> list[Any]:
    """The definitions of all operations in a traced function, written out once."""
    attributes = vars(function)
    if "_tnt_nodes" not in attributes:
        scopes = node_scopes(concrete(function).graph.as_graph_def())
        attributes["_tnt_nodes"] = [node for scope in scopes for node in scope]
    return list(attributes["_tnt_nodes"])


def node_scopes(definition: Any) -> list[Sequence[tf.compat.v1.NodeDef]]:
    """The operations of a function, and those of each that it calls."""
    return [definition.node, *(one.node_def for one in definition.library.function)]


def called(node: tf.compat.v1.NodeDef) -> Iterator[Any]:
    """The functions that a node refers to, as attributes with a `name`."""
    for attribute in node.attr.values():
        if attribute.HasField("func"):
            yield attribute.func
        yield from attribute.list.func


def for_any_batch_size(mapped: tf.data.Dataset) -> Any | None:
    """The function of a `map` of batches, for batches of any size.

    It has to be traced again if it was traced for one size. None: the new trace differs from the
    old one, because what the function refers to has changed, as in a loop.
    """
    (function,) = functions(mapped)
    spec = tf.nest.map_structure(_of_any_size, input_spec(function))
    if spec == input_spec(function):
        return function
    if not _is_alike(function, traced_again(function, input_spec(function))):
        return None
    return traced_again(function, spec)


def _of_any_size(spec: Any) -> Any:
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _is_alike(function: Any, other: Any) -> bool:
    """Whether two functions do the same with the same inputs; unknown for Python functions."""
    inputs = (concrete(one).captured_inputs for one in (function, other))
    return (
        all(one is another for one, another in zip(*inputs, strict=False))
        and not any(node.op in PYTHON_NODES for node in nodes(function))
        and _written_out(function) == _written_out(other)
    )


def _written_out(function: Any) -> list[Any]:
    """A function's operations, without the names that TensorFlow counts up."""
    definition = concrete(function).graph.as_graph_def()
    inner = {one.signature.name: one for one in definition.library.function}

    def written(nodes: Iterable[tf.compat.v1.NodeDef]) -> list[Any]:
        return [written_node(node) for node in nodes]

    def written_node(node: tf.compat.v1.NodeDef) -> list[Any]:
        bodies = [inner[one.name] for one in called(node) if one.name in inner]
        plain = tf.compat.v1.NodeDef()
        plain.CopyFrom(node)
        for one in called(plain):
            one.name = ""
        return [
            plain.SerializeToString(deterministic=True),
            [[written(one.node_def), sorted(one.ret.items())] for one in bodies],
        ]

    return written(definition.node)


def is_identity(mapped: tf.data.Dataset) -> bool:
    """Whether a `map` returns what it gets; TensorFlow leaves such a `map` out."""
    (function,) = functions(mapped)
    graph = concrete(function).graph
    if len(graph.inputs) != len(graph.outputs) or concrete(function).captured_inputs:
        return False
    if any(op.type not in ("Placeholder", "Identity", "NoOp") for op in graph.get_operations()):
        return False
    return all(
        _origin(output) is one for output, one in zip(graph.outputs, graph.inputs, strict=True)
    )


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def changes_state(function: Any) -> bool:
    """Whether a function writes to a variable or table, so that its calls depend on each other."""
    writes = any(_WRITING_NODES.match(node.op) for node in nodes(function))
    return writes and not all(map(is_keras_seed, concrete(function).graph.variables))


def is_keras_seed(variable: Any) -> bool:
    """Whether a variable is the state of a Keras seed generator."""
    return "seed_generator_state" in variable.name


def generator_states(function: Any) -> list[Any]:
    """The variables that are the state of a `tf.random.Generator` that a function draws from."""
    traced = concrete(function)
    graph = traced.graph
    drawn = _drawn_inputs(graph)
    first = len(graph.inputs) - len(traced.captured_inputs)
    handles = [one for i, one in enumerate(traced.captured_inputs) if first + i in drawn]
    return [
        variable
        for variable in graph.variables
        if any(variable.handle is handle for handle in handles)
    ]


def _drawn_inputs(graph: Any) -> set[int]:
    """The positions of those inputs of a graph that are states of generators it draws from."""
    positions = {id(tensor): position for position, tensor in enumerate(graph.inputs)}
    drawn = []
    for op in graph.get_operations():
        if op.type == "RngReadAndSkip":
            drawn.append(op.inputs[0])
        elif op.type in _CALLING_NODES:
            for one in called(op.node_def):
                body = function_in(graph, one.name).graph
                before = len(op.inputs) - len(body.inputs)
                drawn += [op.inputs[before + position] for position in _drawn_inputs(body)]
    return {positions[id(one)] for one in map(_origin, drawn) if id(one) in positions}
