"""How a number was computed from the samples of a batch, as its TensorFlow graph shows.

Keras's own losses and metrics say how they reduce samples to one number. What a user's code
computes, in a loss function, for `add_loss` or in a `train_step`, does not say so; but its graph
shows that the number is a function of means and sums over the samples, of weights and constants:

- Anything linear in means is a mean: the global one is that of the ranks, by their shares.
- Anything linear in sums is a sum: the ranks' add up.
- Any other function, such as a masked mean, which is a sum divided by a sum, is computed again,
  from the means and sums over the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella.internals.tensorflow import CALLS, called_graph


class Reduction(Enum):
    """What a tensor is, as a function of the samples of a batch."""

    FIXED = "depends on no sample"
    MEAN = "linear in means over the samples"
    SUM = "linear in sums over the samples"
    ROWS = "the number of samples"
    OTHER = "another function of means and sums"


@dataclass(frozen=True)
class Operand:
    """A mean or sum over the samples that a number is a function of; or a fixed tensor.

    Attributes:
        tensor: The micro-batch's.
        kind: How the ranks' are to be combined.
        entries: For a mean over part of the samples: how many entries it is a mean of.
    """

    tensor: tf.Tensor
    kind: Reduction
    entries: tf.Tensor | None = None


@dataclass
class Formula:
    """A number, as a function of its operands.

    Attributes:
        number: The number.
        kind: What it is as a whole.
        operands: What it is computed from.
        operations: The operations that compute it, in an order in which they can be run.
    """

    number: tf.Tensor
    kind: Reduction = Reduction.FIXED
    operands: list[Operand] = field(default_factory=list)
    operations: list[tf.Operation] = field(default_factory=list)

    def computed_from(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """The number for other values of the operands."""
        known = {
            id(operand.tensor): value for operand, value in zip(self.operands, values, strict=True)
        }
        graph = tf.compat.v1.get_default_graph()
        for operation in self.operations:
            copy = graph.create_op(
                operation.type,
                [known.get(id(tensor), tensor) for tensor in operation.inputs],
                [output.dtype for output in operation.outputs],
                attrs=dict(operation.node_def.attr),
                op_def=operation.op_def,
            )
            for output, copied in zip(operation.outputs, copy.outputs, strict=True):
                known[id(output)] = copied
        return known[id(self.number)]


# These read variables, which are the same on all ranks, and no samples.
_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarHandleOp"}
# The number of entries of what these return depends on their values.
_SELECTIONS = {"Where", "Unique", "UniqueV2", "DynamicPartition", "SparseSlice"}
_KEEP_LINEAR = {
    "BroadcastTo", "Cast", "CheckNumerics", "ExpandDims", "Identity", "Mean", "Neg",
    "PreventGradient", "Reshape", "Snapshot", "Squeeze", "StopGradient", "StridedSlice", "Sum",
    "Tile", "Transpose",
}  # fmt: skip
_ADD = {"Add", "AddN", "AddV2", "ConcatV2", "Pack", "Sub"}
_DIVIDE = {"Div", "DivNoNan", "RealDiv"}


class BatchGraph:
    """How the tensors of a graph depend on the samples of a batch.

    Args:
        samples: Tensors with the samples in their first axis.
        even: Whether every tensor has the same number of rows for each sample.
    """

    def __init__(self, samples: Sequence[tf.Tensor], even: bool = True) -> None:
        self._rows = {leaf.shape[0] for leaf in samples if leaf.shape.rank}
        self._even = even
        self._noted_eagerly: dict[int, Operand] = {}
        self._depends_on_samples = depends_on_samples()
        self._is_selected = _Search(lambda tensor: tensor.op.type in _SELECTIONS).finds

    @classmethod
    def of(cls, data: Any) -> BatchGraph:
        """The graph of a step with these data."""
        leaves = tf.nest.flatten(data)
        uneven = [leaf for leaf in leaves if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor))]
        return cls([leaf for leaf in leaves if isinstance(leaf, tf.Tensor)], even=not uneven)

    def formula(self, number: tf.Tensor) -> Formula | None:
        """How a tensor with no axis of samples is computed; None if the graph does not show it."""
        formula = Formula(number)
        try:
            formula.kind = self._visit(number, formula, {})
        except _NotUnderstoodError:
            return None
        return formula

    def remember(self, tensor: tf.Tensor, kind: Reduction) -> None:
        """Notes what a tensor is, for formulas that contain it."""
        self._noted(tensor)[id(tensor)] = Operand(tensor, kind)

    def known_kind(self, tensor: tf.Tensor) -> Reduction | None:
        """What a tensor was noted to be."""
        noted = self._noted(tensor).get(id(tensor))
        return None if noted is None else noted.kind

    def is_batched(self, tensor: tf.Tensor) -> bool:
        """Whether the first axis of a tensor is that of the samples, as far as shapes tell."""
        if not tensor.shape.rank or not self._is_size_of_rows(tensor.shape[0]):
            return False
        if tensor.shape[0] is None or is_eager(tensor) or not tensor.op.inputs:
            return True
        # That two sizes are equal may be by chance: it has to be computed from something batched.
        sizes = [size for argument in tensor.op.inputs for size in _sizes(argument)]
        return any(map(self._is_size_of_rows, sizes))

    def _is_size_of_rows(self, size: int | None) -> bool:
        if size is None:
            return True
        known = [rows for rows in self._rows if rows]
        return any(size == rows or (rows > 1 and size and size % rows == 0) for rows in known)

    def is_fixed(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is known to be the same on all ranks."""
        return not is_eager(tensor) and not self._depends_on_samples(tensor)

    def _noted(self, tensor: tf.Tensor) -> dict[int, Operand]:
        """What is noted of tensors of the same graph; kept with it, as others may call it."""
        if is_eager(tensor):
            return self._noted_eagerly
        if not hasattr(tensor.graph, "_tnt_noted"):
            tensor.graph._tnt_noted = {}
        noted: dict[int, Operand] = tensor.graph._tnt_noted
        return noted

    def _visit(self, tensor: tf.Tensor, formula: Formula, seen: dict[int, Reduction]) -> Reduction:
        if id(tensor) not in seen:
            seen[id(tensor)] = self._kind(tensor, formula, seen)
        return seen[id(tensor)]

    def _kind(self, tensor: tf.Tensor, formula: Formula, seen: dict[int, Reduction]) -> Reduction:
        found = self._operand(tensor)
        if found is not None:
            formula.operands.append(found)
            return Reduction.OTHER if found.entries is not None else found.kind
        operation = tensor.op
        if operation.type in CALLS and (kind := self._kind_of_result(tensor)) is not None:
            formula.operands.append(Operand(tensor, kind))
            return kind
        if self.is_batched(tensor) or _is_opaque(operation):
            raise _NotUnderstoodError
        kinds = [self._visit(argument, formula, seen) for argument in operation.inputs]
        if operation not in formula.operations:
            formula.operations.append(operation)
        kind = _combined(operation, kinds)
        if kind is Reduction.SUM and self._divides_by_rows(operation):
            return Reduction.MEAN
        return kind

    def _divides_by_rows(self, operation: tf.Operation) -> bool:
        """Whether a sum is divided by the number of its entries, which is known in advance."""
        if operation.type not in _DIVIDE:
            return False
        total, divisor = operation.inputs
        while total.op.type in ("Cast", "Identity"):
            total = total.op.inputs[0]
        entries = total.op.inputs[0].shape.num_elements() if total.op.type == "Sum" else None
        return self.is_number_of_rows(divisor) or _is_constant(divisor, entries)

    def is_number_of_rows(self, value: Any) -> bool:
        """Whether a value is the number of samples, where that is known in advance."""
        return any(_is_constant(value, rows) for rows in self._rows)

    def _kind_of_result(self, result: tf.Tensor) -> Reduction | None:
        """What a function returns, if that is simple."""
        graph = called_graph(result.op)
        inner = None if graph is None else self.formula(graph.outputs[result.value_index])
        return inner.kind if inner is not None and inner.kind is not Reduction.OTHER else None

    def _operand(self, tensor: tf.Tensor) -> Operand | None:
        if id(tensor) in self._noted(tensor):
            return self._noted(tensor)[id(tensor)]
        if self.is_fixed(tensor):
            return Operand(tensor, Reduction.FIXED)
        operation = tensor.op
        counted = _size_along_axis(operation)
        if counted is not None:
            whole, axis = counted
            if axis != 0 or not self.is_batched(whole):
                return Operand(tensor, Reduction.FIXED)
            return Operand(tensor, Reduction.SUM if self._is_selection(whole) else Reduction.ROWS)
        if operation.type in ("Sum", "Mean") and self._reduces_samples(operation):
            if operation.type == "Sum":
                return Operand(tensor, Reduction.SUM)
            values = operation.inputs[0]
            if not self._is_selection(values):
                return Operand(tensor, Reduction.MEAN)
            entries = tf.size(values, tf.int64) / tf.size(tensor, tf.int64)
            return Operand(tensor, Reduction.MEAN, tf.cast(entries, tf.float64))
        return None

    def _reduces_samples(self, reduction: tf.Operation) -> bool:
        values = reduction.inputs[0]
        axes = tf.get_static_value(reduction.inputs[1])
        if axes is None or not self.is_batched(values):
            return False
        return any(int(axis) % values.shape.rank == 0 for axis in axes.reshape(-1))

    def _is_selection(self, tensor: tf.Tensor) -> bool:
        """Whether the number of rows may be no multiple of the number of samples."""
        return not self._even or self._is_selected(tensor)


