from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest
from tensorflow.python.eager import context

from tarantella.comm import waiting

# Tests of what ranks do while they wait: they wait as they do with a core for each rank.
ABOUT_WAITING = ("test_channels", "test_collectives", "test_order_of_calls", "test_threads")


@pytest.fixture(autouse=True, scope="module")
def shared_cores(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks leave the core to other tests while they wait, as they do where ranks share cores."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__ not in ABOUT_WAITING:
            waiting.ranks_share_cores.cache_clear()
            patch.setattr(waiting, "_cores_of", lambda _: 1)
        yield
    waiting.ranks_share_cores.cache_clear()


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
