"""Predictions of all ranks, put together, are those of Keras in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import batches

import tarantella as tnt
from tarantella.comm import buffers
from tarantella.errors import InputError, MismatchError

pytestmark = pytest.mark.ranks(2)

NO_XLA = {"jit_compile": False}  # it has no strings, and is Keras's choice on a GPU
SAMPLES = np.arange(22.0, dtype=np.float32).reshape(11, 2)


class Computed(keras.Model):
    """A model that is one function of its input."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def call(self, inputs: Any) -> Any:
        return self.function(inputs)


def assert_same(actual: Any, expected: Any) -> None:
    """Compares nested outputs, types and bits included."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, tf.RaggedTensor):
        assert actual.shape.as_list() == expected.shape.as_list()
        assert actual.ragged_rank == expected.ragged_rank
        for one, other in zip(actual.nested_row_splits, expected.nested_row_splits, strict=True):
            assert_same(one.numpy(), other.numpy())
        assert_same(actual.flat_values.numpy(), expected.flat_values.numpy())
    elif isinstance(expected, tf.SparseTensor):
        assert_same(tf.sparse.to_dense(actual).numpy(), tf.sparse.to_dense(expected).numpy())
    elif isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)
        assert actual.flags.writeable == expected.flags.writeable
    elif isinstance(expected, tf.Tensor):
        assert_same(actual.numpy(), expected.numpy())
    else:
        assert actual == expected


def assert_predicts_as_in_keras(
    function: Callable[[Any], Any],
    data: Callable[[], Any] = lambda: SAMPLES,
    compiled: dict[str, Any] | None = None,
    **arguments: Any,
) -> None:
    """Predicts with plain Keras and with a tnt.Model, without and with callbacks."""

    def predict(wrap: Callable[[keras.Model], keras.Model], callbacks: Any = None) -> Any:
        model = wrap(Computed(function))
        if compiled:
            model.compile(**compiled)
        return model.predict(data(), verbose=0, callbacks=callbacks, **arguments)

    logs = {"keras": Logs(), "ours": Logs()}
    expected = predict(lambda model: model, [logs["keras"]])
    assert_same(predict(tnt.Model), expected)
    assert_same(predict(tnt.Model, [logs["ours"]]), expected)
    assert_same(logs["ours"].seen, logs["keras"].seen)


class Logs(keras.callbacks.Callback):
    """Keeps what callbacks are told."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(batch)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, dict(logs)))


def _nested(inputs: Any) -> Any:
    return {
        "z": inputs * 2,
        "a": [inputs[:, 0], (tf.cast(inputs, tf.int64), inputs[:, tf.newaxis] > 5)],
    }


@pytest.mark.ranks(3)
@pytest.mark.parametrize("batch_size", [1, 2, 4, 5, 11, 100])
def test_nested_outputs_for_all_sizes_of_batches(batch_size: int) -> None:
    assert_predicts_as_in_keras(_nested, batch_size=batch_size)


def test_four_ranks_and_few_samples() -> None:
    assert_predicts_as_in_keras(_nested, lambda: SAMPLES[:5], batch_size=3)


test_four_ranks_and_few_samples = pytest.mark.ranks(4)(test_four_ranks_and_few_samples)


def test_dtypes() -> None:
    names = ["bool", "float16", "bfloat16", "float64", "int8", "uint16", "complex64"]
    names.append("float8_e4m3fn")
    assert_predicts_as_in_keras(lambda x: [tf.cast(x, name) for name in names], batch_size=4)


def test_strings() -> None:
    assert_predicts_as_in_keras(
        lambda x: {"text": tf.strings.as_string(x), "number": x}, compiled=NO_XLA, batch_size=4
    )


@pytest.mark.parametrize("execution", ["jit_compile", "run_eagerly", "steps_per_execution"])
def test_ways_of_execution(execution: str) -> None:
    value = 3 if execution == "steps_per_execution" else True
    assert_predicts_as_in_keras(_nested, lambda: batches(SAMPLES, batch_size=2), {execution: value})


