"""One leaf of a structure: an array, tensor, number or string; its way to a buffer and back.

NumPy's and Python's own values are known here. Tensors belong to a library that `comm` does not
import: whoever does registers how to read and rebuild them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tarantella.comm.values import strings
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
        source: Where the elements are: an array, a tensor, or a Python object.
        returns: The type of a result: "array", "scalar" (of NumPy), "python" or "tensor".
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
        if self.is_string:
            return np.dtype(object)
        if self.returns == "python":
            return np.dtype(self.dtype)
        dtype: np.dtype[Any] = self.source.dtype.newbyteorder("=")
        return dtype

    def read(self, dtype: npt.DTypeLike | None = None) -> Array:
        """Returns the elements in a new C-contiguous array that shares no memory with the leaf."""
        return np.array(self.source, self.numpy_dtype if dtype is None else dtype, order="C")

    def result(self, array: Array) -> Any:
        """Returns `array` as the type of object this leaf is. It is taken over, not copied."""
        if self.returns == "python":
            return array.item()
        if self.is_string and self.dtype != strings.OBJECT:
            array = array.astype("U" if self.dtype == strings.TEXT else "S")
        return array[()] if self.returns == "scalar" else array


class Tensors(Protocol):
    """What collectives need to know about a library's tensors."""

    def leaf(self, value: Any) -> Leaf | None:
        """The leaf of a tensor; None for another value. Raises an InputError for one it refuses.

        Reading it copies, as `Leaf.read` does, and its result is a tensor.
        """

    def is_tracing(self) -> bool:
        """Whether a graph is being made, and nothing in it has a value yet."""


_libraries: list[Tensors] = []


def register(tensors: Tensors) -> None:
    """Lets collectives take the tensors of a library."""
    _libraries.append(tensors)


def is_tracing() -> bool:
    """Whether a graph is being made in this thread."""
    return any(tensors.is_tracing() for tensors in _libraries)


def classify(value: Any) -> Leaf:
    """Says what `value` is.

    Raises:
        InputError: If it cannot be sent to other ranks.
    """
    if isinstance(value, np.generic):
        return Leaf(value, "scalar", _dtype_name(np.asarray(value)), ())
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        return Leaf(value, "array", _dtype_name(value), value.shape)
    if isinstance(value, (str, bytes)):
        return Leaf(value, "python", strings.TEXT if isinstance(value, str) else strings.BYTES, ())
    if isinstance(value, (bool, int, float, complex)):
        return _python_number(value)
    for tensors in _libraries:
        if (leaf := tensors.leaf(value)) is not None:
            return leaf
    raise InputError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent to other ranks; "
        "pass arrays, tensors, numbers, strings, or dicts, lists and tuples of them"
    )


def is_numeric(dtype: str) -> bool:
    """Whether numbers of this dtype can be sent."""
    return dtype in _NUMERIC or dtype.startswith("float8_")


def _python_number(value: complex) -> Leaf:
    kind = next(kind for kind in _PYTHON_DTYPES if isinstance(value, kind))
    if kind is int and not _INT64.min <= int(value.real) <= _INT64.max:
        raise InputError(f"the integer {value} does not fit into 64 bits; pass a float")
    return Leaf(value, "python", _PYTHON_DTYPES[kind], ())


def _dtype_name(array: Array) -> str:
    """Names the dtype, or the kind of string, of an array that can be sent."""
    if array.dtype.kind in "US":
        return strings.TEXT if array.dtype.kind == "U" else strings.BYTES
    if array.dtype.kind == "O" and all(isinstance(item, (str, bytes)) for item in array.flat):
        return strings.OBJECT
    if not is_numeric(array.dtype.name):
        hint = " that are not strings" if array.dtype.kind == "O" else ""
        raise InputError(
            f"arrays of {array.dtype}{hint} cannot be sent to other ranks; cast them first"
        )
    return array.dtype.name
