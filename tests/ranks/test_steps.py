"""The ranks take their steps together, whatever each of them has in a step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import (
    WITH_METRICS,
    assert_close,
    assert_runs_as_in_keras,
    assert_trains_as_in_keras,
    classification_data,
    small_model,
)

import tarantella as tnt
from tarantella.data import comparison
from tarantella.errors import InputError, MismatchError
from tarantella.keras.adapter import RankDataAdapter
from tarantella.runtime.configuration import configuration
from tarantella.runtime.log import LOGGER

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.ranks(2)]


def _compiled() -> keras.Model:
    model = tnt.Model(small_model())
    model.compile(**WITH_METRICS)
    return model


def _shard(rank: int, size: int, batch_size: int = 2) -> tf.data.Dataset:
    """Every rank's own samples: the first ranks have more batches than the last."""
    x, y = classification_data(samples=26)
    bounds = np.cumsum([0] + [2 * batch_size * (size - r) + 1 for r in range(size)])
    own = slice(bounds[rank], bounds[rank + 1])
    return tf.data.Dataset.from_tensor_slices((x[own], y[own])).batch(batch_size)


def _union(size: int) -> tf.data.Dataset:
    """What the ranks' shards are together, step by step."""
    shards = [list(_shard(rank, size)) for rank in range(size)]

    def generate() -> Iterator[Any]:
        for step in range(max(map(len, shards))):
            there = [shard[step] for shard in shards if step < len(shard)]
            yield tuple(np.concatenate(leaves) for leaves in zip(*there, strict=True))

    spec = (tf.TensorSpec((None, 5), tf.float64), tf.TensorSpec((None,), tf.int64))
    steps = tf.data.Dataset.from_generator(generate, output_signature=spec)
    # Keras counts a step of the optimizer more where it does not know when the data end.
    return steps.apply(tf.data.experimental.assert_cardinality(max(map(len, shards))))


@pytest.mark.ranks(3)
def test_own_shards_of_unequal_length_end_together_and_use_each_sample_once() -> None:
    size = tnt.get_size()
    lengths = {len(_shard(rank, size)) for rank in range(size)}
    assert len(lengths) == size

    def own() -> dict[str, Any]:
        return {
            "x": _shard(tnt.get_rank(), size),
            "validation_data": _shard(tnt.get_rank(), size),
            "tnt_distribute_dataset": False,
            "tnt_distribute_validation_dataset": False,
        }

    assert_trains_as_in_keras(
        small_model,
        lambda: WITH_METRICS,
        lambda: {"x": _union(size), "validation_data": _union(size)},
        arguments_on_ranks=own,
    )


@pytest.mark.ranks(3)
def test_own_shards_of_unknown_length() -> None:
    size = tnt.get_size()

    def own() -> dict[str, Any]:
        mine = _shard(tnt.get_rank(), size).filter(lambda x, y: True)
        return {"x": mine, "tnt_distribute_dataset": False}

    def together() -> dict[str, Any]:
        return {"x": _union(size).filter(lambda x, y: True)}

    assert_trains_as_in_keras(small_model, lambda: WITH_METRICS, together, arguments_on_ranks=own)


def test_own_shards_with_static_shapes() -> None:
    x, y = classification_data(samples=24)
    rank, size = tnt.get_rank(), tnt.get_size()
    batches = [4] + [2] * (size - 1)  # batches of 2, of the first rank more than of the others
    bounds = np.cumsum([0, *[2 * n for n in batches]])
    own = slice(bounds[rank], bounds[rank + 1])
    model = _compiled()
    mine = tf.data.Dataset.from_tensor_slices((x[own], y[own])).batch(2, drop_remainder=True)
    loss, accuracy = model.evaluate(mine, verbose=0, tnt_distribute_dataset=False)
    whole = tf.data.Dataset.from_tensor_slices((x[: bounds[-1]], y[: bounds[-1]])).batch(5)
    assert_close([loss, accuracy], model.evaluate(whole, verbose=0))


def test_an_empty_shard_is_named() -> None:
    x, y = classification_data()
    samples = 0 if tnt.get_rank() == 1 else 4
    mine = tf.data.Dataset.from_tensor_slices((x[:samples], y[:samples])).batch(2)
    with pytest.raises(InputError, match="The data of rank 1 are empty"):
        _compiled().evaluate(mine, verbose=0, tnt_distribute_dataset=False)


def test_batches_of_different_sizes_are_an_error_that_says_so() -> None:
    x, y = classification_data()

    def generate() -> Iterator[Any]:
        yield x[:4], y[:4]
        yield x[: 4 + tnt.get_rank()], y[: 4 + tnt.get_rank()]

    with pytest.raises(MismatchError, match=r"step 2: rank \d has a batch of \d samples"):
        _compiled().predict(generate(), verbose=0)


