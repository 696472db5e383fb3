"""Something is done when a module is imported, and not before."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tarantella.runtime.imports import before_import, when_imported


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


def test_a_module_that_others_only_look_for_is_still_watched(module: str) -> None:
    seen: list[str] = []
    when_imported(module, lambda: seen.append("after"))
    before_import(module, lambda: seen.append("before"))
    assert importlib.util.find_spec(module) is not None  # as libraries do with optional packages
    assert seen == []
    importlib.import_module(module)
    assert seen == ["before", "after"]


def test_an_import_that_is_refused_is_refused_again(module: str) -> None:
    def refuse() -> None:
        raise RuntimeError("refused")

    before_import(module, refuse)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refused"):
            importlib.import_module(module)
    del sys.meta_path[0]  # nobody can import it otherwise


def test_a_module_that_is_missing_is_still_missing() -> None:
    when_imported("no_such_module_anywhere", lambda: pytest.fail("it is not there"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_anywhere")
