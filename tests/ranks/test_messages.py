"""What ranks tell each other, besides arrays: as data that cannot do anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tarantella as tnt
from tarantella.runtime import messages, world

pytestmark = pytest.mark.ranks(2)


class OwnError(Exception):
    """One that can be made again from its text."""


class OddError(Exception):
    """One that cannot."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(f"{first} and {second}")


class OddValueError(ValueError):
    """One that cannot either, but is a kind of one that can."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(f"{first} and {second}")


def raised(error: Exception) -> Exception:
    return messages.unpacked_error(messages.packed_error(error))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        KeyError("name"),
        OwnError("ours", 3, None),
        FileNotFoundError(2, "No such file or directory", "é\udcff"),
        ZeroDivisionError(),
        OSError(18, "Invalid cross-device link", "one", None, "other"),
        FileNotFoundError(2, "No such file or directory", b"name"),
        tf.errors.NotFoundError(None, None, "no such key"),
    ],
)
def test_errors_that_travel(error: Exception) -> None:
    arrived = raised(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OddError(1, 2), RuntimeError),
        (OddValueError(1, 2), ValueError),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), UnicodeError),
        (ValueError([1]), ValueError),
    ],
)
def test_errors_whose_text_travels(error: Exception, kind: type[Exception]) -> None:
    assert str(raised(error)) == str(error)
    assert type(raised(error)) is kind


def test_only_errors_are_made_of_what_arrives() -> None:
    for module, name in (("os", "system"), ("builtins", "print"), ("pathlib", "Path"), ("x", "y")):
        arrived = messages.unpacked_error(
            bytes(messages.packed([[[module, name]], ["touch x"], "no"]))
        )
        assert type(arrived) is RuntimeError
        assert str(arrived) == "no"


@pytest.fixture
def no_pickles() -> Iterator[None]:
    from mpi4py import MPI

    def refuse(*args: Any) -> Any:
        raise AssertionError("a pickle")

    MPI.pickle.__init__(refuse, refuse)
    yield
    MPI.pickle.__init__()  # to its own: one that was given its own methods would call itself


def test_nothing_is_pickled(no_pickles: None, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="a pickle"):
        world.communicator("control").allgather("the test can fail")
    model = tnt.Model(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse", metrics=["mae"])
    x = np.ones((8, 3))

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if tnt.get_rank() == 1 and epoch == 1:
                raise OwnError("one rank")

    saves = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[saves], validation_split=0.25)
    with pytest.raises(OwnError, match="one rank"):
        model.fit(x, x[:, :1], batch_size=4, epochs=3, verbose=0, callbacks=[Stop()])

    def batches() -> Iterator[Any]:
        for _ in range(2):
            yield x[:4], x[:4, :1]

    model.fit(batches(), verbose=0)
    model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    assert tnt.allgather({"text": "é", "numbers": [1, 2]})[0]["numbers"] == [1, 2]
