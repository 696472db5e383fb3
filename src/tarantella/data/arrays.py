"""Rows of arrays in memory, taken batch by batch, with no copy of an array as a whole.

Keras turns all arrays into TensorFlow tensors before it takes the first batch: a second copy of
NumPy arrays, all of a memory-mapped file, and a cast copy of what is not in the default float type.
Here an array stays as it is. A batch is read and cast when its turn comes, with the values, types
and structure that Keras would give.
"""

from __future__ import annotations

import copy
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella.graph.host_call import host_call

# TensorFlow takes over a buffer that begins at a multiple of this, and copies others.
_ALIGNMENT = 64

_FLOATS = {"bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"}
_NUMBERS = _FLOATS | {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "complex64", "complex128",
}  # fmt: skip


class ArrayRows:
    """The samples of a structure of arrays, by their numbers.

    Tensors, and what NumPy can view, are not copied. A tensor on a GPU is fetched once, and
    an object with nothing but `__array__` is asked for it once.

    Args:
        arrays: Arrays with the same number of rows, or None, in any structure for which
            `can_take(arrays)` is true.
        floatx: The name of the type that floats of all other types are cast to.

    Attributes:
        spec: What `take` returns, in the same structure, with the number of rows left open.

    Example:
        >>> rows = ArrayRows((x, y), "float32")
        >>> tf.data.Dataset.range(len(rows)).batch(32).map(rows.take)
    """

    def __init__(self, arrays: Any, floatx: str) -> None:
        self._structure = _with_tuples(arrays)
        self._columns = [_column(leaf, floatx) for leaf in tf.nest.flatten(self._structure)]
        self._read_in_python = [c for c in self._columns if isinstance(c, _InPython)]
        self.spec = self._packed([_spec_of(column) for column in self._columns])

    def __len__(self) -> int:
        return next(len(column) for column in self._columns if column is not None)

    @tf.autograph.experimental.do_not_convert
    def take(self, indices: tf.Tensor) -> Any:
        """The rows with these numbers, which must be valid; for use in a `tf.data` map."""
        read = iter(self._read(indices))
        return self._packed([_taken(column, indices, read) for column in self._columns])

    def _read(self, indices: tf.Tensor) -> list[tf.Tensor]:
        if not self._read_in_python:
            return []
        specs = [column.spec for column in self._read_in_python]
        dtypes = [spec.dtype for spec in specs]
        # A list of one tensor comes back as a list in a graph, and as the tensor otherwise.
        tensors = tf.nest.flatten(host_call(self._read_now, [indices], dtypes, stateful=False))
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.set_shape([indices.shape[0], *spec.shape[1:]])
        return tensors

    def _read_now(self, indices: np.ndarray) -> list[np.ndarray]:
        """The rows of those arrays that TensorFlow cannot read itself."""
        rows = _as_slice(indices)
        return [column.read(rows) for column in self._read_in_python]

    def _packed(self, leaves: list[Any]) -> Any:
        return tf.nest.pack_sequence_as(self._structure, leaves)


def can_take(arrays: Any) -> bool:
    """Whether `ArrayRows` and `split` can serve a structure; others are left to Keras."""
    leaves = tf.nest.flatten(arrays)
    return any(leaf is not None for leaf in leaves) and all(_can_take(leaf) for leaf in leaves)


def split(arrays: Any, at: int) -> tuple[Any, Any]:
    """The first `at` rows of each array, and the others, as views of the same memory."""
    halves = [_halves(leaf, at) for leaf in tf.nest.flatten(arrays)]
    head, tail = ([half[i] for half in halves] for i in (0, 1))
    return tf.nest.pack_sequence_as(arrays, head), tf.nest.pack_sequence_as(arrays, tail)


class _InGraph:
    """A tensor, whose rows TensorFlow itself can gather."""

    def __init__(self, tensor: tf.Tensor, floatx: str) -> None:
        self._tensor = tensor
        self.spec = _spec(tensor.shape, _cast_name(tensor.dtype, floatx))

    def __len__(self) -> int:
        return int(self._tensor.shape[0])

    def gather(self, indices: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.gather(self._tensor, indices, axis=0), self.spec.dtype)


class _InPython(ABC):
    """An array whose rows Python reads.

    Args:
        array: The array, with a `shape`.
        dtype: The name of the type that its rows are to have.
    """

    def __init__(self, array: Any, dtype: str) -> None:
        self._array = array
        self.spec = _spec(array.shape, dtype)
        self._dtype = np.dtype(self.spec.dtype.as_numpy_dtype)

    def __len__(self) -> int:
        return len(self._array)

    @abstractmethod
    def read(self, rows: slice | np.ndarray) -> np.ndarray:
        """The rows as a new array, never a view: TensorFlow may write into it."""


class _Numbers(_InPython):
    """A NumPy array of numbers, in any layout."""

    def __init__(self, array: np.ndarray, floatx: str) -> None:
        super().__init__(array, _cast_name(array.dtype, floatx))
        flags = array.flags
        self._is_plain = flags.c_contiguous and flags.aligned and array.dtype.isnative

    def read(self, rows: slice | np.ndarray) -> np.ndarray:
        # np.take is the fastest, but first copies the whole of an array that is not plain.
        if isinstance(rows, slice) or not self._is_plain:
            return _copied(self._array[rows], self._dtype)
        if self._array.dtype != self._dtype:
            return _copied(np.take(self._array, rows, axis=0), self._dtype)
        result = _aligned_empty((len(rows), *self._array.shape[1:]), self._dtype)
        # In its default mode it would write into a buffer of its own, and copy that.
        return np.take(self._array, rows, axis=0, out=result, mode="clip")


