"""Whether a function of a batch works row by row.

A rank may take its rows of a batch before such a function instead of after it, and need not
compute the rows of the others. This is proved on the graph of the function: we follow two
runs of it, one on the whole batch and one on some of its rows, and give each tensor a kind
that says how its values in the two runs relate. What no rule here knows is taken to mix rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella.internals.tensorflow import called_graph


@dataclass(frozen=True)
class Same:
    """The same value in both runs; of a captured variable or table, which one it is."""

    resource: str = ""


@dataclass(frozen=True)
class Drawn:
    """From a state that the function itself advances, such as the seed of a Keras layer."""


@dataclass(frozen=True)
class Rows:
    """The second run has, of the first dimension, the part that belongs to its rows.

    Each row has `each` consecutive entries of that dimension; None is a number we do not
    know, the same in both runs. So are the other dimensions.
    """

    each: int | None = 1


@dataclass(frozen=True)
class Size:
    """`factor`, times the number of rows if it `counts` them; a factor of None is unknown."""

    factor: int | None
    counts: bool = False


@dataclass(frozen=True)
class Sizes:
    """The entries of a shape, or of one number in it."""

    entries: tuple[Size, ...]


@dataclass(frozen=True)
class Mixed:
    """Anything else; `reason` is the operation that made it so."""

    reason: str


Kind = Same | Drawn | Rows | Sizes | Mixed
_Rule = Callable[[tf.Operation, Sequence[Kind]], Kind | None]

_ELEMENTWISE = """
    Abs Acos Acosh Add AddN AddV2 AsString Asin Asinh Atan Atan2 Atanh BitwiseAnd BitwiseOr
    BitwiseXor Bucketize Cast Ceil CheckNumerics CheckNumericsV2 ClipByValue Cos Cosh DecodeBase64
    DecodeRaw DecodePaddedRaw Digamma Div DivNoNan Elu EncodeBase64 EnsureShape Equal Erf Erfc
    Erfinv Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Inv Invert IsFinite IsInf IsNan
    LeakyRelu LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum
    Minimum Mod Mul MulNoNan Ndtri Neg NotEqual OnesLike Pow RealDiv Reciprocal RegexFullMatch
    RegexReplace Relu Relu6 RightShift Rint Round Rsqrt Selu SelectV2 Sigmoid Sign Sin Sinh
    Softplus Softsign Sqrt Square SquaredDifference StaticRegexFullMatch StaticRegexReplace
    StopGradient StringJoin StringLength StringLower StringStrip StringToHashBucket
    StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper Sub Substr Tan Tanh
    TruncateDiv TruncateMod UnicodeTranscode Xdivy Xlog1py Xlogy ZerosLike
