"""The seeds in the functions of transformations: reading them, and giving a function others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tarantella.data.dataset_functions import called, node_scopes
from tarantella.internals.tensorflow import DATASET_FUNCTION, captured, concrete, with_concrete

ChangeSeeds = Callable[[int, int], tuple[int, int]]

NO_SEED = (0, 0)  # what TensorFlow takes for "none"

# Datasets with an order of their own, by their names inside a function, and where their seeds are
# among their inputs.
ORDERING_NODES = {"ShuffleDataset": slice(2, 4), "RandomDataset": slice(0, 2)}

_copies = itertools.count()


def seeds(function: Any) -> list[tuple[int, int]]:
    """The seeds of all random operations and datasets in a function."""
    attributes = vars(function)
    if "_tnt_seeds" in attributes:
        return list(attributes["_tnt_seeds"])
    found: list[tuple[int, int]] = []

    def note(seed: int, seed2: int) -> tuple[int, int]:
        found.append((seed, seed2))
        return seed, seed2

    for scope in node_scopes(concrete(function).graph.as_graph_def()):
        _change_seeds(scope, note)
    attributes["_tnt_seeds"] = found
    return list(found)


def with_seeds(function: Any, change: ChangeSeeds) -> Any:
    """The same traced function with other seeds.

    It is not traced again: what it refers to may be something else by now.
    """
    original = concrete(function)
    definition = original.graph.as_graph_def()
    for scope in node_scopes(definition):
        _change_seeds(scope, change)
    _rename_functions(definition, f"_tnt_{next(_copies)}")
    own = original.graph.inputs[: len(original.graph.inputs) - len(original.captured_inputs)]

    @tf.function(
        input_signature=[tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in own],
        autograph=False,
        experimental_attributes=DATASET_FUNCTION,
    )
    def changed(*tensors: tf.Tensor) -> Any:
        graph = tf.compat.v1.get_default_graph()
        inputs = [*tensors, *(captured(graph, one) for one in original.captured_inputs)]
        names = [tensor.name for tensor in original.graph.inputs]
        return tf.graph_util.import_graph_def(
            definition,
            input_map=dict(zip(names, inputs, strict=True)),
            return_elements=[tensor.name for tensor in original.graph.outputs],
            name="",
        )

    again = with_concrete(function, changed.get_concrete_function())
    for written_out in ("_tnt_nodes", "_tnt_seeds"):
        vars(again).pop(written_out, None)
    return again


def _change_seeds(scope: Sequence[tf.compat.v1.NodeDef], change: ChangeSeeds) -> None:
    constants = {node.name: node for node in scope if node.op == "Const"}
    for node in scope:
        if "seed" in node.attr and "seed2" in node.attr:
            new = change(node.attr["seed"].i, node.attr["seed2"].i)
            node.attr["seed"].i, node.attr["seed2"].i = new
            continue
        # Those of a dataset are inputs; we see them where they are constants of the same function.
        inputs = [
            name.split(":")[0]
            for kind, positions in ORDERING_NODES.items()
            if node.op.startswith(kind)
            for name in node.input[positions]
        ]
        held = map(constants.get, inputs)
        given = [node for node in held if node is not None]
        if len(given) == 2:
            old = [int(tf.make_ndarray(node.attr["value"].tensor)) for node in given]
            for one, value in zip(given, change(*old), strict=True):
                one.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64, ()))


def _rename_functions(definition: Any, suffix: str) -> None:
    names = {one.signature.name for one in definition.library.function}
    for scope in node_scopes(definition):
        for node in scope:
            if node.op in names:
                node.op += suffix
            for one in called(node):
                one.name += suffix if one.name in names else ""
    for function in definition.library.function:
        function.signature.name += suffix
    definition.library.ClearField("gradient")