class _Strings(_InPython):
    """An array of Python strings."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array, "string")

    def read(self, rows: slice | np.ndarray) -> np.ndarray:
        return np.array([text.encode() for text in self._array[rows]], dtype=object)


class _Frame(_InPython):
    """A DataFrame, whose columns may have different types."""

    def __init__(self, frame: Any, floatx: str) -> None:
        casts = any(_cast_name(dtype, floatx) != _name(dtype) for dtype in frame.dtypes)
        self._floatx = floatx if casts else None
        super().__init__(frame, self._converted(frame.iloc[:0]).dtype.name)

    def read(self, rows: slice | np.ndarray) -> np.ndarray:
        return _copied(self._converted(self._array.iloc[rows]), self._dtype)

    def _converted(self, frame: Any) -> np.ndarray:
        return (frame.astype(self._floatx) if self._floatx else frame).to_numpy()


def _taken(
    column: _InGraph | _InPython | None, indices: tf.Tensor, read: Iterator[tf.Tensor]
) -> tf.Tensor | None:
    """The rows of one array: gathered, or the next of those that were read."""
    if column is None:
        return None
    return column.gather(indices) if isinstance(column, _InGraph) else next(read)


def _spec_of(column: _InGraph | _InPython | None) -> tf.TensorSpec | None:
    return None if column is None else column.spec


def _column(leaf: Any, floatx: str) -> _InGraph | _InPython | None:
    if leaf is None:
        return None
    if _is_frame(leaf):
        return _Frame(leaf, floatx)
    array = _viewed(leaf)
    if isinstance(array, tf.Tensor):
        return _InGraph(array, floatx)
    return _Strings(array) if array.dtype == object else _Numbers(array, floatx)


def _viewed(leaf: Any) -> tf.Tensor | np.ndarray:
    """The same memory as a tensor or a NumPy array, where that is possible."""
    if _is_tensor(leaf):
        tensor = tf.convert_to_tensor(leaf)
        if "CPU" not in tensor.device:
            with tf.device("CPU:0"):
                return tf.identity(tensor)
        return tensor
    return np.expand_dims(leaf.to_numpy(), -1) if _is_series(leaf) else np.asarray(leaf)


def _halves(leaf: Any, at: int) -> tuple[Any, Any]:
    if leaf is None:
        return None, None
    if _is_frame(leaf) or _is_series(leaf):
        return leaf.iloc[:at], leaf.iloc[at:]
    array = _viewed(leaf)
    if isinstance(array, tf.Tensor) and array.dtype != tf.string:
        array = np.asarray(array)  # slices of tensors are copies, mostly
    return array[:at], array[at:]


def _can_take(leaf: Any) -> bool:
    if leaf is None:
        return True
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) or not hasattr(leaf, "shape"):
        return False
    if _is_frame(leaf):
        # Columns that have no type in common come as objects.
        dtypes = [*leaf.dtypes, leaf.iloc[:0].to_numpy().dtype]
        return all(isinstance(dtype, np.dtype) and _name(dtype) in _NUMBERS for dtype in dtypes)
    if "sparse" in type(leaf).__module__ or not hasattr(leaf, "__array__") or not leaf.shape:
        return False
    if _is_tensor(leaf):
        return _name(leaf.dtype) in _NUMBERS | {"string"}
    return _is_strings(leaf) or _has_numpy_numbers(leaf)


def _has_numpy_numbers(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if _is_series(leaf) and not isinstance(dtype, np.dtype):
        return False
    # A type without a name is one of PyTorch, which has some that NumPy does not know.
    return _name(dtype) in _NUMBERS and (hasattr(dtype, "name") or _name(dtype) in np.sctypeDict)


def _is_strings(leaf: Any) -> bool:
    return (
        isinstance(leaf, np.ndarray)
        and leaf.dtype == object
        and leaf.ndim == 1
        and all(isinstance(entry, str) for entry in leaf)
    )


def _is_tensor(leaf: Any) -> bool:
    """Whether it is a tensor, or a variable of TensorFlow or Keras."""
    return isinstance(leaf, (tf.Tensor, tf.Variable)) or hasattr(leaf, "__tf_tensor__")


def _is_frame(leaf: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(leaf, pandas.DataFrame)


def _is_series(leaf: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(leaf, pandas.Series)


def _name(dtype: Any) -> str:
    """The name of a type of NumPy, TensorFlow, JAX or PyTorch."""
    return getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]


def _cast_name(dtype: Any, floatx: str) -> str:
    return floatx if _name(dtype) in _FLOATS else _name(dtype)


def _spec(shape: Any, dtype: str) -> tf.TensorSpec:
    return tf.TensorSpec([None, *shape[1:]], dtype)


def _as_slice(indices: np.ndarray) -> slice | np.ndarray:
    """A slice for the same rows, if the indices are consecutive."""
    if len(indices) == 0 or np.any(np.diff(indices) != 1):
        return indices
    return slice(int(indices[0]), int(indices[-1]) + 1)


def _copied(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    result = _aligned_empty(array.shape, dtype)
    np.copyto(result, array, casting="unsafe")
    return result


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that TensorFlow can turn into a tensor without copying it."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -buffer.ctypes.data % _ALIGNMENT
    return buffer[begin : begin + size].view(dtype).reshape(shape)


def _with_tuples(structure: Any) -> Any:
    """The same structure with tuples for lists, which `tf.data` takes for tensors."""
    if isinstance(structure, dict):
        result = copy.copy(structure)
        for key, value in structure.items():
            result[key] = _with_tuples(value)
        return result
    if hasattr(structure, "_fields"):
        return type(structure)(*map(_with_tuples, structure))
    if isinstance(structure, (list, tuple)):
        return tuple(map(_with_tuples, structure))
    return structure