def test_a_last_batch_of_another_size_is_an_error_that_says_so() -> None:
    x, y = classification_data()
    samples = 11 + tnt.get_rank()
    dataset = tf.data.Dataset.from_tensor_slices((x[:samples], y[:samples])).batch(4)
    with pytest.raises(MismatchError, match=r"up to step 3: rank \d has 1\d samples, rank \d has"):
        _compiled().fit(dataset, verbose=0)


@pytest.mark.parametrize("kind", ["dataset", "endless", "arrays"])
def test_ranks_that_know_the_number_of_batches_compare_only_some(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    compare = comparison.Comparison.compare

    def noted(self: Any, taken: comparison.Taken) -> None:
        compared.append(taken.steps)
        compare(self, taken)

    monkeypatch.setattr(comparison.Comparison, "compare", noted)
    x, y = classification_data()
    x, y = np.resize(x, (23, *x.shape[1:])), np.resize(y, 23)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    if kind == "arrays":
        _compiled().fit(x, y, batch_size=2, epochs=2, verbose=0)
    elif kind == "dataset":
        _compiled().fit(dataset, epochs=2, verbose=0)
    else:
        _compiled().fit(dataset.repeat(), steps_per_epoch=11, epochs=2, verbose=0)
    assert compared == [1, 2, 4, 8, 16, 22 if kind == "endless" else 24]


def test_data_that_end_earlier_on_one_rank_are_an_error_that_says_so() -> None:
    x, y = classification_data()

    def generate() -> Iterator[Any]:
        for _ in range(4 + tnt.get_rank()):
            yield x[:4], y[:4]

    # A rank that only hears of it from another one knows no more than that.
    with pytest.raises(MismatchError, match=r"reached the end|Rank 1 cannot continue"):
        _compiled().predict(generate(), verbose=0)


@pytest.mark.parametrize("difference", ["dtype", "shape", "structure"])
def test_data_of_another_kind_on_one_rank_are_an_error_that_says_so(difference: str) -> None:
    x, y = classification_data()
    if tnt.get_rank() == 1:
        x = {"dtype": x.astype("float32"), "shape": x[:, :3], "structure": {"x": x}}[difference]
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    with pytest.raises(MismatchError, match="the data"):
        _compiled().fit(dataset, verbose=0)


def _first(feed: RankDataAdapter, steps: int) -> list[Any]:
    iterator = iter(feed.get_tf_dataset())
    return [next(iterator).data.numpy().tolist() for _ in range(steps)]


def test_data_left_in_the_middle_can_be_gone_through_again() -> None:
    feed = RankDataAdapter.of(tf.data.Dataset.range(4000).map(lambda i: i).batch(12))
    for steps in (1, 5, 2, 300, 3):
        begin, count = 12 // tnt.get_size() * tnt.get_rank(), 12 // tnt.get_size()
        expected = [list(range(12 * k + begin, 12 * k + begin + count)) for k in range(steps)]
        assert _first(feed, steps) == expected


def test_steps_per_epoch_leave_the_rest_for_the_next_epoch() -> None:
    def data() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(classification_data()).repeat().batch(5)

    assert_trains_as_in_keras(
        small_model,
        lambda: WITH_METRICS,
        lambda: {
            "x": data(),
            "steps_per_epoch": 3,
            "validation_data": data(),
            "validation_steps": 2,
        },
    )


def test_many_feeds_do_not_get_into_each_others_way() -> None:
    model = _compiled()
    x, y = classification_data()
    expected = model.evaluate(x, y, verbose=0)
    for _ in range(5):
        feed = RankDataAdapter.of(tf.data.Dataset.range(100).batch(7))
        _first(feed, 2)
        assert_close(model.evaluate(x, y, verbose=0), expected)


def test_steps_run_in_one_execution() -> None:
    x, y = classification_data()
    assert_trains_as_in_keras(
        small_model,
        lambda: {**WITH_METRICS, "steps_per_execution": 3},
        lambda: {"x": tf.data.Dataset.from_tensor_slices((x, y)).map(lambda *s: s).batch(3)},
    )


def test_training_on_batches_after_the_master_has_evaluated_alone() -> None:
    """It has variables of metrics by then that the other ranks still have to make."""
    x, y = classification_data()

    def train(wrap: Callable[[keras.Model], keras.Model]) -> Any:
        model = wrap(small_model())
        model.compile(**WITH_METRICS)
        model.optimizer.build(model.trainable_variables)
        if tnt.is_master_rank():
            (model.model if isinstance(model, tnt.Model) else model).evaluate(x, y, verbose=0)
        return [model.train_on_batch(x, y) for _ in range(2)]

    assert_runs_as_in_keras(train)


def test_a_message_tells_that_data_are_not_distributed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOGGER, "propagate", True)
    with caplog.at_level("INFO", LOGGER.name):
        _compiled().evaluate(_shard(0, 1), verbose=0, tnt_distribute_dataset=False)
    assert "The evaluation data are not distributed" in caplog.text


