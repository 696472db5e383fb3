"""Operations that work row by row: for each, what its results are if its inputs are rows.

A rule gives the kind of the results. Anything but `PerRow` means that the operation mixes rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tarantella.data.row_kinds import (
    Drawn,
    Kind,
    PerRow,
    Size,
    aligned,
    entries_of,
    factor_of,
    is_fixed,
    is_same,
    shape_of,
)

Rule = Callable[[tf.Operation, Sequence[Kind]], Kind | None]

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
STATELESS_RANDOM = [
    f"Stateless{name}{version}"
    for name in (*_RANDOM.replace("Standard", "").split(), "RandomUniformFullInt")
    for version in ("", "V2")
]


def _with_axes(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    where, tensors, kinds = _AXES[op.type], list(op.inputs), list(kinds)
    axes = op.get_attr(where) if isinstance(where, str) else tf.get_static_value(tensors[where])
    if isinstance(where, int):
        del tensors[where], kinds[where]
    if axes is None or (op.type == "Squeeze" and not axes):  # of what happens to have one entry
        return None
    rank = tensors[0].shape.rank
    if rank is None:
        return None
    rank += op.type in _ADD_AN_AXIS
    if any(axis in (0, -rank) for axis in np.ravel(axes)):
        return None
    if op.type in ("ConcatV2", "Pack"):
        return aligned(kinds)
    return kinds[0] if isinstance(kinds[0], PerRow) and all(map(is_same, kinds[1:])) else None


def _elementwise(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    """Dimensions are matched from the last to the first, and the rows must stay the first."""
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks or max(ranks) == 0:
        return None
    rank, rows = max(ranks), []
    for tensor, kind in zip(op.inputs, kinds, strict=True):
        if tensor.shape.rank == rank and not (is_same(kind) and tensor.shape[0] == 1):
            rows.append(kind)
        elif not is_same(kind):
            return None
    return aligned(rows) if rows else None


def _first_input(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    rank = op.inputs[0].shape.rank
    if rank is None or rank < _FIRST_INPUT[op.type]:
        return None
    return kinds[0] if isinstance(kinds[0], PerRow) and all(map(is_same, kinds[1:])) else None


def _select(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    # Without broadcasting, but a vector may choose between rows.
    scalar = is_same(kinds[0]) and op.inputs[0].shape.rank == 0
    return aligned(kinds[1:] if scalar else kinds)


def _matmul(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
    left, right = (tensor.shape.rank for tensor in op.inputs)
    if left == 2 and right == 2:
        return kinds[0] if not transposed and is_same(kinds[1]) else None
    if left is None or right is None or min(left, right) < 2 or left < 3:
        return None
    return _elementwise(op, kinds)


def _einsum(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    operands, _, result = op.get_attr("equation").decode().replace(" ", "").partition("->")
    row = result[:1]
    if "." in operands or not row:
        return None
    for letters, kind in zip(operands.split(","), kinds, strict=True):
        if not (is_same(kind) and row not in letters) and not (
            isinstance(kind, PerRow) and letters[0] == row and letters.count(row) == 1
        ):
            return None
    return aligned([kind for kind in kinds if isinstance(kind, PerRow)])


def _gather(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    axis, batch_dims = tf.get_static_value(op.inputs[2]), op.get_attr("batch_dims")
    rank = op.inputs[0].shape.rank
    if axis is None or rank is None:
        return None
    axis = int(axis) + (rank if axis < 0 else 0)
    if batch_dims == 0 and is_same(kinds[0]) and axis == 0:
        return kinds[1]
    if batch_dims == 0 and is_same(kinds[1]) and axis > 0:
        return kinds[0]
    return aligned(kinds[:2]) if axis >= batch_dims > 0 else None


def _lookup(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    """The second input says what each row takes from the first."""
    if op.type == "ResourceGather" and op.get_attr("batch_dims"):
        return None
    if op.type == "GatherNd" and (op.inputs[1].shape.rank or 0) < 2:
        return None
    rest = [kinds[0], *kinds[2:]]
    return kinds[1] if isinstance(kinds[1], PerRow) and all(map(is_same, rest)) else None


def _reshape(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    shape, target = shape_of(op.inputs[0], kinds[0]), entries_of(op.inputs[1], kinds[1])
    if shape is None or not target or any(size.counts for size in target[1:]):
        return None
    inside, outside = factor_of(shape), factor_of(target[1:])
    if target[0].counts:  # then what belongs to a row stays together, however much it is
        asked = factor_of(target)
        # TensorFlow may never notice an impossible shape if it is reshaped again.
        impossible = inside is not None and asked is not None and asked >= 0 and inside != asked
        return None if impossible else PerRow(target[0].factor)
    if target[0].factor != -1 or inside is None or outside is None or outside <= 0:
        return None
    return PerRow(inside // outside) if inside % outside == 0 else None


def _rows_of_shape(tensor: tf.Tensor, kind: Kind) -> PerRow | None:
    """The kind of what has this shape and is of the same kind in each row."""
    shape = entries_of(tensor, kind)
    if not shape or not shape[0].counts or any(size.counts for size in shape[1:]):
        return None
    return PerRow(shape[0].factor)


def _filled(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    rows = _rows_of_shape(op.inputs[0], kinds[0])
    return rows if all(map(is_same, kinds[1:])) else None


def _drawn(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    """Without a state that advances, the draw of a row would follow from its position."""
    seed, rest = (kinds[1:4], kinds[4:]) if op.type.endswith("V2") else (kinds[1:2], kinds[2:])
    if seed[0] != Drawn() or not all(map(is_fixed, seed)) or not all(map(is_same, rest)):
        return None
    return _rows_of_shape(op.inputs[0], kinds[0])


def _broadcast(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    rows, rank = _rows_of_shape(op.inputs[1], kinds[1]), op.inputs[0].shape.rank
    if rows is None or rank is None:
        return None
    if rank == op.inputs[1].shape.num_elements():
        once = is_same(kinds[0]) and op.inputs[0].shape[0] == 1
        return rows if once else aligned([kinds[0], rows])
    return rows if is_same(kinds[0]) else None


def _transpose(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    permutation = tf.get_static_value(op.inputs[1])
    return kinds[0] if permutation is not None and permutation[0] == 0 else None


def _strided_slice(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    rank, count = op.inputs[0].shape.rank, op.inputs[1].shape[0]
    if rank is None or count is None or not all(map(is_same, kinds[1:])):
        return None
    if count == 0:
        return kinds[0]
    if op.get_attr("ellipsis_mask") & 1:
        named = [at for at in range(1, count) if not op.get_attr("new_axis_mask") >> at & 1]
        return kinds[0] if len(named) < rank else None
    if (op.get_attr("new_axis_mask") | op.get_attr("shrink_axis_mask")) & 1:
        return None
    begin, _, strides = (
        entries_of(tensor, kind) for tensor, kind in zip(op.inputs[1:], kinds[1:], strict=True)
    )
    if not begin or not strides or strides[0] != Size(1):
        return None
    whole = op.get_attr("end_mask") & 1 and (op.get_attr("begin_mask") & 1 or begin[0] == Size(0))
    return kinds[0] if whole else None


def _slice(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    begin, size = (entries_of(op.inputs[at], kinds[at]) for at in (1, 2))
    if not begin or not size or begin[0] != Size(0) or not isinstance(kinds[0], PerRow):
        return None
    if any(entry.counts for entry in (*begin, *size[1:])):
        return None
    own = kinds[0].each is not None and size[0] == Size(kinds[0].each, True)
    return kinds[0] if own or size[0] == Size(-1) else None


def _pad(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    padding = tf.get_static_value(op.inputs[1])
    plain = padding is not None and not padding[0].any() and all(map(is_same, kinds[1:]))
    return kinds[0] if plain else None


def _tile(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    multiples = entries_of(op.inputs[1], kinds[1])
    return kinds[0] if multiples and multiples[0] == Size(1) and is_same(kinds[1]) else None


def _projective(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    if not all(map(is_same, kinds[2:])):
        return None
    if is_same(kinds[1]) and op.inputs[1].shape.rank == 2 and op.inputs[1].shape[0] == 1:
        return kinds[0]  # one transformation for all images
    return aligned(kinds[:2])


def _parse(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    shapes = [tf.TensorShape(shape) for shape in op.get_attr("dense_shapes")]
    if op.get_attr("num_sparse") or op.get_attr("ragged_value_types"):
        return None
    if op.inputs[0].shape.rank != 1 or not all(shape.is_fully_defined() for shape in shapes):
        return None
    return kinds[0] if all(map(is_same, kinds[1:])) else None


RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_FIRST_INPUT, _first_input),
    **dict.fromkeys(_AXES, _with_axes),
    **dict.fromkeys(["Fill", *_RANDOM.split()], _filled),
    **dict.fromkeys(STATELESS_RANDOM, _drawn),
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