class _NotUnderstoodError(Exception):
    """The graph does not show how a number is computed from the samples."""


def _combined(operation: tf.Operation, kinds: Sequence[Reduction]) -> Reduction:
    """What an operation makes of arguments of these kinds."""
    name, all_kinds = operation.type, set(kinds)
    of_samples = all_kinds - {Reduction.FIXED}
    if name in _ADD:
        values = set(kinds[:-1]) if name == "ConcatV2" else all_kinds
        if values <= {Reduction.FIXED, Reduction.MEAN}:
            return Reduction.MEAN
        return Reduction.SUM if values == {Reduction.SUM} else Reduction.OTHER
    if len(of_samples) == 1:
        (kind,) = of_samples
        if kind is Reduction.ROWS:
            return kind if name in ("Cast", "Identity") else Reduction.OTHER
        is_product = name == "Mul" and Reduction.FIXED in all_kinds
        is_quotient = name in _DIVIDE and kinds[1] is Reduction.FIXED
        if name in _KEEP_LINEAR or is_product or is_quotient:
            return kind
    if name in _DIVIDE and list(kinds) == [Reduction.SUM, Reduction.ROWS]:
        return Reduction.MEAN
    return Reduction.OTHER


def _is_constant(value: Any, number: int | None) -> bool:
    static = _static_value(value)
    return number is not None and static is not None and bool(np.all(static == number))


