"""Fixtures for all tests that train: those on ranks, and those on GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest
from tensorflow.python.eager import context


@pytest.fixture
def float64() -> Iterator[None]:
    """Computes in float64, in which rounding cannot hide a wrong result."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.fixture(autouse=True)
def unseeded() -> None:
    """Forgets the seed that an earlier test has set; TensorFlow has no public way to."""
    context.context()._set_global_seed(None)


@pytest.fixture(autouse=True)
def no_time_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks say at once that their data differ; in a test no other one takes down the run."""
    monkeypatch.setattr("tarantella.runtime.times.TIME_FOR_DATA_ERROR", 0.0)