"""

# The first input has the rows, the others are the same for all of them. The number is the rank
# from which on the first dimension is not one that the operation works along.
_FIRST_INPUT = {
    **dict.fromkeys(["BiasAdd", "LogSoftmax", "Softmax", "TopKV2"], 2),
    **dict.fromkeys(["AdjustHue", "AdjustSaturation", "HSVToRGB", "RGBToHSV"], 2),
    **dict.fromkeys(["FFT", "IFFT", "RFFT", "IRFFT"], 2),
    **dict.fromkeys(["FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D"], 3),
    **dict.fromkeys(["ResizeArea", "ResizeBicubic", "ResizeBilinear"], 4),
    **dict.fromkeys(["ResizeNearestNeighbor", "ScaleAndTranslate"], 4),
    **dict.fromkeys(["AvgPool", "Conv2D", "DepthwiseConv2dNative", "MaxPool"], 4),
    **dict.fromkeys(["AdjustContrastv2", "DepthToSpace", "SpaceToDepth"], 4),
    **dict.fromkeys(["AvgPool3D", "Conv3D", "MaxPool3D"], 5),
}

# Where an operation has the axes that it works along: the position of an input, or an attribute.
_AXES: dict[str, int | str] = {
    **dict.fromkeys(["All", "Any", "EuclideanNorm", "Max", "Mean", "Min", "Prod", "Sum"], 1),
    **dict.fromkeys(["ArgMax", "ArgMin", "Cumprod", "Cumsum", "ReduceJoin", "ReverseV2"], 1),
    **dict.fromkeys(["OneHot", "Pack", "Unpack"], "axis"),
    **dict.fromkeys(["Roll", "SplitV"], 2),
    "ConcatV2": -1,
    "ExpandDims": 1,
    "Split": 0,
    "Squeeze": "squeeze_dims",
}
_ADD_AN_AXIS = ("ExpandDims", "OneHot", "Pack")

# The first input is the shape of the result, all numbers in which are drawn independently.
_RANDOM = "RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal"
_STATELESS_RANDOM = [
    f"Stateless{name}{version}"
    for name in (*_RANDOM.replace("Standard", "").split(), "RandomUniformFullInt")
    for version in ("", "V2")
]

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_CONDITIONS = ("If", "StatelessIf")
_CHANGES = ("AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp", "RngReadAndSkip")
# TensorFlow calls these stateful, but they leave nothing behind.
_HARMLESS = (
    *("Assert", "CheckNumerics", "CheckNumericsV2"),
    *("LookupTableFindV2", "ReadVariableOp", "ResourceGather"),
)


def what_mixes_rows(function: Any) -> str | None:
    """What keeps a function from working row by row, in a few words; None: nothing does.

    With None, the function gives for some of a batch's rows what it gives for the batch, of
    these rows; draws that are made for each row apart may be others. One that is made once
    for a batch keeps it from that.

    Args:
        function: The ConcreteFunction of a `map`, `dataset._map_func.function`. Its inputs
            must have been traced with an unknown number of rows, as `batch` gives them
            without `drop_remainder=True`: one that is known can be anywhere in the graph as a
            constant, and is refused. The answer is about this graph, or one traced anew
            with an unknown number.
    """
    graph, captured = function.graph, len(function.captured_inputs)
    own = graph.inputs[: len(graph.inputs) - captured]
    for tensor in own:
        if tensor.dtype in (tf.variant, tf.resource):
            return "an input that is sparse, ragged or a dataset"
        if tensor.shape.rank is None or (tensor.shape.rank and tensor.shape[0] is not None):
            return f"an input of the shape {tensor.shape}"
    kinds: list[Kind] = [Rows() if tensor.shape.rank else Same() for tensor in own]
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
        if kind != Rows() and not (_is_same(kind) and tensor.shape.rank == 0):
            return "an output that is not made of the batch's rows"
    return None if Rows() in results else "no output has rows"


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
        if op.type in _CALLS:
            return self.outputs(_called(op, "f"), kinds)
        if op.type in _CONDITIONS:
            return self._branches(op, kinds)
        if op.type == "ReadVariableOp" or op.type in _CHANGES:
            return self._variable(op, kinds)
        leaves_nothing = not op.op_def.is_stateful or op.type in _HARMLESS
        if not leaves_nothing and op.type not in _RULES:
            raise _UnequalEffectsError(op.type)
        if op.type in ("Identity", "IdentityN"):
            return kinds
        return _sizes(op, kinds) or [_result(op, kinds, leaves_nothing)] * len(op.outputs)

    def _branches(self, op: tf.Operation, kinds: list[Kind]) -> list[Kind]:
        branches = [_called(op, name) for name in ("then_branch", "else_branch")]
        if not _is_same(kinds[0]):  # the two runs may take different branches
            for inner in (inner for branch in branches for inner in _operations(branch)):
                allowed = (*_HARMLESS, *_CALLS, *_CONDITIONS)
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
        if op.type != "RngReadAndSkip" and not _is_fixed(values[0]):
            raise _UnequalEffectsError(op.type)
        self.changed.add(handle.resource)
        return [Drawn()] * len(op.outputs)


def _result(op: tf.Operation, kinds: Sequence[Kind], leaves_nothing: bool) -> Kind:
    """The kind of each result: by what goes in, or by the rule for the operation."""
    if any(isinstance(kind, Mixed) for kind in kinds) or op.type == "Placeholder":
        return _mixed(op, kinds)
    if leaves_nothing and all(_is_same(kind) for kind in kinds):
        return Same()
    if leaves_nothing and all(_is_fixed(kind) for kind in kinds):
        return Mixed(op.type) if op.type in _STATELESS_RANDOM else Drawn()
    rows = _RULES[op.type](op, kinds) if op.type in _RULES else None
    return rows if isinstance(rows, Rows) else Mixed(op.type)


def _mixed(op: tf.Operation, kinds: Sequence[Kind]) -> Mixed:
    return next((kind for kind in kinds if isinstance(kind, Mixed)), Mixed(op.type))


def _checked(kind: Kind, tensor: tf.Tensor, source: str) -> Kind:
    """Mixed, if rows are of an unknown rank or a number of them has been fixed."""
    if isinstance(kind, Rows) and (not tensor.shape.rank or tensor.shape[0] is not None):
        return Mixed(source)
    return kind


def _either(op: tf.Operation, one: Kind, other: Kind) -> Kind:
    if one == other:
        return one
    if _is_same(one) and _is_same(other):
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


def _is_same(kind: Kind) -> bool:
    if isinstance(kind, Sizes):
        return not any(size.counts for size in kind.entries)
    return isinstance(kind, Same)


def _is_fixed(kind: Kind) -> bool:
    return _is_same(kind) or kind == Drawn()


# What is computed from shapes


def _entries(tensor: tf.Tensor, kind: Kind) -> tuple[Size, ...] | None:
    """What is known of the numbers in a scalar or vector."""
    if isinstance(kind, Sizes):
        return kind.entries
    if not isinstance(kind, Same) or tensor.shape.rank not in (0, 1):
        return None
    if not tensor.dtype.is_integer:
        return None
    value = tf.get_static_value(tensor)
    if value is not None:
        return tuple(Size(int(number)) for number in np.ravel(value))
    count = tensor.shape.num_elements()
    return None if count is None else (Size(None),) * count


def _factor(sizes: Sequence[Size]) -> int | None:
    factors = [size.factor for size in sizes if size.factor is not None]
    return math.prod(factors) if len(factors) == len(sizes) else None


def _product(sizes: Sequence[Size]) -> list[Kind] | None:
    counts = [size.counts for size in sizes]
    return [Sizes((Size(_factor(sizes), any(counts)),))] if sum(counts) < 2 else None


def _shape(tensor: tf.Tensor, kind: Kind) -> tuple[Size, ...] | None:
    if not isinstance(kind, Rows):
        return None
    return (Size(kind.each, True), *(Size(length) for length in tensor.shape[1:]))


def _sizes(op: tf.Operation, kinds: Sequence[Kind]) -> list[Kind] | None:
    """The kinds of the results, where a shape is read, taken apart or put together."""
    shapes = [_shape(tensor, kind) for tensor, kind in zip(op.inputs, kinds, strict=True)]
    if op.type in ("Shape", "ShapeN") and None not in shapes:
        return [Sizes(shape) for shape in shapes if shape is not None]
    if op.type == "Size" and shapes[0] is not None:
        return _product(shapes[0])
    if op.type == "Rank" and isinstance(kinds[0], Rows):
        return [Same()]
    if not any(isinstance(kind, Sizes) for kind in kinds) or not op.outputs:
        return None
    inputs = [_entries(tensor, kind) for tensor, kind in zip(op.inputs, kinds, strict=True)]
    if inputs[0] is None or op.outputs[0].shape.rank not in (0, 1):
        return None
    if op.type == "Cast" and op.outputs[0].dtype in (tf.int32, tf.int64, tf.uint64):
        return [Sizes(inputs[0])]
    if op.type in ("ExpandDims", "Reshape", "Squeeze") and all(map(_is_same, kinds[1:])):
        return [Sizes(inputs[0])]
    if op.type == "Unpack":
        return [Sizes((size,)) for size in inputs[0]]
    if op.type in ("Pack", "ConcatV2"):
        parts = inputs if op.type == "Pack" else inputs[:-1]
        known = [part for part in parts if part is not None]
        return [Sizes(sum(known, ()))] if len(known) == len(parts) else None
    if op.type == "Prod" and op.outputs[0].shape.rank == 0:
        return _product(inputs[0])
    if op.type == "Mul" and op.outputs[0].shape.rank == 0 and inputs[1] is not None:
        return _product(inputs[0] + inputs[1])
    picked = _picked(op, len(inputs[0]))
    return None if picked is None else [Sizes(tuple(inputs[0][index] for index in picked))]


def _picked(op: tf.Operation, length: int) -> list[int] | None:
    """Which entries of a vector are taken."""
    arguments = [tf.get_static_value(tensor) for tensor in op.inputs[1:]]
    if any(argument is None for argument in arguments):
        return None
    if op.type == "GatherV2":
        indices = [int(index) for index in np.ravel(arguments[0])]
        return indices if all(0 <= index < length for index in indices) else None
    if op.type != "StridedSlice" or any(len(argument) != 1 for argument in arguments):
        return None
    if op.get_attr("new_axis_mask") or op.get_attr("ellipsis_mask"):
        return None
    begin, end, stride = (int(argument[0]) for argument in arguments)
    if op.get_attr("shrink_axis_mask"):
        return [begin]
    first = None if op.get_attr("begin_mask") else begin
    last = None if op.get_attr("end_mask") else end
    return list(range(length)[first:last:stride])


# What is computed from rows: a rule gives the kind of the results; what is not Rows is Mixed


def _with_axes(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    place, tensors, kinds = _AXES[op.type], list(op.inputs), list(kinds)
    axes = op.get_attr(place) if isinstance(place, str) else tf.get_static_value(tensors[place])
    if isinstance(place, int):
        del tensors[place], kinds[place]
    if axes is None or (op.type == "Squeeze" and not axes):  # of what happens to have one entry
        return None
    rank = tensors[0].shape.rank
    if rank is None:
        return None
    rank += op.type in _ADD_AN_AXIS
    if any(axis in (0, -rank) for axis in np.ravel(axes)):
        return None
    if op.type in ("ConcatV2", "Pack"):
        return _aligned(kinds)
    return kinds[0] if isinstance(kinds[0], Rows) and all(map(_is_same, kinds[1:])) else None


def _aligned(kinds: Sequence[Kind]) -> Kind | None:
    """The kind of several tensors with rows that are of one kind."""
    one = kinds[0]
    alike = all(kind == one for kind in kinds) and isinstance(one, Rows)
    unsure = len(kinds) > 1 and one == Rows(None)
    return one if alike and not unsure else None


def _elementwise(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    """Dimensions are matched from the last to the first, and the rows must stay the first."""
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks or max(ranks) == 0:
        return None
    rank, rows = max(ranks), []
    for tensor, kind in zip(op.inputs, kinds, strict=True):
        if tensor.shape.rank == rank and not (_is_same(kind) and tensor.shape[0] == 1):
            rows.append(kind)
        elif not _is_same(kind):
            return None
    return _aligned(rows) if rows else None


def _first_input(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    rank = op.inputs[0].shape.rank
    if rank is None or rank < _FIRST_INPUT[op.type]:
        return None
    return kinds[0] if isinstance(kinds[0], Rows) and all(map(_is_same, kinds[1:])) else None


def _select(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    # Without broadcasting, but a vector may choose between rows.
    scalar = _is_same(kinds[0]) and op.inputs[0].shape.rank == 0
    return _aligned(kinds[1:] if scalar else kinds)


def _matmul(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
    left, right = (tensor.shape.rank for tensor in op.inputs)
    if left == 2 and right == 2:
        return kinds[0] if not transposed and _is_same(kinds[1]) else None
    if left is None or right is None or min(left, right) < 2 or left < 3:
        return None
    return _elementwise(op, kinds)


def _einsum(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    operands, _, result = op.get_attr("equation").decode().replace(" ", "").partition("->")
    row = result[:1]
    if "." in operands or not row:
        return None
    for letters, kind in zip(operands.split(","), kinds, strict=True):
        if not (_is_same(kind) and row not in letters) and not (
            isinstance(kind, Rows) and letters[0] == row and letters.count(row) == 1
        ):
            return None
    return _aligned([kind for kind in kinds if isinstance(kind, Rows)])


def _gather(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    axis, batch_dims = tf.get_static_value(op.inputs[2]), op.get_attr("batch_dims")
    rank = op.inputs[0].shape.rank
    if axis is None or rank is None:
        return None
    axis = int(axis) + (rank if axis < 0 else 0)
    if batch_dims == 0 and _is_same(kinds[0]) and axis == 0:
        return kinds[1]
    if batch_dims == 0 and _is_same(kinds[1]) and axis > 0:
        return kinds[0]
    return _aligned(kinds[:2]) if axis >= batch_dims > 0 else None


def _lookup(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    """The second input says what each row takes from the first."""
    if op.type == "ResourceGather" and op.get_attr("batch_dims"):
        return None
    if op.type == "GatherNd" and (op.inputs[1].shape.rank or 0) < 2:
        return None
    rest = [kinds[0], *kinds[2:]]
    return kinds[1] if isinstance(kinds[1], Rows) and all(map(_is_same, rest)) else None


def _reshape(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    shape, target = _shape(op.inputs[0], kinds[0]), _entries(op.inputs[1], kinds[1])
    if shape is None or not target or any(size.counts for size in target[1:]):
        return None
    inside, outside = _factor(shape), _factor(target[1:])
    if target[0].counts:  # then what belongs to a row stays together, however much it is
        asked = _factor(target)
        # TensorFlow may never notice a shape that cannot be, where it is reshaped once more.
        impossible = inside is not None and asked is not None and asked >= 0 and inside != asked
        return None if impossible else Rows(target[0].factor)
    if target[0].factor != -1 or inside is None or outside is None or outside <= 0:
        return None
    return Rows(inside // outside) if inside % outside == 0 else None


def _rows_of_shape(tensor: tf.Tensor, kind: Kind) -> Rows | None:
    """The kind of what has this shape and is of the same kind in each row."""
    shape = _entries(tensor, kind)
    if not shape or not shape[0].counts or any(size.counts for size in shape[1:]):
        return None
    return Rows(shape[0].factor)


def _filled(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    rows = _rows_of_shape(op.inputs[0], kinds[0])
    return rows if all(map(_is_same, kinds[1:])) else None


def _drawn(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    """Without a state that moves on, the draw of a row would follow from its place in the batch."""
    seed, rest = (kinds[1:4], kinds[4:]) if op.type.endswith("V2") else (kinds[1:2], kinds[2:])
    if seed[0] != Drawn() or not all(map(_is_fixed, seed)) or not all(map(_is_same, rest)):
        return None
    return _rows_of_shape(op.inputs[0], kinds[0])


def _broadcast(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    rows, rank = _rows_of_shape(op.inputs[1], kinds[1]), op.inputs[0].shape.rank
    if rows is None or rank is None:
        return None
    if rank == op.inputs[1].shape.num_elements():
        once = _is_same(kinds[0]) and op.inputs[0].shape[0] == 1
        return rows if once else _aligned([kinds[0], rows])
    return rows if _is_same(kinds[0]) else None


def _transpose(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    permutation = tf.get_static_value(op.inputs[1])
    return kinds[0] if permutation is not None and permutation[0] == 0 else None


def _strided_slice(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    rank, count = op.inputs[0].shape.rank, op.inputs[1].shape[0]
    if rank is None or count is None or not all(map(_is_same, kinds[1:])):
        return None
    if count == 0:
        return kinds[0]
    if op.get_attr("ellipsis_mask") & 1:
        named = [at for at in range(1, count) if not op.get_attr("new_axis_mask") >> at & 1]
        return kinds[0] if len(named) < rank else None
    if (op.get_attr("new_axis_mask") | op.get_attr("shrink_axis_mask")) & 1:
        return None
    begin, _, strides = (
        _entries(tensor, kind) for tensor, kind in zip(op.inputs[1:], kinds[1:], strict=True)
    )
    if not begin or not strides or strides[0] != Size(1):
        return None
    whole = op.get_attr("end_mask") & 1 and (op.get_attr("begin_mask") & 1 or begin[0] == Size(0))
    return kinds[0] if whole else None


def _slice(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    begin, size = (_entries(op.inputs[at], kinds[at]) for at in (1, 2))
    if not begin or not size or begin[0] != Size(0) or not isinstance(kinds[0], Rows):
        return None
    if any(entry.counts for entry in (*begin, *size[1:])):
        return None
    own = kinds[0].each is not None and size[0] == Size(kinds[0].each, True)
    return kinds[0] if own or size[0] == Size(-1) else None


def _pad(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    padding = tf.get_static_value(op.inputs[1])
    plain = padding is not None and not padding[0].any() and all(map(_is_same, kinds[1:]))
    return kinds[0] if plain else None


def _tile(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    multiples = _entries(op.inputs[1], kinds[1])
    return kinds[0] if multiples and multiples[0] == Size(1) and _is_same(kinds[1]) else None


def _projective(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    if not all(map(_is_same, kinds[2:])):
        return None
    if _is_same(kinds[1]) and op.inputs[1].shape.rank == 2 and op.inputs[1].shape[0] == 1:
        return kinds[0]  # one transformation for all images
    return _aligned(kinds[:2])


def _parse(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    shapes = [tf.TensorShape(shape) for shape in op.get_attr("dense_shapes")]
    if op.get_attr("num_sparse") or op.get_attr("ragged_value_types"):
        return None
    if op.inputs[0].shape.rank != 1 or not all(shape.is_fully_defined() for shape in shapes):
        return None
    return kinds[0] if all(map(_is_same, kinds[1:])) else None


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_FIRST_INPUT, _first_input),
    **dict.fromkeys(_AXES, _with_axes),
    **dict.fromkeys(["Fill", *_RANDOM.split()], _filled),
    **dict.fromkeys(_STATELESS_RANDOM, _drawn),
    **dict.fromkeys(["BatchMatMulV2", "BatchMatMulV3", "MatMul"], _matmul),
    **dict.fromkeys(["GatherNd", "LookupTableFindV2", "ResourceGather"], _lookup),
    **dict.fromkeys(["ImageProjectiveTransformV2", "ImageProjectiveTransformV3"], _projective),
    **dict.fromkeys(["MirrorPad", "Pad", "PadV2"], _pad),
    "BroadcastTo": _broadcast,
    "Einsum": _einsum,
    "GatherV2": _gather,
    "ParseExampleV2": _parse,
    "Reshape": _reshape,
    "Select": _select,
    "Slice": _slice,
    "StridedSlice": _strided_slice,
    "Tile": _tile,
    "Transpose": _transpose,
}
