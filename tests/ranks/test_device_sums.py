"""Sums by TensorFlow's own collectives: NCCL on GPUs, and here a ring between CPUs.

They need `TNT_GPU_SUMS=ring` in the environment, as `tests/run.py` sets it for a shard of its own.
There, tests of other files that have the mark `device_sums` run as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import tarantella as tnt
from tarantella.graph import device_channel, engine
from tarantella.graph.device_channel import DeviceChannel
from tarantella.graph.sum_counter import sum_counter
from tarantella.internals.tensorflow import CALLS

pytestmark = [
    pytest.mark.device_sums,
    pytest.mark.skipif(os.environ.get("TNT_GPU_SUMS") != "ring", reason="needs TNT_GPU_SUMS=ring"),
]
TWO = pytest.mark.ranks(2)


def operations(graph: Any) -> Iterator[Any]:
    """The operations of a graph and of all functions that it calls."""
    yield from graph.get_operations()
    definition = graph.as_graph_def()
    for function in definition.library.function:
        yield from function.node_def


def types(graph: Any) -> list[str]:
    return [getattr(one, "type", None) or one.op for one in operations(graph)]


def graph_of_step(
    monkeypatch: pytest.MonkeyPatch,
    layers: Sequence[Any] = (),
    jit_compile: bool = True,
    optimizer: Any = "adam",
    **fit: Any,
) -> Any:
    """The graph of a training step, of a model with additional layers."""
    graphs = []
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(4, kernel_regularizer=oracle.Decay())(inputs)
    for layer in layers:
        hidden = layer(hidden)
    model = tnt.Model(keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(hidden)))
    model.compile(
        optimizer,
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
        jit_compile=jit_compile,
    )
    step = type(model).train_step

    def noted(self: Any, data: Any) -> Any:
        graphs.append(tf.compat.v1.get_default_graph())
        return step(self, data)

    monkeypatch.setattr(type(model), "train_step", noted)
    x, y = oracle.classification_data()
    model.fit(**{"x": oracle.batches(x, y), "verbose": 0, **fit})
    return graphs[-1]


def compiled_calls(graph: Any) -> int:
    """How many functions the graph calls that XLA compiles."""
    called = [one for one in graph.get_operations() if one.type in CALLS]
    return sum(one.get_attr("_XlaMustCompile") for one in called)


@TWO
@pytest.mark.parametrize("jit_compile", [False, True], ids=["plain", "xla"])
def test_a_step_whose_logs_nobody_reads_calls_no_python_and_takes_one_sum(
    jit_compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = types(graph_of_step(monkeypatch, jit_compile=jit_compile))
    assert not [name for name in found if "PyFunc" in name]
    assert found.count("CollectiveReduceV2") == 1


class ReadsLogs(keras.callbacks.Callback):
    """Reads the logs of each batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert logs["loss"] > 0


@TWO
@pytest.mark.parametrize("jit_compile", [False, True], ids=["plain", "xla"])
def test_logs_that_are_read_are_summed_with_the_gradients(
    jit_compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of_step(monkeypatch, jit_compile=jit_compile, callbacks=[ReadsLogs()])
    assert types(graph).count("CollectiveReduceV2") == 1


x, y = oracle.classification_data()
STEPS: dict[str, dict[str, Any]] = {
    "weights": {
        "x": x,
        "y": y,
        "batch_size": 4,
        "sample_weight": np.arange(len(x)) / 7,
        "optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    },
    "layers": {
        "layers": [
            keras.layers.Dropout(0.5),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(4, trainable=False, name="frozen"),
        ],
        "optimizer": keras.optimizers.Adam(global_clipnorm=1.0, use_ema=True),
    },
}


@TWO
@pytest.mark.parametrize("step", STEPS)
def test_xla_compiles_all_of_a_step_but_its_one_sum(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes before the sum is one function, what comes after it another."""
    graph = graph_of_step(monkeypatch, **STEPS[step])
    assert compiled_calls(graph) == 2
    assert types(graph).count("CollectiveReduceV2") == 1


@TWO
def test_a_step_that_needs_a_sum_in_the_middle_is_compiled_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synchronized = keras.layers.BatchNormalization(synchronized=True)
    graph = graph_of_step(monkeypatch, [synchronized])
    assert compiled_calls(graph) == 0
    assert types(graph).count("CollectiveReduceV2") > 1


def both_ways(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return [function(*arguments), tf.function(function)(*arguments)]


@TWO
@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "uint8",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ],
)
def test_sums_of_every_type(dtype: str) -> None:
    values = tf.cast(tf.constant([[tnt.get_rank(), 1, 0], [2, 3, 4]]), dtype)
    expected = tf.cast(tf.constant([[1, 2, 0], [4, 6, 8]]), dtype)
    for (total,) in both_ways(lambda: engine.channel("metrics").allreduce([values], 0)):
        assert total.dtype == expected.dtype
        assert total.shape == expected.shape
        np.testing.assert_array_equal(total, expected)


@TWO
def test_buckets_of_one_type_each_in_the_order_of_the_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_channel, "BUCKET_BYTES", 64)
    shapes = [(3,), (40,), (), (0, 5), (2, 3), (7,), (1,)]
    arrays = [
        np.random.default_rng(i + 7 * tnt.get_rank()).random(shape).astype(f"float{32 << i % 2}")
        for i, shape in enumerate(shapes)
    ]
    expected = tnt.allreduce(arrays)
    for sums in both_ways(
        lambda: engine.channel("gradients").allreduce([tf.constant(a) for a in arrays], 0)
    ):
        assert [tuple(total.shape) for total in sums] == shapes
        for total, right in zip(sums, expected, strict=True):
            np.testing.assert_allclose(total, right, rtol=1e-6)


def gathered(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The slices of all ranks."""
    _, (everyones,) = engine.channel("gradients").allreduce_with_slices([], [slices], 0)
    return everyones


@TWO
@pytest.mark.parametrize("counts", [(300, 2), (0, 5), (256, 256)])
def test_slices_of_unequal_numbers_are_gathered_by_rank(counts: tuple[int, int]) -> None:
    rank = tnt.get_rank()
    own = tf.IndexedSlices(
        tf.fill([counts[rank], 2], float(rank)), tf.range(counts[rank], dtype=tf.int64)
    )
    for of_all in both_ways(lambda: gathered(own)):
        np.testing.assert_array_equal(of_all.indices, [*range(counts[0]), *range(counts[1])])
        np.testing.assert_array_equal(of_all.values, np.repeat([[0, 0], [1, 1]], counts, axis=0))


@TWO
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int32"]
)
def test_slices_travel_with_tensors_of_any_type(dtype: str) -> None:
    """Two sets of slices, with large indices, beside tensors that are summed."""
    rank = tnt.get_rank()
    large = 2**40 + 12345

    def own(rank: int) -> list[tf.IndexedSlices]:
        counts = (270 - 268 * rank, rank)
        return [
            tf.IndexedSlices(
                tf.cast(tf.reshape(tf.range(count * 6) % 100 + rank, [count, 2, 3]), dtype),
                large - tf.range(count, dtype=tf.int64),
            )
            for count in counts
        ]

    tensors = [tf.ones(2, tf.int64), tf.fill([2, 3], tf.constant(1.5, "float32"))]
    for given in (tensors, tensors[:1], tensors[::-1], []):
        for sums, everyones in both_ways(
            lambda given=given: engine.channel("gradients").allreduce_with_slices(
                given, own(rank), 0
            )
        ):
            for total, tensor in zip(sums, given, strict=True):
                np.testing.assert_array_equal(total, 2 * tensor)
            for found, *of_ranks in zip(everyones, own(0), own(1), strict=True):
                assert found.values.dtype == dtype
                np.testing.assert_array_equal(
                    found.indices, tf.concat([one.indices for one in of_ranks], 0)
                )
                np.testing.assert_array_equal(
                    tf.cast(found.values, "complex128"),
                    tf.cast(tf.concat([one.values for one in of_ranks], 0), "complex128"),
                )


@TWO
def test_ranks_that_trace_unequally_find_each_other() -> None:
    """A rank whose shapes are known in advance, and one that has traced more, sum the same."""
    rank = tnt.get_rank()
    known = [None, 3][rank]

    def gather(indices: tf.Tensor, values: tf.Tensor) -> Any:
        slices = tf.IndexedSlices(values, indices)
        return gathered(slices).values

    for _ in range(1 + rank):
        traced = tf.function(gather).get_concrete_function(
            tf.TensorSpec([known], tf.int64), tf.TensorSpec([known, 2], tf.float32)
        )
    values = traced(tf.range(3, dtype=tf.int64), tf.ones([3, 2]))
    assert values.shape == (6, 2)


@TWO
def test_sums_of_all_purposes_have_one_order() -> None:
    """Even if nothing in the graph says which one comes first."""

    def step() -> Any:
        return [
            engine.channel(purpose).allreduce([tf.ones(3) * number], 0)[0][0]
            for number, purpose in enumerate(["losses", "metrics", "layers", "gradients"], 1)
        ]

    function = tf.function(step)
    for _ in range(20):
        assert [float(total) for total in function()] == [2.0, 4.0, 6.0, 8.0]


@TWO
def test_the_watch_knows_of_a_sum_in_progress() -> None:
    """A rank that waits where no Python function sees it."""
    counter = sum_counter("ring", "")
    numbers = []

    def look() -> np.bool_:
        while (number := counter.number_in_progress()) is None:
            time.sleep(0.01)  # it is counted beside the sum
        numbers.append(number)
        return np.bool_(True)

    def in_the_middle() -> Any:
        def communicate() -> tf.Tensor:
            seen = tf.numpy_function(look, [], tf.bool)
            with tf.control_dependencies([seen]):
                return DeviceChannel("metrics", "ring")._reduce(tf.ones(1))

        return counter.in_order([], communicate)

    tf.function(in_the_middle)()
    assert len(numbers) == 1
    assert counter.number_in_progress() is None
