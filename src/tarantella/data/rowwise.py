"""Whether a function of a batch works row by row.

A rank may take its rows of a batch before such a function instead of after it, and need not compute
the rows of the others. This is proved on the graph of the function: we follow two runs of it, one
on the whole batch and one on some of its rows, and give each tensor a kind that says how its values
in the two runs relate (`row_kinds`). An operation without a rule (`row_rules`) is taken to mix
rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tarantella.data.row_kinds import Drawn, Kind, Mixed, PerRow, Same, is_fixed, is_same
from tarantella.data.row_rules import RULES, STATELESS_RANDOM
from tarantella.data.row_sizes import sizes
from tarantella.internals.tensorflow import CALLS, called_graph

_CONDITIONS = ("If", "StatelessIf")
_CHANGES = ("AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp", "RngReadAndSkip")
# TensorFlow calls these stateful, but they leave nothing behind.
_HARMLESS = (
    *("Assert", "CheckNumerics", "CheckNumericsV2"),
    *("LookupTableFindV2", "ReadVariableOp", "ResourceGather"),
)


def what_mixes_rows(function: Any) -> str | None:
    """What keeps a function from working row by row, in a few words; None: nothing does.

    With None, the function gives for some of a batch's rows what it gives for these rows of the
    whole batch. Numbers that are drawn for each row may differ; one that is drawn once for all
    rows mixes them.

    Args:
        function: The ConcreteFunction of a `map`. Its inputs must have been traced with an unknown
            number of rows, as `batch` gives them without `drop_remainder=True`: a known number can
            be anywhere in the graph as a constant, and is refused. The answer is about this graph,
            or one traced again with an unknown number.
    """
    graph, captured = function.graph, len(function.captured_inputs)
    own = graph.inputs[: len(graph.inputs) - captured]
    for tensor in own:
        if tensor.dtype in (tf.variant, tf.resource):
            return "an input that is sparse, ragged or a dataset"
        if tensor.shape.rank is None or (tensor.shape.rank and tensor.shape[0] is not None):
            return f"an input of the shape {tensor.shape}"
    kinds: list[Kind] = [PerRow() if tensor.shape.rank else Same() for tensor in own]
    kinds += [Same(tensor.name) for tensor in graph.inputs[len(own) :]]
    try:
        first = _Run(frozenset())
        first.outputs(graph, kinds)  # to know what the function changes
        results = _Run(frozenset(first.changed)).outputs(graph, kinds)
    except _UnequalEffectsError as error:
        return str(error)
    for tensor, kind in zip(graph.outputs, results, strict=True):
        if isinstance(kind, Mixed):
            return kind.reason
        if kind != PerRow() and not (is_same(kind) and tensor.shape.rank == 0):
            return "an output that is not made of the batch's rows"
    return None if PerRow() in results else "no output has rows"


class _UnequalEffectsError(Exception):
    """An operation may leave something else behind in the two runs."""


class _Run:
    """Goes through the operations of a graph and of the functions it calls.

    Attributes:
        advanced: The variables that the function changes.
        changed: Those that it was seen to change in this run.
    """

    def __init__(self, advanced: frozenset[str]) -> None:
        self.advanced = advanced
        self.changed: set[str] = set()

    def outputs(self, graph: Any, inputs: Sequence[Kind]) -> list[Kind]:
        kinds = {
            tensor.name: _checked(kind, tensor, "an input")
            for tensor, kind in zip(graph.inputs, inputs, strict=True)
        }
        for op in graph.get_operations():  # in the order in which they were made
            if op.outputs and op.outputs[0].name in kinds:
                continue
            results = self._results(op, [kinds[tensor.name] for tensor in op.inputs])
            for tensor, kind in zip(op.outputs, results, strict=True):
                kinds[tensor.name] = _checked(kind, tensor, op.type)
        return [kinds[tensor.name] for tensor in graph.outputs]

    def _results(self, op: tf.Operation, kinds: list[Kind]) -> Sequence[Kind]:
        if op.type in CALLS:
            return self.outputs(_called(op, "f"), kinds)
        if op.type in _CONDITIONS:
            return self._branches(op, kinds)
        if op.type == "ReadVariableOp" or op.type in _CHANGES:
            return self._variable(op, kinds)
        leaves_nothing = not op.op_def.is_stateful or op.type in _HARMLESS
        if not leaves_nothing and op.type not in RULES:
            raise _UnequalEffectsError(op.type)
        if op.type in ("Identity", "IdentityN"):
            return kinds
        return sizes(op, kinds) or [_result(op, kinds, leaves_nothing)] * len(op.outputs)

    def _branches(self, op: tf.Operation, kinds: list[Kind]) -> list[Kind]:
        branches = [_called(op, name) for name in ("then_branch", "else_branch")]
        if not is_same(kinds[0]):  # the two runs may take different branches
            for inner in (inner for branch in branches for inner in _operations(branch)):
                allowed = (*_HARMLESS, *CALLS, *_CONDITIONS)
                if inner.op_def.is_stateful and inner.type not in allowed:
                    raise _UnequalEffectsError(inner.type)
            return [_mixed(op, kinds[:1])] * len(op.outputs)
        ways = zip(*(self.outputs(branch, kinds[1:]) for branch in branches), strict=True)
        return [_either(op, one, other) for one, other in ways]

    def _variable(self, op: tf.Operation, kinds: list[Kind]) -> list[Kind]:
        handle, values = kinds[0], kinds[1:]
        if not isinstance(handle, Same) or not handle.resource:
            raise _UnequalEffectsError(op.type)
        if op.type == "ReadVariableOp":
            return [Drawn() if handle.resource in self.advanced else Same()]
        if op.type != "RngReadAndSkip" and not is_fixed(values[0]):
            raise _UnequalEffectsError(op.type)
        self.changed.add(handle.resource)
        return [Drawn()] * len(op.outputs)


def _result(op: tf.Operation, kinds: Sequence[Kind], leaves_nothing: bool) -> Kind:
    """The kind of each result: by what goes in, or by the rule for the operation."""
    if any(isinstance(kind, Mixed) for kind in kinds) or op.type == "Placeholder":
        return _mixed(op, kinds)
    if leaves_nothing and all(is_same(kind) for kind in kinds):
        return Same()
    if leaves_nothing and all(is_fixed(kind) for kind in kinds):
        return Mixed(op.type) if op.type in STATELESS_RANDOM else Drawn()
    rows = RULES[op.type](op, kinds) if op.type in RULES else None
    return rows if isinstance(rows, PerRow) else Mixed(op.type)


def _mixed(op: tf.Operation, kinds: Sequence[Kind]) -> Mixed:
    return next((kind for kind in kinds if isinstance(kind, Mixed)), Mixed(op.type))


def _checked(kind: Kind, tensor: tf.Tensor, source: str) -> Kind:
    """Mixed, if rows are of an unknown rank or a number of them has been fixed."""
    if isinstance(kind, PerRow) and (not tensor.shape.rank or tensor.shape[0] is not None):
        return Mixed(source)
    return kind


def _either(op: tf.Operation, one: Kind, other: Kind) -> Kind:
    if one == other:
        return one
    if is_same(one) and is_same(other):
        return Same()
    return _mixed(op, (one, other))


def _called(op: tf.Operation, attribute: str) -> Any:
    graph = called_graph(op, attribute)
    if graph is None:
        raise _UnequalEffectsError(op.type)
    return graph


def _operations(graph: Any) -> Iterator[tf.Operation]:
    for op in graph.get_operations():
        yield op
        for name, value in op.node_def.attr.items():
            if value.HasField("func"):
                yield from _operations(_called(op, name))
