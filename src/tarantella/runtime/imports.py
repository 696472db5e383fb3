"""Doing something when a module is imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Calls `action` right after the import of a module; at once if it was imported before."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Watch(name, action))


class _Watch(MetaPathFinder):
    """Finds one module, once, and acts when it is loaded."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader = spec.loader if spec else None
        if loader is not None:
            load = loader.exec_module

            def load_and_act(module: ModuleType) -> None:
                load(module)
                self._action()

            loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec
