"""Configuration of all tests: the plugin for tests on ranks, with Tarantella started on each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "plugin"))

pytest_plugins = ["rank_plugin"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("rank_preload", "tarantella")
