"""One leaf of a structure: an array, tensor, number or string; its way to a buffer and back.

TensorFlow is used where a leaf is one of its tensors, and not imported for any other.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tarantella.comm import strings
from tarantella.errors import InputError

Array = npt.NDArray[Any]

_PYTHON_DTYPES = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
_NUMERIC = {
    *("bool", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
}
_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True)
class Leaf:
    """What a leaf holds, whatever object holds it.

    Args:
        source: Where the elements are: an array, an eager tensor, or a Python object.
        returns: The type of a result: "array", "scalar" (of numpy), "python" or "tensor".
        dtype: The dtype's name, or a kind of string (see `strings`).
        shape: Of the elements; empty for a single one.
    """

    source: Any
    returns: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_string(self) -> bool:
        return self.dtype in (strings.TEXT, strings.BYTES, strings.OBJECT)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the elements in a buffer, in this machine's byte order."""
        dtype: np.dtype[Any]
        if self.is_string:
            dtype = np.dtype(object)
        elif self.returns == "tensor":
            dtype = np.dtype(self.source.dtype.as_numpy_dtype)
        elif self.returns == "python":
            dtype = np.dtype(self.dtype)
        else:
            dtype = self.source.dtype.newbyteorder("=")
        return dtype

    def read(self, dtype: npt.DTypeLike | None = None) -> Array:
        """Returns the elements in a new C-contiguous array that shares no memory with the leaf."""
        dtype = self.numpy_dtype if dtype is None else dtype
        if self.returns == "tensor":
            # numpy() copies, as its documentation promises; a second copy is not needed.
            return np.asarray(self.source.numpy(), dtype, order="C").reshape(self.shape)
        return np.array(self.source, dtype, order="C")

    def result(self, array: Array) -> Any:
        """Returns `array` as the type of object this leaf is. It is taken over, not copied."""
        if self.is_string and self.returns != "python":
            array = _string_array(array, self)
        if self.returns == "tensor":
            import tensorflow as tf

            return tf.convert_to_tensor(array, tf.string if self.is_string else None)
        if self.returns == "scalar":
            return array[()]
        return array.item() if self.returns == "python" else array


def classify(value: Any) -> Leaf:
    """Says what `value` is.

    Raises:
        InputError: If it is nothing that can be sent to other ranks.
    """
    if isinstance(value, np.generic):
        return Leaf(value, "scalar", _dtype_name(np.asarray(value)), ())
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        return Leaf(value, "array", _dtype_name(value), value.shape)
    if isinstance(value, (str, bytes)):
        return Leaf(value, "python", strings.TEXT if isinstance(value, str) else strings.BYTES, ())
    if isinstance(value, (bool, int, float, complex)):
        return _python_number(value)
    tf = sys.modules.get("tensorflow")
    if tf is not None and tf.is_tensor(value):
        return _tensor(value, tf)
    raise InputError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent to other ranks; "
        "pass arrays, tensors, numbers, strings, or dicts, lists and tuples of them"
    )


def _python_number(value: complex) -> Leaf:
    kind = next(kind for kind in _PYTHON_DTYPES if isinstance(value, kind))
    if kind is int and not _INT64.min <= int(value.real) <= _INT64.max:
        raise InputError(f"the integer {value} does not fit into 64 bits; pass a float")
    return Leaf(value, "python", _PYTHON_DTYPES[kind], ())


def _tensor(value: Any, tf: Any) -> Leaf:
    if isinstance(value, (tf.IndexedSlices, tf.RaggedTensor, tf.SparseTensor)):
        raise InputError(f"a {type(value).__name__} is not dense; convert it to a dense tensor")
    if tf.is_symbolic_tensor(value):
        raise InputError("a symbolic tensor has no value; call this outside of tf.function")
    tensor = tf.convert_to_tensor(value)  # reads a variable, of TensorFlow or of Keras
    name = strings.BYTES if tensor.dtype == tf.string else tensor.dtype.name
    if name != strings.BYTES and not _is_numeric(name):
        raise InputError(f"tensors of {name} cannot be sent to other ranks; cast them first")
    return Leaf(tensor, "tensor", name, tuple(tensor.shape))


def _dtype_name(array: Array) -> str:
    """Names the dtype, or the kind of string, of an array that can be sent."""
    if array.dtype.kind in "US":
        return strings.TEXT if array.dtype.kind == "U" else strings.BYTES
    if array.dtype.kind == "O" and all(isinstance(item, (str, bytes)) for item in array.flat):
        return strings.OBJECT
    if not _is_numeric(array.dtype.name):
        hint = " that are not strings" if array.dtype.kind == "O" else ""
        raise InputError(
            f"arrays of {array.dtype}{hint} cannot be sent to other ranks; cast them first"
        )
    return array.dtype.name


def _is_numeric(name: str) -> bool:
    return name in _NUMERIC or name.startswith("float8_")


def _string_array(strings_found: Array, leaf: Leaf) -> Array:
    if leaf.returns == "tensor" or leaf.dtype == strings.OBJECT:
        return strings_found
    return strings_found.astype("U" if leaf.dtype == strings.TEXT else "S")
