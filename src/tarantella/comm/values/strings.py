"""Strings as plain buffers: the length of each one, and all their bytes in a row.

Nothing that arrives from another rank is unpickled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# What the elements are: text, raw bytes, or (in an array of objects) some of each.
TEXT, BYTES, OBJECT = "str", "bytes", "object"


def encode(array: Array, kind: str) -> tuple[Array, Array]:
    """Returns the lengths (shaped like `array`) and the bytes of all strings in `array`."""
    encoded = [_to_bytes(item, kind) for item in array.reshape(-1).tolist()]
    lengths = np.array([len(item) for item in encoded], np.int64).reshape(array.shape)
    return lengths, np.frombuffer(bytearray(b"".join(encoded)), np.uint8)


def decode(lengths: Array, payload: Array, kind: str) -> Array:
    """Returns the array that `encode` was given, its elements as Python objects."""
    ends = np.cumsum(lengths.reshape(-1), dtype=np.int64)
    data = payload.tobytes()
    strings = np.empty(lengths.shape, object)
    flat = strings.reshape(-1)
    for index, (end, length) in enumerate(zip(ends, lengths.reshape(-1), strict=True)):
        flat[index] = _from_bytes(data[end - length : end], kind)
    return strings


def _to_bytes(item: Any, kind: str) -> bytes:
    if kind == OBJECT:  # one letter in front says which of the two an element is
        if isinstance(item, str):
            return b"s" + _to_bytes(item, TEXT)
        return b"b" + _to_bytes(item, BYTES)
    # "surrogatepass": any Python string gets through, even one that is not valid Unicode.
    return item.encode("utf-8", "surrogatepass") if kind == TEXT else bytes(item)


def _from_bytes(data: bytes, kind: str) -> str | bytes:
    if kind == OBJECT:
        return _from_bytes(data[1:], TEXT if data[:1] == b"s" else BYTES)
    return data.decode("utf-8", "surrogatepass") if kind == TEXT else data