def _static_value(value: Any) -> Any:
    """The value of a tensor, or of a number, if it is known in advance."""
    if not isinstance(value, tf.Tensor):
        return value
    static = tf.get_static_value(value)
    if static is not None or is_eager(value):
        return static
    if value.op.type in ("Cast", "Identity"):
        return _static_value(value.op.inputs[0])
    if value.op.type == "StridedSlice" and value.shape.rank == 0:
        whole, begin = (_static_value(argument) for argument in value.op.inputs[:2])
        return None if whole is None or begin is None else whole[int(begin[0])]
    return None


def _size_along_axis(operation: tf.Operation) -> tuple[tf.Tensor, int] | None:
    """For a size along an axis: of which tensor, and which axis."""
    if operation.type == "Size":
        return operation.inputs[0], 0
    if operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return None
    begin = tf.get_static_value(operation.inputs[1])
    if begin is None or operation.outputs[0].shape.rank != 0:
        return None
    whole = operation.inputs[0].op.inputs[0]
    return whole, int(begin[0]) % (whole.shape.rank or 1)


def _is_opaque(operation: tf.Operation) -> bool:
    """Whether what an operation does can neither be seen nor repeated."""
    has_functions = any(value.HasField("func") for value in operation.node_def.attr.values())
    return _is_argument(operation) or operation.op_def.is_stateful or has_functions


def is_eager(tensor: Any) -> bool:
    """Whether a tensor has its value already, and no graph shows where that comes from."""
    return isinstance(tensor, tf.Tensor) and not tf.is_symbolic_tensor(tensor)


def _is_argument(operation: tf.Operation) -> bool:
    return operation.type == "Placeholder"


