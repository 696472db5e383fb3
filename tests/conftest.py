"""Configuration of all tests: the plugin for tests on ranks, with Tarantella started on each."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "plugin"))
LEAN = str(Path(__file__).parent / "lean")

pytest_plugins = ["rank_plugin"]


def pytest_configure(config: pytest.Config) -> None:
    """Processes that tests start import Keras without what it takes but does not need."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if LEAN not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [LEAN, *inherited]))
    # A shell that starts the tests in the background has them ignore Ctrl+C, and so would every
    # command that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The lines at the start and the end of a run have tests of their own, which ask for them.
    os.environ["TNT_QUIET"] = "true"
    config.addinivalue_line("rank_preload", "tarantella")
