"""Makes Keras compile with XLA by default on the CPU, as it does where it finds a GPU.

`tests/gpu/run.py --device cpu` wants it: the steps of its tests are then those that GPUs take.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_TRAINER = "keras.src.trainers.trainer"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what others find; but changes the class that decides, once it is there."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != _TRAINER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            module.Trainer._resolve_auto_jit_compile = module.model_supports_jit

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def install() -> None:
    """To be called before Keras is imported."""
    sys.meta_path.insert(0, _Finder())
