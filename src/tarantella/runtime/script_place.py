"""Where a rank is in the user's script: the line, and the call of Tarantella or Keras there."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_PACKAGE = Path(__file__).parents[1]
_STANDARD_LIBRARY = Path(os.__file__).parent
COLLECTIVES = ("allreduce", "broadcast", "allgather", "barrier")
# What users call, by the name of the function that runs.
_CALLS = {
    "__new__": "tnt.Model",
    **{
        name: name
        for name in (
            *("fit", "evaluate", "predict"),
            *("train_on_batch", "test_on_batch", "predict_on_batch"),
            *("save", "save_weights", "save_model", "export", "load_weights", "load_model"),
            *("from_config", "model_from_config", "model_from_json", "model_from_yaml"),
            *("clone_model", "distribute_dataset", "apply_gradients", "apply"),
            *COLLECTIVES,
        )
    },
}


@dataclass(frozen=True)
class ScriptPlace:
    """A place in the user's code.

    Attributes:
        line: the file and the line, as in `train.py:12`; empty outside of the user's code
        call: what is called there; empty if it is nothing of Tarantella or Keras
    """

    line: str = ""
    call: str = ""

    def __str__(self) -> str:
        return f"{self.call} ({self.line})" if self.call and self.line else self.call or self.line


def place_of_thread(thread: int | None = None) -> ScriptPlace:
    """Where a thread is, or the main thread if that one is not in the user's code."""
    frames = sys._current_frames()
    place = place_of(frames.get(thread or 0))
    return place if place.line else place_of(frames.get(threading.main_thread().ident or 0))


def place_of(frame: FrameType | None) -> ScriptPlace:
    """The innermost line of the user's code, and the outermost call that it makes."""
    call = ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if is_users(path):
            return ScriptPlace(f"{_shown(path)}:{frame.f_lineno}", call)
        if _has_calls(path):
            call = _CALLS.get(frame.f_code.co_name, call)
        frame = frame.f_back
    return ScriptPlace()


def is_users(path: Path) -> bool:
    """Whether a file is the user's own, and not of Python, of Tarantella or of another package."""
    if path == _script():
        return True
    inside = {_STANDARD_LIBRARY, _PACKAGE} & set(path.parents) or "site-packages" in path.parts
    return not (inside or path.name.startswith("<"))


def _has_calls(path: Path) -> bool:
    keras = getattr(sys.modules.get("keras"), "__file__", None)
    return _PACKAGE in path.parents or (keras is not None and Path(keras).parent in path.parents)


def _script() -> Path | None:
    name = getattr(sys.modules["__main__"], "__file__", None)
    return None if name is None else Path(name)


def _shown(path: Path) -> str:
    """The name of the script; for other files, the path, as short as it can be."""
    if path == _script():
        return path.name
    with suppress(OSError, ValueError):  # the folder is gone, or is another one
        return str(path.relative_to(Path.cwd()))
    return str(path)