def _captured(argument: tf.Tensor) -> Any:
    """What an argument of a function stands for, if it was captured: a tensor outside."""
    for outer, inner in getattr(argument.graph, "captures", []):
        if inner is argument:
            return outer
    return None


class _Search:
    """Looks for operations among those that a tensor is computed by.

    Args:
        is_found: Tells whether a tensor comes from an operation that is looked for.
    """

    def __init__(self, is_found: Callable[[tf.Tensor], bool]) -> None:
        self._is_found = is_found
        self._results: dict[int, tuple[tf.Tensor, bool]] = {}

    def finds(self, tensor: tf.Tensor) -> bool:
        stack = [tensor]
        while stack:
            current = stack[-1]
            if id(current) in self._results:
                stack.pop()
                continue
            found = self._is_found(current)
            before = [] if found else self._before(current)
            unknown = [one for one in before if id(one) not in self._results]
            if unknown:
                stack.extend(unknown)
                continue
            result = found or any(self._results[id(one)][1] for one in before)
            self._results[id(current)] = (current, result)
            stack.pop()
        return self._results[id(tensor)][1]

    def _before(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """What a tensor is computed from, in its graph or in one around it."""
        if _is_argument(tensor.op):
            outer = _captured(tensor)
            return [] if outer is None or is_eager(outer) else [outer]
        return _computed_from(tensor)


def _computed_from(tensor: tf.Tensor) -> list[tf.Tensor]:
    """What a tensor is computed from in its graph; a size is not computed from the samples."""
    operation = tensor.op
    size = _size_along_axis(operation)
    if size is not None and size[1] != 0:
        return []
    if operation.type in CALLS and (graph := called_graph(operation)) is not None:
        return arguments_for(operation, graph, graph.outputs[tensor.value_index])
    return list(operation.inputs)


def arguments_for(call: tf.Operation, graph: Any, inner: tf.Tensor) -> list[tf.Tensor]:
    """The arguments of a function's call that a tensor inside the function depends on."""
    used = {tensor.name for tensor in _sources(inner) if _is_argument(tensor.op)}
    pairs = zip(call.inputs, graph.inputs, strict=True)
    return [given for given, argument in pairs if argument.name in used]


def _sources(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """A tensor, and all that it is computed from in its graph."""
    seen, stack = set(), [tensor]
    while stack:
        current = stack.pop()
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            stack.extend(_computed_from(current))


def _reads_data(tensor: tf.Tensor) -> bool:
    """Whether a tensor comes from the data, or from anything that may differ between ranks."""
    operation = tensor.op
    if _is_argument(operation):
        return tensor.dtype not in (tf.resource, tf.variant) and _captured(tensor) is None
    if operation.type in CALLS and (graph := called_graph(operation)) is not None:
        return differs_inside(graph.outputs[tensor.value_index])
    if operation.type == "StatelessRandomGetKeyCounter":  # the seeds of layers are each rank's own
        return tf.get_static_value(operation.inputs[0]) is None
    return operation.op_def.is_stateful and operation.type not in _READS


def differs_inside(inner: tf.Tensor) -> bool:
    """Whether a tensor in a function may differ between ranks that call it with equal arguments."""
    return any(
        _reads_data(tensor) or _reads_what_is_written(tensor.op)
        for tensor in _sources(inner)
        if not _is_argument(tensor.op)
    )


def _reads_what_is_written(operation: tf.Operation) -> bool:
    """Whether an operation reads a variable that others in its graph may write."""
    if operation.type not in _READS:
        return False
    variables = {id(tensor) for tensor in operation.inputs if tensor.dtype == tf.resource}
    return any(
        id(tensor) in variables
        for other in operation.graph.get_operations()
        if other.op_def.is_stateful and other.type not in _READS
        for tensor in other.inputs
    )


def depends_on_samples() -> Callable[[tf.Tensor], bool]:
    """A function that tells whether a tensor depends on anything that ranks do not share.

    They share variables, constants, and the sizes of all axes but the first.
    """
    return _Search(_reads_data).finds


def _sizes(tensor: tf.Tensor) -> list[int | None]:
    """The sizes of a tensor along its axes; of no axis, if not even their number is known."""
    return [] if tensor.shape.rank is None else list(tensor.shape)