@pytest.mark.parametrize("at_once", [1, 2])
def test_number_of_steps(at_once: int) -> None:
    assert_predicts_as_in_keras(
        _nested,
        lambda: batches(SAMPLES, batch_size=2).repeat(),
        {"steps_per_execution": at_once},
        steps=4,
    )


def test_executions_of_several_steps_with_strings_and_ragged_rows() -> None:
    def function(x: Any) -> Any:
        text = tf.strings.as_string(x)
        return text, tf.RaggedTensor.from_row_lengths(
            tf.repeat(x[:, 0], tf.cast(x[:, 0], tf.int64) % 3), tf.cast(x[:, 0], tf.int64) % 3
        )

    assert_predicts_as_in_keras(
        function, lambda: batches(SAMPLES, batch_size=2), {**NO_XLA, "steps_per_execution": 4}
    )


@pytest.mark.ranks(3)
def test_unknown_number_of_batches() -> None:
    def generate() -> Iterator[Any]:
        for start in range(0, 11, 4):
            yield (SAMPLES[start : start + 4],)

    spec = (tf.TensorSpec((None, 2), tf.float32),)
    assert_predicts_as_in_keras(
        _nested, lambda: tf.data.Dataset.from_generator(generate, output_signature=spec)
    )


def test_a_batch_without_samples() -> None:
    def generate() -> Iterator[Any]:
        for start, stop in ((0, 4), (4, 4), (4, 5)):
            yield (SAMPLES[start:stop],)

    spec = (tf.TensorSpec((None, 2), tf.float32),)
    assert_predicts_as_in_keras(
        _nested, lambda: tf.data.Dataset.from_generator(generate, output_signature=spec)
    )


def test_ragged_outputs() -> None:
    rows = [[1.0], [2.0, 3.0], [], [4.0], [5.0, 6.0, 7.0]]
    assert_predicts_as_in_keras(
        lambda x: {"same": x, "more": tf.stack([x, x + 1], axis=-1), "sums": tf.reduce_sum(x, 1)},
        lambda: tf.data.Dataset.from_tensor_slices(tf.ragged.constant(rows)).ragged_batch(2),
    )


def test_sparse_outputs() -> None:
    assert_predicts_as_in_keras(lambda x: [tf.sparse.from_dense(x * (x % 3)), x], batch_size=4)


def test_rows_whose_shape_changes_from_step_to_step() -> None:
    """As with batches that are padded to their longest sample; Keras returns a ragged tensor."""

    def generate() -> Iterator[Any]:
        for samples, width in ((4, 3), (2, 5), (1, 3)):
            yield (np.arange(samples * width * 2.0).reshape(samples, width, 2),)

    spec = (tf.TensorSpec((None, None, 2), tf.float32),)
    data = lambda: tf.data.Dataset.from_generator(generate, output_signature=spec)  # noqa: E731
    assert_predicts_as_in_keras(
        lambda x: [x, x[:, :, 0], tf.reduce_sum(x, 1), tf.transpose(x, [0, 2, 1])], data
    )


def test_more_rows_than_samples() -> None:
    assert_predicts_as_in_keras(lambda x: tf.reshape(x, [-1, 1]), batch_size=4)


def test_rows_of_a_selection_of_the_samples() -> None:
    assert_predicts_as_in_keras(lambda x: x[x[:, 0] % 4 < 1], batch_size=3)


def test_messages_smaller_than_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "MESSAGE_BYTES", 7)
    monkeypatch.setattr(buffers, "SMALL_BYTES", 7)
    assert_predicts_as_in_keras(_nested, batch_size=4)


@pytest.mark.parametrize("samples", [11, 1])
def test_predict_on_batch(samples: int) -> None:
    def function(x: Any) -> Any:
        return {"text": tf.strings.as_string(x), **_nested(x), "sparse": tf.sparse.from_dense(x)}

    predicted = []
    for model in (Computed(function), tnt.Model(Computed(function))):
        model.compile(**NO_XLA)
        predicted.append(model.predict_on_batch(SAMPLES[:samples]))
    assert_same(predicted[1], predicted[0])


