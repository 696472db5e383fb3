"""Finds the module that `python -m` would run. Standard library only."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from types import CodeType
from typing import Any

from tarantella.runtime.failure import BAD_INPUT


@dataclass(frozen=True)
class FoundModule:
    """A module to run.

    Attributes:
        path: its file
        code: its code
        attributes: those of the module, besides its name
    """

    path: str
    code: CodeType
    attributes: dict[str, Any]


class NoModule(SystemExit):
    """There is no such module; the user sees the message, and no traceback."""

    def __init__(self, cause: str) -> None:
        super().__init__(BAD_INPUT)
        self.tnt_cause = cause


def find_module(name: str) -> FoundModule:
    """The module with this name, or the `__main__` in a package; imports the packages around it."""
    spec = _spec_of(name)
    if spec is None:
        raise NoModule(f"There is no module {name}: check its name, and where Python looks for it")
    if spec.submodule_search_locations is not None:
        inside = f"{name}.__main__"
        spec = _spec_of(inside)
        if spec is None:
            raise NoModule(f"{name} is a package without a module __main__: name a module in it")
        name = inside
    code = spec.loader.get_code(name) if isinstance(spec.loader, InspectLoader) else None
    if code is None:
        raise NoModule(f"{name} is not a module of Python code, which -m needs")
    path = str(spec.origin)
    attributes = {
        "__file__": path,
        "__cached__": spec.cached,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__spec__": spec,
    }
    return FoundModule(path, code, attributes)


def _spec_of(name: str) -> ModuleSpec | None:
    if not all(name.split(".")):
        return None  # Python would take it for a relative name
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # Not one that a package on the way to it fails to import.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise
    except ValueError:  # it is loaded, and nobody knows from where
        return None
