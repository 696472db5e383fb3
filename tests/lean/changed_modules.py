"""Changes modules right after they have been imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Finder:
    """Finds what others find; but changes one module, once it is there."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            self._action(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def change(name: str, action: Callable[[ModuleType], None]) -> None:
    """To be called before the module is imported."""
    sys.meta_path.insert(0, _Finder(name, action))  # type: ignore[arg-type]