def test_functional_model_with_progress(capsys: pytest.CaptureFixture[str]) -> None:
    inputs = keras.Input((2,))
    outputs = {"b": keras.layers.Dense(3)(inputs), "a": (keras.layers.Dense(1)(inputs),)}
    plain = keras.Model(inputs, outputs)
    model = tnt.Model(plain)
    expected = plain.predict(SAMPLES, batch_size=4, verbose=0)
    capsys.readouterr()
    predicted = model.predict(SAMPLES, batch_size=4, verbose=2)
    assert ("3/3" in capsys.readouterr().out) == tnt.is_master_rank()
    assert list(predicted) == list(expected)
    for one, other in ((predicted["b"], expected["b"]), (predicted["a"][0], expected["a"][0])):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class Stop(keras.callbacks.Callback):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1 and tnt.get_rank() == self.rank:
            self.model.stop_predicting = True


def test_a_callback_on_one_rank_stops_all() -> None:
    model = tnt.Model(Computed(_nested))
    predicted = model.predict(SAMPLES, batch_size=3, verbose=0, callbacks=[Stop(1)])
    np.testing.assert_array_equal(predicted["z"], 2 * SAMPLES[:6])


def test_callback_list() -> None:
    logs = Logs()
    model = tnt.Model(Computed(_nested))
    callbacks = keras.callbacks.CallbackList([logs], model=model)
    predicted = model.predict(SAMPLES, batch_size=4, verbose=0, callbacks=callbacks)
    np.testing.assert_array_equal(predicted["z"], 2 * SAMPLES)
    assert [seen for seen in logs.seen if isinstance(seen, int)] == [0, 1, 2]


def test_a_ready_made_list_of_callbacks_stops_all_ranks() -> None:
    model = tnt.Model(Computed(_nested))
    callbacks = keras.callbacks.CallbackList([Stop(1)], model=model)
    stopped = model.predict(SAMPLES, batch_size=3, verbose=0, callbacks=callbacks)
    assert stopped["z"].shape == (6, 2)
    assert model.predict(SAMPLES, verbose=0)["z"].shape == (11, 2)


def _of_each_rank() -> list[Any]:
    """The batches of three ranks, which have 3, 1 and 2 of them, of unequal sizes."""
    bounds = [[(0, 3), (3, 6), (6, 7)], [(7, 8)], [(8, 10), (10, 11)]]
    return [[SAMPLES[start:stop] for start, stop in own] for own in bounds]


def _own_data(kind: str) -> tuple[Any, dict[str, Any]]:
    own = _of_each_rank()[tnt.get_rank()]
    if kind == "arrays":
        return np.concatenate(own), {"batch_size": 2 if tnt.get_rank() else 3}
    spec = tf.TensorSpec((None, 2), tf.float32)
    dataset = tf.data.Dataset.from_generator(lambda: iter(own), output_signature=spec)
    if kind == "unknown length":
        return dataset, {}
    return dataset.apply(tf.data.experimental.assert_cardinality(len(own))), {}


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("kind", "at_once"), [("arrays", 1), ("dataset", 2), ("unknown length", 1)]
)
def test_own_data_of_unequal_length(kind: str, at_once: int) -> None:
    """Step after step, and in each step those of rank 0 first, on every rank."""
    everyones = _of_each_rank()
    steps = [
        np.concatenate([own[step] for own in everyones if step < len(own)]) for step in range(3)
    ]
    data, options = _own_data(kind)
    options |= {"verbose": 0, "tnt_distribute_dataset": False}
    model = tnt.Model(Computed(_nested))
    model.compile(steps_per_execution=at_once)
    expected = Computed(_nested).predict_on_batch(np.concatenate(steps))
    expected = keras.tree.map_structure(np.array, expected)
    assert_same(model.predict(data, **options), expected)
    logs = Logs()
    assert_same(model.predict(data, callbacks=[logs], **options), expected)
    if at_once == 1:
        seen = [seen[1]["z"] for seen in logs.seen if isinstance(seen, tuple)]
        assert_same([np.array(z) for z in seen], [2 * step for step in steps])


@pytest.mark.ranks(3)
def test_shards_of_batches_are_predicted_in_the_order_of_the_dataset() -> None:
    shard = batches(SAMPLES, batch_size=2).shard(tnt.get_size(), tnt.get_rank())
    predicted = tnt.Model(Computed(_nested)).predict(shard, verbose=0, tnt_distribute_dataset=False)
    np.testing.assert_array_equal(predicted["z"], 2 * SAMPLES)


