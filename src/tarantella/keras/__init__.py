"""Tarantella's versions of parts of Keras, under the names they have there.

Modules are loaded when they are first used: they load Keras.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tarantella.keras import callbacks as callbacks
    from tarantella.keras import optimizers as optimizers

_PUBLIC = ("callbacks", "optimizers")


if not TYPE_CHECKING:  # see tarantella/__init__.py

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'tarantella.keras' has no attribute {name!r}")
        return import_module(f"tarantella.keras.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
