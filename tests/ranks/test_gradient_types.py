"""Gradients that cross the network in 16 bits: rounded there, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import WITH_METRICS, classification_data, small_model

import tarantella as tnt
from tarantella.errors import InputError, MismatchError
from tarantella.graph.overlapped import OverlappedChannel
from tarantella.runtime import world

RANKS = pytest.mark.ranks(2, 3)
TYPES = pytest.mark.parametrize("sent_as", ["bfloat16", "float16"])


@pytest.fixture
def several_hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums are those between hosts, though all ranks are on one."""
    monkeypatch.setattr(world, "has_several_hosts", lambda: True)
    yield
    tnt.barrier()


def rounded(values: Any, sent_as: str) -> np.ndarray:
    return np.asarray(values).astype(tf.as_dtype(sent_as).as_numpy_dtype).astype(np.float32)


def rounded_sum(everyones: list[Any], sent_as: str) -> np.ndarray:
    """The sum of rounded values in float32, in the order of the ranks, and rounded again."""
    total = np.zeros(np.shape(everyones[0]), np.float32)
    for values in everyones:
        total += rounded(values, sent_as)
    return rounded(total, sent_as)


@RANKS
@TYPES
def test_values_are_rounded_and_summed_in_float32(sent_as: str) -> None:
    def in_background(*tensors: tf.Tensor) -> list[tf.Tensor]:
        channel = OverlappedChannel("gradients", "sparse gradients", tf.as_dtype(sent_as))
        return channel.allreduce(tensors, threshold=4096)

    # One is larger than several pieces, some have fewer elements than there are ranks.
    shapes = [(3,), (2000, 1500), (), (0, 5), (700, 3), (40,), (1,)]
    random = np.random.default_rng(tnt.get_rank())
    arrays = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    arrays[3] = arrays[3].astype(np.float64)
    arrays += [np.full(5, tnt.get_rank() + 1, dtype) for dtype in (np.int8, np.uint8, np.int16)]
    everyones = tnt.allgather(arrays)
    function = tf.function(in_background)
    for run in (function, function, in_background):
        sums = run(*map(tf.constant, arrays))
        assert [total.dtype for total in sums] == [array.dtype for array in arrays]
        for total, *values in zip(sums, *everyones, strict=True):
            is_rounded = np.ndim(values[0]) and np.issubdtype(values[0].dtype, np.floating)
            expected = rounded_sum(values, sent_as) if is_rounded else np.sum(values, axis=0)
            np.testing.assert_array_equal(total, expected)


@RANKS
def test_slices_are_rounded_and_their_indices_are_not() -> None:
    rows = tnt.get_rank() + 1
    values = np.random.default_rng(rows).normal(size=(rows, 3)).astype(np.float32)
    indices = np.arange(rows) + 70_000_001
    channel = OverlappedChannel("gradients", "sparse gradients", tf.bfloat16)
    slices = tf.IndexedSlices(tf.constant(values), tf.constant(indices))
    _, (result,) = channel.allreduce_with_slices([], [slices], 0)
    expected = np.concatenate(tnt.allgather(values))
    assert result.values.dtype == tf.float32
    np.testing.assert_array_equal(result.values, rounded(expected, "bfloat16"))
    np.testing.assert_array_equal(result.indices, np.concatenate(tnt.allgather(indices)))


def fitted(model: Any, **options: Any) -> tuple[list[Any], dict[str, list[float]]]:
    model.compile(**{**WITH_METRICS, "optimizer": keras.optimizers.SGD(1.0), **options})
    x, y = classification_data(12)
    history = model.fit(x, y, batch_size=12, shuffle=False, epochs=2, verbose=0)
    return model.get_weights(), history.history


def seeded_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    return small_model()


def expected_weights(sent_as: str) -> list[Any]:
    """The weights after two steps of one process that rounds as the ranks do."""
    model = seeded_model()
    samples, labels = classification_data(12)
    ranks = tnt.get_size()
    for _ in range(2):
        contributions = []
        for x, y in zip(np.split(samples, ranks), np.split(labels, ranks), strict=True):
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))
                loss = (tf.reduce_mean(losses) + tf.add_n(model.losses)) / ranks
            weights = [variable.value for variable in model.trainable_variables]
            contributions.append(tape.gradient(loss, weights))
        for variable, *gradients in zip(model.trainable_variables, *contributions, strict=True):
            variable.assign_sub(rounded_sum(gradients, sent_as))
    return model.get_weights()


@RANKS
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.usefixtures("float64", "several_hosts")
def test_training_rounds_gradients_and_nothing_else(jit_compile: bool) -> None:
    """Metrics and the state of layers are as in plain Keras."""
    exact, _ = fitted(tnt.Model(seeded_model()), jit_compile=jit_compile)
    model = tnt.Model(seeded_model(), gradient_type="bfloat16")
    weights, history = fitted(model, jit_compile=jit_compile)
    for weight, expected, unrounded in zip(
        weights, expected_weights("bfloat16"), exact, strict=True
    ):
        # The contributions of ranks can differ in the last bit of float64, and be rounded apart.
        np.testing.assert_allclose(weight, expected, rtol=1e-9, atol=1e-12)
        assert np.abs(weight - unrounded).max() > 1e-7
        assert all((each == weight).all() for each in tnt.allgather(weight))
    _, plain = fitted(seeded_model())
    np.testing.assert_allclose(history["loss"][0], plain["loss"][0], rtol=1e-9)
    assert history["accuracy"][0] == plain["accuracy"][0]


@RANKS
@pytest.mark.usefixtures("float64")
def test_on_one_host_gradients_are_not_rounded() -> None:
    exact, _ = fitted(tnt.Model(seeded_model()))
    weights, _ = fitted(tnt.Model(seeded_model(), gradient_type="bfloat16"))
    for weight, expected in zip(weights, exact, strict=True):
        np.testing.assert_array_equal(weight, expected)


@pytest.mark.ranks(2)
def test_ranks_must_have_the_same_type() -> None:
    types = ["bfloat16", "float16"]
    model = tnt.Model(seeded_model(), gradient_type=types[tnt.get_rank()])
    with pytest.raises(MismatchError, match="gradient_type"):
        fitted(model)


@pytest.mark.ranks(2)
def test_a_type_that_there_is_not() -> None:
    with pytest.raises(InputError, match="'float8'.*float32, bfloat16, float16"):
        tnt.Model(seeded_model(), gradient_type="float8")
