"""Doing something when a module is imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Calls `action` right after the import of a module; at once if it was imported before."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Watch(name, after=action))


def before_import(name: str, action: Callable[[], None]) -> None:
    """Calls `action` right before the import of a module; never if it was imported before."""
    if name not in sys.modules:
        sys.meta_path.insert(0, _Watch(name, before=action))


def _nothing() -> None:
    pass


class _Watch(MetaPathFinder):
    """Finds one module, and acts once, when it is loaded; others may look for it before."""

    def __init__(
        self,
        name: str,
        before: Callable[[], None] = _nothing,
        after: Callable[[], None] = _nothing,
    ) -> None:
        self._name = name
        self._before = before
        self._after = after

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name or self not in sys.meta_path:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (
            finder.find_spec(name, path, target)
            for finder in others
            if hasattr(finder, "find_spec")  # Python skips others as well
        )
        spec = next((spec for spec in found if spec is not None), None)
        loader = spec.loader if spec else None
        if loader is not None:
            load = loader.exec_module

            def load_and_act(module: ModuleType) -> None:
                self._before()
                with suppress(ValueError):  # not for the second time
                    sys.meta_path.remove(self)
                load(module)
                self._after()

            loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec
