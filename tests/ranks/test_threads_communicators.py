"""Threads that train at the same time: each has communicators of its own."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import CLASSIFICATION, assert_close, classification_data, small_model

import tarantella as tnt
from tarantella.comm.agreement import check_same
from tarantella.comm.master_done import Subject, done_by_master
from tarantella.comm.thread_communicators import communicators_of_this_thread
from tarantella.errors import InputError, MismatchError
from tarantella.graph import engine
from tarantella.graph.overlapped import OverlappedChannel
from tarantella.runtime import world

TWO = pytest.mark.ranks(2)


def in_threads(**functions: Callable[[], Any]) -> dict[str, Any]:
    """What functions return that run at the same time, in threads of these names."""
    results: dict[str, Any] = {}
    problems: list[BaseException] = []

    def run(name: str) -> None:
        try:
            results[name] = functions[name]()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(name,), name=name) for name in functions]
    random.Random(tnt.get_rank()).shuffle(threads)  # on each rank in another order
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return results


def at_another_time_on_each_rank(name: str) -> None:
    time.sleep(random.Random(f"{name}{tnt.get_rank()}{time.time()}").uniform(0, 0.005))


@TWO
def test_the_main_thread_has_the_communicators_of_the_run() -> None:
    before = world.communicator("metrics")
    with communicators_of_this_thread():
        assert world.communicator("metrics") is before


@TWO
def test_a_thread_has_its_own_and_the_next_of_its_name_has_the_same() -> None:
    def own() -> Any:
        with communicators_of_this_thread():
            found = world.communicators()
            with communicators_of_this_thread():  # as `fit` does that calls `evaluate`
                assert world.communicators() is found
        assert world.communicators() is not found
        return found

    first = in_threads(one=own, other=own)
    assert first["one"] is not first["other"]
    assert in_threads(one=own)["one"] is first["one"]


@TWO
@pytest.mark.parametrize("size", [3, 100_000])  # by messages, and through shared memory
def test_sums_of_threads_do_not_mix(size: int) -> None:
    def sums(factor: int, background: bool) -> list[float]:
        name = threading.current_thread().name
        with communicators_of_this_thread():

            @tf.function
            def summed(x: tf.Tensor) -> Any:
                if background:
                    channel: Any = OverlappedChannel("gradients", "sparse gradients")
                else:
                    channel = engine.channel("gradients")
                return channel.allreduce([x, 2 * x], threshold=0)

            results = []
            for step in range(20):
                at_another_time_on_each_rank(name)
                own = factor * (step + tnt.get_rank())
                first, second = summed(tf.fill([size], float(own)))
                assert (second == 2 * first).numpy().all()
                results.append(float(first[-1]))
                assert tnt.allreduce(factor) == 2 * factor
                check_same([factor, step], "the step of a thread")
        return results

    expected = {
        name: [float(factor * (2 * step + 1)) for step in range(20)]
        for name, factor in (("one", 1), ("other", 1000), ("third", 100_000))
    }
    results = in_threads(
        one=lambda: sums(1, False),
        other=lambda: sums(1000, False),
        third=lambda: sums(100_000, True),
    )
    assert results == expected


@TWO
def test_reports_of_the_master_stay_in_their_thread() -> None:
    def save() -> int:
        name = threading.current_thread().name
        done = 0
        with communicators_of_this_thread():
            for step in range(20):
                at_another_time_on_each_rank(name)
                done_by_master(Subject("save", f"{step}"), lambda: None)
                if name == "other":
                    tnt.barrier()
                done += 1
        return done

    assert in_threads(one=save, other=save) == {"one": 20, "other": 20}


@TWO
def test_threads_of_one_name_are_refused() -> None:
    inside, may_end = threading.Event(), threading.Event()

    def wait_inside() -> None:
        with communicators_of_this_thread():
            inside.set()
            may_end.wait()

    def enter() -> None:
        inside.wait()
        threading.current_thread().name = "first"
        try:
            with pytest.raises(InputError, match="Two threads named 'first'"):
                communicators_of_this_thread().__enter__()
        finally:
            may_end.set()

    in_threads(first=wait_inside, second=enter)


@TWO
def test_threads_of_different_names_with_one_tag_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zlib.crc32", lambda data: 5)

    def enter() -> None:
        with pytest.raises(MismatchError, match="the name of a thread that trains"):
            communicators_of_this_thread().__enter__()

    in_threads(**{f"only on rank {tnt.get_rank()}": enter})


class Training:
    """A model that can be trained again and again.

    Args:
        seed: Of its weights.
        scale: Of its data.
    """

    def __init__(self, seed: int, scale: float) -> None:
        x, self._y = classification_data()
        self._x = scale * x
        keras.utils.set_random_seed(seed)
        self._model = tnt.Model(small_model())
        self._model.compile(**CLASSIFICATION)

    def __call__(self) -> Any:
        trained = self._model.fit(
            self._x, self._y, batch_size=4, epochs=3, verbose=0, shuffle=False
        )
        return trained.history, [np.array(weight) for weight in self._model.weights]


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.usefixtures("float64")
def test_models_trained_in_two_threads_are_what_they_are_alone() -> None:
    """Their steps are traced one after the other, and run at the same time."""
    one, other = Training(1, 1.0), Training(2, 3.0)
    alone = [one(), other()], [one(), other()]
    one, other = Training(1, 1.0), Training(2, 3.0)
    one_by_one = in_threads(one=one) | in_threads(other=other)
    assert_close([one_by_one["one"], one_by_one["other"]], alone[0])
    together = in_threads(one=one, other=other)
    assert_close([together["one"], together["other"]], alone[1])


@TWO
def test_a_rank_may_have_started_more_threads_without_a_name() -> None:
    for _ in range(tnt.get_rank()):
        before = threading.Thread(target=time.time)
        before.start()
        before.join()
    sums: list[Any] = []

    def add() -> None:
        with communicators_of_this_thread():
            sums.append(tnt.allreduce(np.float64(1.0)))

    for _ in range(2):  # the second one uses the communicators of the first
        thread = threading.Thread(target=add)
        thread.start()
        thread.join()
    assert sums == [2.0, 2.0]
