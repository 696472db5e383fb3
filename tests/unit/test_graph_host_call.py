"""Python functions in graphs: what says when they are called."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tarantella.graph.host_call import host_call
from tarantella.internals import tensorflow as internals


def one() -> np.float32:
    return np.float32(1.0)


def operations(independent: bool) -> list[Any]:
    def traced() -> Any:
        return [host_call(one, [], [tf.float32], independent=independent)[0] for _ in range(2)]

    graph = tf.function(traced).get_concrete_function().graph
    return [operation for operation in graph.get_operations() if operation.type == "PyFunc"]


def test_tensorflow_keeps_the_order_of_a_program() -> None:
    first, second = operations(independent=False)
    assert second.control_inputs == [first]


def test_an_independent_call_waits_for_no_other() -> None:
    first, second = operations(independent=True)
    assert (first.control_inputs, second.control_inputs) == ([], [])


def test_an_independent_call_is_made_though_nobody_needs_its_result() -> None:
    calls = []

    @tf.function
    def function(x: Any) -> Any:
        host_call(lambda: calls.append(1) or True, [], [tf.bool], independent=True)
        return 2 * x

    assert function(tf.constant(2)) == 4
    assert function(tf.constant(3)) == 6
    assert len(calls) == 2


class Model:
    def one(self) -> np.float32:
        return np.float32(1.0)


def traced_with(model: Model) -> Any:
    function = tf.function(lambda: host_call(model.one, [], [tf.float32]))
    return function.get_concrete_function()


def test_a_function_lives_as_long_as_its_graph() -> None:
    model = Model()
    alive = weakref.ref(model)
    function = traced_with(model)
    del model
    gc.collect()
    assert function()[0] == 1.0
    assert alive() is not None
    del function
    gc.collect()
    assert alive() is None


def test_without_the_private_names_of_tensorflow_calls_stay_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function is kept then as long as the program, and called in the order of the program."""
    gone = {"outer_graph", "experimental_acd_manager"}

    def without_names(owner: Any, name: str, *default: Any) -> Any:
        return default[0] if name in gone else getattr(owner, name, *default)

    monkeypatch.setattr(internals, "getattr", without_names, raising=False)
    function = tf.function(lambda: host_call(lambda: np.float32(1.0), [], [tf.float32]))
    assert function() == [1.0]
    first, second = operations(independent=True)
    assert second.control_inputs == [first]
