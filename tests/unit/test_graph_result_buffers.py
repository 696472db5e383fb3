"""Memory for results: never written while TensorFlow needs it, used again afterwards."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tarantella.comm.buckets import Bucket, TensorSpec
from tarantella.graph.result_buffers import ResultBuffers

SPECS = [TensorSpec((1000,), np.dtype(np.float32)), TensorSpec((3, 50), np.dtype(np.float32))]


@pytest.fixture
def buffers() -> ResultBuffers:
    return ResultBuffers(Bucket.of(range(len(SPECS)), SPECS))


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_is_used_again_when_nobody_holds_it(buffers: ResultBuffers) -> None:
    seen = set()
    for _ in range(5):
        whole, members = buffers.take()
        assert address(members[0]) == address(whole)
        assert [member.shape for member in members] == [spec.shape for spec in SPECS]
        seen.add(address(whole))
    del members
    assert len(seen) == 2  # a loop holds the arrays of one turn while it takes those of the next


@pytest.mark.parametrize("held", [0, 1])
def test_memory_of_an_array_that_is_held_is_not_used_again(
    buffers: ResultBuffers, held: int
) -> None:
    whole, members = buffers.take()
    kept = members[held]
    del members
    for _ in range(3):
        assert address(buffers.take()[0]) != address(whole)
    del kept
    assert address(buffers.take()[0]) == address(whole)


def step(buffers: ResultBuffers) -> Any:
    """A function of a graph whose results lie in the buffers."""

    def compute(value: np.ndarray) -> list[np.ndarray]:
        _, members = buffers.take()
        for member in members:
            member[...] = value
        return members

    @tf.function
    def function(value: tf.Tensor) -> Any:
        results = tf.numpy_function(compute, [value], [spec.dtype for spec in SPECS])
        for result, spec in zip(results, SPECS, strict=True):
            result.set_shape(spec.shape)
        return results

    return function


def known(buffers: ResultBuffers) -> int:
    return len(buffers._buffers)


def test_memory_of_a_tensor_is_not_written_while_it_is_held(buffers: ResultBuffers) -> None:
    function = step(buffers)
    held = [function(tf.constant(float(number))) for number in range(4)]
    for number, results in enumerate(held):
        for result in results:
            np.testing.assert_array_equal(result, number)
    assert known(buffers) == 4


def test_memory_of_one_member_keeps_the_bucket(buffers: ResultBuffers) -> None:
    function = step(buffers)
    second = function(tf.constant(1.0))[1]
    for number in range(3):
        function(tf.constant(number + 2.0))
    np.testing.assert_array_equal(second, 1.0)


def test_memory_that_a_variable_was_assigned_from_is_not_written(buffers: ResultBuffers) -> None:
    function = step(buffers)
    variable = tf.Variable(tf.zeros(SPECS[0].shape))
    variable.assign(function(tf.constant(1.0))[0])
    for number in range(3):
        function(tf.constant(number + 2.0))
    np.testing.assert_array_equal(variable, 1.0)


def test_memory_of_tensors_is_used_again_in_later_steps(buffers: ResultBuffers) -> None:
    function = step(buffers)
    for number in range(20):
        results = function(tf.constant(float(number)))
        np.testing.assert_array_equal(results[0], float(number))
    del results
    gc.collect()
    assert known(buffers) <= 3
