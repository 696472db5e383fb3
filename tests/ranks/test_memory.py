"""Memory of what is no longer used is freed."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import script_ops

import tarantella as tnt
from tarantella.runtime import start

pytestmark = pytest.mark.ranks(2)


def _model(wrap: Callable[[keras.Model], keras.Model] = tnt.Model) -> keras.Model:
    model = wrap(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile(optimizer="sgd", loss="mse")
    return model


def _arrays() -> tuple[Any, dict[str, Any]]:
    x, y = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")
    return weakref.ref(x), {"x": x, "y": y, "batch_size": 16}


def _dataset() -> tuple[Any, dict[str, Any]]:
    samples = tf.data.Dataset.range(64).map(lambda i: (tf.ones(4), tf.ones(1)))
    dataset = samples.shuffle(9).batch(16)
    return weakref.ref(dataset), {"x": dataset}


@pytest.mark.parametrize("make", [_arrays, _dataset])
def test_data_are_let_go_of_after_fit(make: Callable[[], tuple[Any, dict[str, Any]]]) -> None:
    model = _model()
    watched, arguments = make()
    model.fit(**arguments, epochs=2, verbose=0)
    model.evaluate(**arguments, verbose=0)
    del arguments
    gc.collect()
    assert watched() is None


def _as_arrays() -> dict[str, Any]:
    return {"x": np.ones((64, 4), "float32"), "y": np.ones((64, 1), "float32"), "batch_size": 16}


def _as_new_dataset() -> dict[str, Any]:
    return {"x": _dataset()[1]["x"]}


def _as_generator() -> dict[str, Any]:
    batch = np.ones((16, 4), "float32"), np.ones((16, 1), "float32")
    return {"x": (batch for _ in range(4))}


@pytest.mark.parametrize("make", [_as_arrays, _as_new_dataset, _as_generator])
def test_no_functions_pile_up_from_call_to_call(make: Callable[[], dict[str, Any]]) -> None:
    model = _model()
    kept = []
    for _ in range(4):
        model.fit(**make(), validation_data=(np.ones((8, 4)), np.ones((8, 1))), verbose=0)
        model.evaluate(**make(), verbose=0)
        model.predict(np.ones((8, 4)), verbose=0)
        gc.collect()
        kept.append((script_ops._py_funcs.size(), len(context.context().list_function_names())))
    assert kept[1] == kept[-1]


def _graphs_left_behind(wrap: Callable[[keras.Model], keras.Model]) -> int:
    """How many graphs a model leaves behind that is not the first."""
    counts = []
    for _ in range(2):
        _model(wrap).fit(**_as_arrays(), verbose=0)
        gc.collect()
        counts.append(sum(isinstance(each, FuncGraph) for each in gc.get_objects()))
    return counts[1] - counts[0]


def test_a_model_that_is_gone_leaves_no_more_graphs_behind_than_plain_keras() -> None:
    """With a graph, its variables would stay. Plain Keras leaves one behind: its optimizer calls
    `all_reduce` of `tf.distribute`, which registers a gradient function of the graph for ever."""
    assert _graphs_left_behind(tnt.Model) <= _graphs_left_behind(lambda model: model)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(start._has_rdma(), reason="there UCX keeps note of memory, for its cache")
def test_memory_that_is_given_back_leaves_nothing_behind() -> None:
    def take_and_give_back() -> None:
        for _ in range(20_000):
            mmap.mmap(-1, mmap.PAGESIZE).close()

    take_and_give_back()
    before = _resident()
    take_and_give_back()
    assert _resident() - before < 2**20  # UCX would have taken 2.8 MB
