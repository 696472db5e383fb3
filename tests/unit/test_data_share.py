"""The share of the batch that was handed out last, in one thread and in several."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

from tarantella.data import share


@pytest.fixture(autouse=True)
def _whole() -> Iterator[None]:
    yield
    share.set_current(1, 1)


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_functions_read_the_share_each_time_they_run() -> None:
    function = tf.function(share.current)
    for count in 1, 3:
        share.set_current(count, 4)
        assert float(function()) == float(share.current()) == count / 4


def test_a_loop_knows_the_batch_of_the_loop_around_it() -> None:
    with share.loop():
        share.set_current(1, 4)
        with share.loop() as outer:
            share.set_current(1, 2)
            assert outer == (1, 4)
            assert share.current_counts() == (1, 2)


def test_loops_in_two_threads_do_not_disturb_each_other() -> None:
    def loop_of_other() -> float:
        with share.loop():
            share.set_current(3, 4)
            return float(tf.function(share.current)())

    function = tf.function(share.current)
    with share.loop():
        share.set_current(1, 4)
        assert float(function()) == 0.25
        assert in_thread(loop_of_other) == 0.75
        assert float(function()) == 0.25
        assert share.current_counts() == (1, 4)


def test_a_function_can_be_traced_in_another_thread() -> None:
    function = tf.function(share.current)
    in_thread(function)
    with share.loop():
        share.set_current(1, 4)
        assert float(function()) == 0.25


def test_a_step_can_be_taken_in_another_thread_than_the_loop() -> None:
    with share.loop():
        share.set_current(1, 4)
        assert in_thread(lambda: float(tf.function(share.current)())) == 0.25