def _warnings(fit: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> str:
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("WARNING", LOGGER.name):
        patch.setattr(comparison, "_has_warned", False)
        patch.setattr(LOGGER, "propagate", True)
        fit()
    # TensorFlow's logger may have something to say, too.
    return "\n".join(one.getMessage() for one in caplog.records if one.name == LOGGER.name)


def _shuffled(after: tf.data.Dataset) -> tf.data.Dataset:
    return after.shuffle(13, seed=1).batch(2)


def test_data_that_one_rank_has_looked_at_before_give_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dataset = _shuffled(tf.data.Dataset.from_tensor_slices(classification_data()))
    if tnt.get_rank() == tnt.get_size() - 1:
        next(iter(dataset))
    text = _warnings(lambda: _compiled().fit(dataset, verbose=0), caplog)
    assert "The ranks do not have the same data: in the training data, batch " in text


def test_data_that_all_ranks_have_looked_at_are_those_of_keras(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def looked_at() -> dict[str, Any]:
        dataset = _shuffled(tf.data.Dataset.from_tensor_slices(classification_data()))
        next(iter(dataset))
        return {"x": dataset.map(lambda x, y: (x, y))}

    def train() -> None:
        assert_trains_as_in_keras(small_model, lambda: WITH_METRICS, looked_at)

    assert not _warnings(train, caplog)


def test_data_are_compared_after_an_evaluation_within_the_evaluation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y = classification_data(26)
    own = x.copy()
    own[12:] += tnt.get_rank()
    model = _compiled()

    def evaluate(batch: int, logs: Any) -> None:
        if batch == 3 and len(calls) == 1:
            calls.append(batch)
            model.evaluate(x[:2], y[:2], verbose=0)

    calls = [0]
    callback = keras.callbacks.LambdaCallback()
    callback.on_test_batch_end = evaluate
    dataset = tf.data.Dataset.from_tensor_slices((own, y)).batch(2)
    text = _warnings(lambda: model.evaluate(dataset, verbose=0, callbacks=[callback]), caplog)
    assert len(calls) == 2
    assert "in the evaluation data, batch " in text


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="binds itself to a core")
def test_a_rank_that_waits_for_another_keeps_preparing_its_data() -> None:
    is_late = tnt.get_rank() == tnt.get_size() - 1
    prepared: list[int] = []

    def prepare(number: Any) -> Any:
        if is_late and number == 0:
            time.sleep(0.5)
        prepared.append(int(number))
        return number

    def mapped(number: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(prepare, [number], tf.int64), ())

    dataset = tf.data.Dataset.range(50).map(mapped).batch(1).prefetch(50)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # so TensorFlow has a thread for the pipeline, not more
    try:
        next(iter(RankDataAdapter.of(dataset, distribute=False).get_tf_dataset()))
    finally:
        os.sched_setaffinity(0, cores)
    assert is_late or len(prepared) == 50


def test_arrays_that_differ_give_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    x, y = classification_data()
    model = _compiled()
    assert not _warnings(lambda: model.evaluate(x, y, verbose=0), caplog)
    x = np.random.default_rng(tnt.get_rank()).normal(size=x.shape)

    def use_everywhere() -> None:
        model.fit(x, y, validation_split=0.2, verbose=0)
        model.evaluate(x, y, verbose=0)

    text = _warnings(use_everywhere, caplog)
    assert len(set(text.splitlines())) == 1  # another one would name other data
    assert "same data: in the training data, ranks 0 and 1 differ in `x`." in text


@pytest.mark.parametrize("kind", ["arrays", "batches"])
def test_data_that_differ_are_an_error_if_the_user_wants_that(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = replace(configuration(), strict=True)
    monkeypatch.setattr(comparison, "configuration", lambda: strict)
    x, y = classification_data()
    if tnt.get_rank() == tnt.get_size() - 1:
        y = y[::-1]
    data = (x, y) if kind == "arrays" else (tf.data.Dataset.from_tensor_slices((x, y)).batch(4),)
    with pytest.raises(MismatchError, match="not have the same data|do not match those of another"):
        _compiled().fit(*data, verbose=0)


def test_batches_that_each_rank_augments_for_itself_give_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y = classification_data()
    samples = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(13)
    noise = samples.map(lambda x, y: (x + tf.random.normal([5], dtype=tf.float64), y))
    model = _compiled()
    for dataset in (noise.batch(4), noise.filter(lambda x, y: True).batch(4)):
        assert not _warnings(lambda dataset=dataset: model.fit(dataset, verbose=0), caplog)


@pytest.mark.ranks(3)
def test_one_dataset_for_training_validation_and_a_callback() -> None:
    x, y = classification_data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).map(lambda *sample: sample).batch(4)

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["again"] = self.model.predict(dataset, verbose=0).sum()

    assert_trains_as_in_keras(
        small_model,
        lambda: WITH_METRICS,
        lambda: {"x": dataset, "validation_data": dataset, "callbacks": [Evaluate()]},
        then=lambda model: model.evaluate(dataset, verbose=0),
    )