def test_own_data_for_a_number_of_steps_until_a_callback_stops_them() -> None:
    shard = batches(SAMPLES, batch_size=2).shard(tnt.get_size(), tnt.get_rank()).repeat()
    model = tnt.Model(Computed(_nested))
    options = {"verbose": 0, "tnt_distribute_dataset": False}
    assert model.predict(shard, steps=3, **options)["z"].shape == (11, 2)
    stopped = model.predict(shard, steps=3, callbacks=[Stop(1)], **options)
    np.testing.assert_array_equal(stopped["z"], 2 * SAMPLES[:8])


def test_own_data_of_a_rank_without_a_batch_are_named() -> None:
    model = tnt.Model(Computed(_nested))
    shard = batches(SAMPLES[: 0 if tnt.get_rank() == 1 else 4], batch_size=2)
    with pytest.raises(InputError, match="The data of rank 1 are empty: give every rank at least"):
        model.predict(shard, verbose=0, tnt_distribute_dataset=False)


def test_ranks_with_different_outputs_say_so() -> None:
    names = ["a", "b"]
    model = tnt.Model(Computed(lambda x: {names[tnt.get_rank() == 1]: x}))
    with pytest.raises(MismatchError, match=r"rank 1 has a dict with keys \('b'\)"):
        model.predict(SAMPLES, verbose=0)


def test_ranks_with_different_numbers_of_steps_say_so() -> None:
    model = tnt.Model(Computed(_nested))
    with pytest.raises(MismatchError, match=r"rank 1 has 2 steps, 1 at a time for the data"):
        model.predict(SAMPLES, verbose=0, batch_size=2, steps=2 if tnt.get_rank() == 1 else 3)


def test_rows_that_depend_on_the_other_samples_say_so() -> None:
    model = tnt.Model(Computed(lambda x: tf.tile(x, [1, tf.cast(x[0, 0], tf.int32)])))
    with pytest.raises(MismatchError, match=r"different shapes in step 1: .* 2 on one rank"):
        model.predict(np.array([[1.0], [1.0], [1.0], [1.0], [2.0], [3.0]]), 4, verbose=0)


def test_a_number_for_the_whole_batch_is_refused() -> None:
    model = tnt.Model(Computed(tf.reduce_mean))
    with pytest.raises(ValueError, match="one row for each sample"):
        model.predict(SAMPLES, verbose=0)


def test_an_error_leaves_the_model_as_it_was() -> None:
    class Failing(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            raise RuntimeError("from the callback")

    model = tnt.Model(Computed(_nested))
    with pytest.raises(RuntimeError, match="from the callback"):
        model.predict(SAMPLES, verbose=0, callbacks=[Failing()])
    np.testing.assert_array_equal(model.predict(SAMPLES, verbose=0)["z"], 2 * SAMPLES)


def _memory(name: str) -> int:
    """A number of /proc/self/status, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{name}:")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux for its peak")
@pytest.mark.parametrize("batch_size", [128, 6400])
def test_no_more_than_one_copy_of_the_result_in_memory(batch_size: int) -> None:
    width = 2048
    samples = np.arange(51200, dtype=np.float32)[:, np.newaxis]
    model = tnt.Model(Computed(lambda x: tf.tile(x, [1, width])))
    model.predict(samples[:batch_size], batch_size=batch_size // 8, verbose=0)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    predicted = model.predict(samples, batch_size=batch_size, verbose=0)
    growth = _memory("VmHWM") - before
    print(f"{growth / predicted.nbytes:.3f} of the result's {predicted.nbytes >> 20} MiB")
    assert predicted.nbytes == 400 << 20
    np.testing.assert_array_equal(predicted[::97, ::512], np.repeat(samples[::97], 4, axis=1))
    assert growth < 1.25 * predicted.nbytes


test_no_more_than_one_copy_of_the_result_in_memory = pytest.mark.ranks(2)(
    test_no_more_than_one_copy_of_the_result_in_memory
)
