"""Something is done when a module is imported, and not before."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tarantella.runtime.imports import when_imported


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "watched_module.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "watched_module"
    sys.modules.pop("watched_module", None)


def test_the_action_comes_right_after_the_import(module: str) -> None:
    seen: list[int] = []
    when_imported(module, lambda: seen.append(sys.modules[module].value))
    assert not seen
    assert importlib.import_module(module).value == 7
    assert seen == [7]
    importlib.import_module(module)
    assert seen == [7]


def test_the_action_comes_at_once_for_what_is_imported(module: str) -> None:
    importlib.import_module(module)
    seen: list[int] = []
    when_imported(module, lambda: seen.append(1))
    assert seen == [1]


def test_a_module_that_is_missing_is_still_missing() -> None:
    when_imported("no_such_module_anywhere", lambda: pytest.fail("it is not there"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_anywhere")
