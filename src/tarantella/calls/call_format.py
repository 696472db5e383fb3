"""What travels between `tnt.run` and its ranks: a function with its arguments, and replies."""

from __future__ import annotations

import io
import linecache
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import cloudpickle

from tarantella.errors import RankError

_LENGTH = 8  # bytes in front of a message, with its length

Source = tuple[int, None, list[str], str]


def framed(message: bytes) -> bytes:
    """A message with its length in front."""
    return len(message).to_bytes(_LENGTH, "little") + message


def framed_size(data: bytes | bytearray) -> int:
    """How long a message is, with its length in front, by its first bytes."""
    return _LENGTH + int.from_bytes(data[:_LENGTH], "little")


def unframed(data: bytes | bytearray) -> bytes | None:
    """The message in what has arrived; None if some of it is missing."""
    is_complete = len(data) >= _LENGTH and len(data) == framed_size(data)
    return bytes(data[_LENGTH:]) if is_complete else None


@dataclass(frozen=True)
class Call:
    """A call of a function on every rank.

    Attributes:
        content: two pickles: classes that Keras must know; the function and its arguments
        all_reply: whether every rank replies, and not only the master rank
        path: where modules are imported from
        arguments: `sys.argv`
        sources: code that is in no file, such as a notebook's, for tracebacks and AutoGraph
    """

    content: bytes
    all_reply: bool
    path: list[str]
    arguments: list[str]
    sources: dict[str, Source]

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...], all_reply: bool) -> Call:
        """A call of a function of this process."""
        file = io.BytesIO()
        pickler = cloudpickle.Pickler(file)
        pickler.dump(_registered_classes())
        pickler.dump((function, args))
        return cls(file.getvalue(), all_reply, list(sys.path), list(sys.argv), _sources())

    def packed(self) -> bytes:
        return pickle.dumps(vars(self))

    @classmethod
    def unpacked(cls, data: Any) -> Call:
        return cls(**pickle.loads(data))

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function and its arguments, in a process like the one that they come from."""
        sys.path[:] = self.path
        sys.argv[:] = self.arguments
        linecache.cache.update(self.sources)
        unpickler = pickle.Unpickler(io.BytesIO(self.content))
        try:
            _register(unpickler.load())  # before a model that has such layers is loaded
            function, args = unpickler.load()
        except Exception as error:
            raise RankError(
                "The function or its arguments cannot be loaded on a rank "
                f"({type(error).__name__}: {error})."
            ) from error
        return function, args


@dataclass(frozen=True)
class Reply:
    """What became of a call on one rank.

    Attributes:
        ranks: how many ranks there are
        content: what the function has returned or raised, as a pickle; empty: it cannot be pickled
        error: what was raised, in one line; empty if nothing was
        traceback: where
    """

    ranks: int
    content: bytes
    error: str = ""
    traceback: str = ""

    def packed(self) -> bytes:
        return pickle.dumps(vars(self))

    @classmethod
    def unpacked(cls, data: bytes) -> Reply:
        return cls(**pickle.loads(data))


def pickled_result(result: Any) -> bytes:
    """A result as a pickle, with plain Keras models where it has a `tnt.Model`."""
    file = io.BytesIO()
    _ResultPickler(file).dump(result)
    return file.getvalue()


def pickled_error(error: Exception) -> bytes:
    """An exception as a pickle; empty if there is none that it could be made from again."""
    try:
        content: bytes = cloudpickle.dumps(error)
        again = pickle.loads(content)
    except Exception:  # a user's class may raise anything
        return b""
    return content if type(again) is type(error) else b""


class _ResultPickler(cloudpickle.Pickler):
    """Pickles each `tnt.Model` as the plain model that it was made from."""

    def reducer_override(self, obj: Any) -> Any:
        ours = sys.modules.get("tarantella.keras.model")
        if ours is not None and isinstance(obj, ours.Model):
            return obj._plain().__reduce__()
        return super().reducer_override(obj)


def _sources() -> dict[str, Source]:
    """The code that a notebook or a shell has kept, and that of a script."""
    found: dict[str, Source] = {
        name: (entry[0], None, entry[2], entry[3])
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and not Path(name).exists()
    }
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None and (lines := linecache.getlines(script)):
        found[script] = (sum(map(len, lines)), None, lines, script)
    return found


def _registered_classes() -> dict[str, Any]:
    """What `keras.saving.register_keras_serializable` was used for in the script or notebook."""
    keras = sys.modules.get("keras")
    if keras is None:
        return {}
    everything = keras.saving.get_custom_objects().items()
    return {
        name: value for name, value in everything if getattr(value, "__module__", "") == "__main__"
    }


def _register(classes: dict[str, Any]) -> None:
    if not classes:
        return  # Keras takes long to import
    saving = import_module("keras").saving
    for full_name, value in classes.items():
        package, separator, name = full_name.rpartition(">")
        if separator:
            saving.register_keras_serializable(package, name)(value)
        else:
            saving.get_custom_objects()[name] = value
