"""Values from rank to rank, as JSON. Unlike a pickle, nothing that arrives can run code.

NumPy is loaded when something is sent: the command loads this module and sends nothing.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def packed(value: Any) -> np.ndarray:
    """A value of strings, numbers, lists and dictionaries as bytes; tuples arrive as lists."""
    import numpy as np

    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def unpacked(data: Any) -> Any:
    """The value in such bytes."""
    return json.loads(bytes(data))


def bcast(value: Any, communicator: Any, root: int = 0) -> Any:
    """The value that the root has, on every rank."""
    is_root = communicator.Get_rank() == root
    return unpacked(bcast_bytes(packed(value) if is_root else b"", communicator, root))


def bcast_bytes(data: Any, communicator: Any, root: int = 0) -> np.ndarray:
    """The bytes that the root has, on every rank; what the others pass does not matter."""
    import numpy as np

    is_root = communicator.Get_rank() == root
    size = np.array([len(data)], np.int64)
    communicator.Bcast(size, root)
    everyones = np.frombuffer(data, np.uint8) if is_root else np.empty(size[0], np.uint8)
    communicator.Bcast(everyones, root)
    return everyones


def allgather(value: Any, communicator: Any) -> list[Any]:
    """The values of all ranks, by rank."""
    import numpy as np

    data = packed(value)
    sizes = np.empty(communicator.Get_size(), np.int64)
    communicator.Allgather(np.array([len(data)], np.int64), sizes)
    everyones = np.empty(sizes.sum(), np.uint8)
    communicator.Allgatherv(data, (everyones, sizes))
    return [unpacked(each) for each in np.split(everyones, np.cumsum(sizes)[:-1])]


def packed_error(error: Exception) -> bytes:
    """An error for another rank."""
    args = list(error.args)
    if isinstance(error, OSError) and error.filename is not None:
        args = [error.errno, error.strerror, _name(error.filename)]
        if error.filename2 is not None:
            args += [None, _name(error.filename2)]
    elif not args and isinstance(getattr(error, "message", None), str):
        args = [None, None, error.message]  # type: ignore[attr-defined]  # as in TensorFlow
    if not all(arg is None or isinstance(arg, (str, int, float)) for arg in args):
        args = [str(error)]
    kinds = [kind for kind in type(error).__mro__ if issubclass(kind, Exception)]
    names = [[kind.__module__, kind.__qualname__] for kind in kinds]
    return bytes(packed([names, args, str(error)]))


def unpacked_error(data: bytes) -> Exception:
    """The error that another rank has packed.

    If its class is unknown here, or cannot be made again, it becomes an error of a base class with
    the same text. An attribute tells `failure` that it is not this rank's own.
    """
    error = _remade(data)
    with suppress(AttributeError):
        error._tnt_is_echo = True  # type: ignore[attr-defined]
    return error


def _remade(data: bytes) -> Exception:
    names, args, text = unpacked(data)
    for (module, name), given in [(names[0], args), *((each, [text]) for each in names)]:
        try:
            error = _class(module, name)(*given)
            if isinstance(error, Exception) and str(error) == text:
                return RuntimeError(text) if type(error) is Exception else error
        except Exception:  # a user's class may raise anything
            pass
    return RuntimeError(text)


def _class(module: str, name: str) -> type[Exception]:
    """A class of exceptions that is loaded already."""
    kind: Any = sys.modules[module]
    for part in name.split("."):
        kind = vars(kind)[part]
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise TypeError(name)
    return kind


def _name(file: Any) -> Any:
    return os.fsdecode(file) if isinstance(file, bytes) else file
