"""Micro-batches that are copied to a device before a step, here to the CPU as if it were a GPU."""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import (
    CLASSIFICATION,
    WITH_METRICS,
    assert_close,
    assert_trains_as_in_keras,
    batches,
    classification_data,
    computed_by_master,
    small_model,
)
from tensorflow.python.eager import context

import tarantella as tnt
from tarantella.data import on_device
from tarantella.data.on_device import OnDevice, Prefetched

pytestmark = [pytest.mark.ranks(2), pytest.mark.usefixtures("float64")]


@pytest.fixture(autouse=True)
def elements(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each element that a step had was on the device."""
    found: list[bool] = []
    micro_batch_of = on_device.micro_batch_of

    def noted(element: Any) -> Any:
        found.append(isinstance(element, OnDevice))
        return micro_batch_of(element)

    monkeypatch.setattr(on_device, "device", lambda: "CPU:0")
    for module in ("keras.compared_steps", "keras.distributed_dataset"):
        monkeypatch.setattr(f"tarantella.{module}.micro_batch_of", noted)
    return found


@pytest.mark.parametrize(
    "execution", [{}, {"run_eagerly": True}, {"steps_per_execution": 3}], ids=str
)
def test_training_and_evaluation(execution: dict[str, Any], elements: list[bool]) -> None:
    """The last batch has one sample, so that one rank has none."""
    x, y = classification_data(13)
    assert_trains_as_in_keras(
        small_model,
        lambda: {**WITH_METRICS, **execution},
        lambda: {"x": batches(x, y), "validation_data": (x, y)},
        then=lambda model: model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True),
    )
    assert any(elements)


@pytest.mark.parametrize("steps", [3, 6, -1])
def test_a_repeated_shuffle_goes_on_where_the_last_fit_has_stopped(
    steps: int, elements: list[bool]
) -> None:
    """Copies are made ahead of time, but not so far that they begin another pass."""

    def arguments() -> dict[str, Any]:
        dataset = tf.data.Dataset.from_tensor_slices(classification_data(13))
        dataset = dataset.shuffle(13, seed=3).batch(4).repeat(5)  # passes of 4 batches
        return {"x": dataset, "steps_per_epoch": steps}

    assert_trains_as_in_keras(small_model, lambda: CLASSIFICATION, arguments, second_fit=True)
    assert all(elements)


def test_a_shuffle_draws_as_often_as_in_keras(elements: list[bool]) -> None:
    """Keras makes one iterator more than it reads in each epoch, and the shuffle has drawn for it,
    too. A dataset that was looked at before is shuffled here by TensorFlow's own `shuffle`."""

    def looked_at() -> dict[str, Any]:
        dataset = tf.data.Dataset.from_tensor_slices(classification_data(13))
        dataset = dataset.shuffle(13, seed=1).batch(2)
        next(iter(dataset))
        return {"x": dataset.map(lambda x, y: (x, y))}

    assert_trains_as_in_keras(small_model, lambda: CLASSIFICATION, looked_at, second_fit=True)
    assert all(elements)


def test_no_functions_pile_up_from_call_to_call(elements: list[bool]) -> None:
    x, y = classification_data(13)
    model = tnt.Model(small_model())
    model.compile(**CLASSIFICATION)
    kept = []
    for _ in range(4):
        model.fit(x, y, validation_data=(x, y), batch_size=4, epochs=2, verbose=0)
        model.predict(x, verbose=0)
        gc.collect()
        kept.append(len(context.context().list_function_names()))
    assert kept[1] == kept[-1]
    assert any(elements)


def test_iterators_that_are_collected_while_a_function_is_traced_leave_nothing_in_it() -> None:
    held = [iter(Prefetched(tf.data.Dataset.range(3), "CPU:0")) for _ in range(2)]
    assert int(next(held[0])) == 0

    @tf.function
    def function() -> tf.Tensor:
        held.clear()
        gc.collect()
        return tf.constant(1)

    operations = function.get_concrete_function().graph.get_operations()
    assert not held
    assert {each.type for each in operations} <= {"Const", "Identity", "NoOp"}


def test_predictions(elements: list[bool]) -> None:
    x, _ = classification_data(13)

    def predicted(wrap: Any) -> Any:
        keras.utils.set_random_seed(1)
        return wrap(small_model()).predict(x, batch_size=4, verbose=0)

    assert_close(predicted(tnt.Model), computed_by_master(lambda: predicted(lambda model: model)))
    assert any(elements)


def test_a_custom_loop(elements: list[bool]) -> None:
    x, y = classification_data(13)
    dataset = tnt.distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(4))
    own = [np.asarray(labels) for _, labels in dataset]
    everyones = tnt.allgather([labels.tolist() for labels in own])
    assert len(own) == 4
    assert all(elements)
    for step in range(3):
        together = [label for rank in everyones for label in rank[step]]
        assert sorted(together) == sorted(y[4 * step : 4 * step + 4])


def test_strings_stay_in_host_memory(elements: list[bool]) -> None:
    dataset = tf.data.Dataset.from_tensor_slices([b"a", b"b", b"c"]).batch(2)
    assert [len(one) for one in tnt.distribute_dataset(dataset)] == [1, 1]
    assert not any(elements)
