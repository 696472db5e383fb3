"""Makes Python quicker in the processes that tests start.

- Keras imports scikit-learn, pandas, Matplotlib and IPython wherever they are installed, for what
  few scripts use. With this folder on the PYTHONPATH it finds none of them, as where only
  Tarantella is installed. A script that imports them itself gets them.
- TensorFlow names the same few types 18,000 times, and Python parses each anew.
- Garbage is collected rarely.

With TEST_SHARED_CORES, ranks leave the core to other tests while they wait, as where ranks share
cores, and collect no garbage when they end. With TEST_DEVICE=cpu, Keras compiles as on a GPU.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import typing
from typing import Any

from changed_modules import change

_LEFT_OUT = ("IPython", "matplotlib", "pandas", "sklearn")


class _NotForKeras:
    """Finds nothing; but refuses a package to Keras."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name in _LEFT_OUT and _importer().startswith("keras."):
            raise ModuleNotFoundError(f"{name} is left out for Keras", name=name)


def _importer() -> str:
    """The module that has the import statement which is being executed."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("importlib."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def _parse_names_of_types_once() -> None:
    """For Python's own function that makes a type of the name of a type, where it has one."""
    original: Any = getattr(typing, "_type_convert", None)
    if original is None:
        return
    known: dict[Any, Any] = {}

    def convert(arg: Any, module: Any = None, **options: Any) -> Any:
        if not isinstance(arg, str):
            return original(arg, module, **options)
        key = (arg, module, *options.items())
        if key not in known:
            known[key] = original(arg, module, **options)
        return known[key]

    typing._type_convert = convert  # type: ignore[attr-defined]


def _share_cores(world: Any) -> None:
    world._cores_of = lambda _: 1


gc.set_threshold(100_000)
_parse_names_of_types_once()
sys.meta_path.insert(0, _NotForKeras())  # type: ignore[arg-type]
if os.environ.get("TEST_SHARED_CORES") == "true":
    change("tarantella.runtime.world", _share_cores)
    atexit.register(gc.freeze)
if os.environ.get("TEST_DEVICE") == "cpu":
    import keras_with_xla

    keras_with_xla.install()
