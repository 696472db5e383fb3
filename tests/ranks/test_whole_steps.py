"""Steps that are one function together with their sum, as XLA compiles them on GPUs.

XLA cannot compile a sum between CPUs, so here it compiles what comes before the sum and after it.
They need `TNT_GPU_SUMS=ring`, as `test_device_sums` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import assert_trains_as_in_keras, batches, classification_data, small_model

import tarantella as tnt
from tarantella.graph import engine
from tarantella.graph.sum_counter import compiled_sum_counter
from tarantella.keras import compiled_step
from tarantella.keras.slots import slices_per_sample

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.device_sums,
    pytest.mark.skipif(os.environ.get("TNT_GPU_SUMS") != "ring", reason="needs TNT_GPU_SUMS=ring"),
    pytest.mark.usefixtures("float64"),
]
layers = keras.layers


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of values in each sum of a whole step that was traced; None if it is unknown."""
    engine.device_hint()
    monkeypatch.setattr(engine, "_xla_sums", True)
    compiled_sum_counter()  # as when the ranks decide; it makes a variable
    taken: list[int] = []
    add = compiled_step.sum_in_compiled

    def noted(flat: tf.Tensor) -> tf.Tensor:
        taken.append(flat.shape[0])
        return add(flat)

    monkeypatch.setattr(compiled_step, "sum_in_compiled", noted)
    return taken


def classifier(tokens: Any, hidden: Any) -> keras.Model:
    hidden = layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(tokens, layers.Dense(3, activation="softmax")(hidden))


def embedding() -> keras.Model:
    tokens = keras.Input((6,), dtype="int32")
    return classifier(tokens, layers.Embedding(9, 4)(tokens))


def one_token_a_sample() -> keras.Model:
    token = keras.Input((), dtype="int32")
    hidden = layers.Embedding(9, 4)(token)
    return keras.Model(token, layers.Dense(3, activation="softmax")(hidden))


def two_tables() -> keras.Model:
    """One of them is used for a part of the tokens, and has a large index."""
    tokens = keras.Input((6,), dtype="int64")
    first = layers.Embedding(9, 4)(tokens)
    second = layers.Embedding(3_000_009, 2)(tokens[:, 2:] + 3_000_000)
    joined = layers.Concatenate()([layers.Flatten()(first), layers.Flatten()(second)])
    return keras.Model(tokens, layers.Dense(3, activation="softmax")(joined))


def table_and_positions() -> keras.Model:
    """A lookup that depends on no sample."""

    class Positions(layers.Layer):
        def build(self, shape: Any) -> None:
            self.table = layers.Embedding(6, 4)
            self.table.build(None)

        def call(self, x: Any) -> Any:
            return x + self.table(keras.ops.arange(6))

    tokens = keras.Input((6,), dtype="int32")
    return classifier(tokens, Positions()(layers.Embedding(9, 4)(tokens)))


class Total(layers.Layer):
    """The sum of what each sample of ragged ones has."""

    def call(self, x: Any) -> Any:
        return tf.reduce_sum(x, axis=1)

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], shape[-1])


def of_ragged_tokens() -> keras.Model:
    tokens = keras.Input((None,), dtype="int32", ragged=True)
    hidden = Total()(layers.Embedding(9, 4)(tokens))
    return keras.Model(tokens, layers.Dense(3, activation="softmax")(hidden))


def ragged_tokens_and_classes() -> tuple[Any, Any]:
    tokens, classes = tokens_and_classes()
    lengths = 2 + tokens[:, 0] % 4
    return tf.RaggedTensor.from_tensor(tokens.astype("int32"), lengths), classes


class FirstOnly(layers.Layer):
    def call(self, x: Any, other: Any = None) -> Any:
        return x


def with_an_optional_input() -> keras.Model:
    tokens, other = keras.Input((6,), dtype="int32"), keras.Input((5,), optional=True)
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(9, 4)(tokens))
    classes = layers.Dense(3, activation="softmax")(FirstOnly()(hidden, other))
    return keras.Model([tokens, other], classes)


def tokens_and_classes(shape: tuple[int, ...] = (6,)) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 9, size=(13, *shape)), rng.integers(0, 3, size=13)


def with_state() -> keras.Model:
    inputs = keras.Input((5,))
    hidden = layers.BatchNormalization()(layers.Dense(4)(inputs))
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden))


class ReadsLogs(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert logs["loss"] > 0


# A model, its data, and whether its step is a whole one.
CASES: dict[str, tuple[Callable[[], keras.Model], Callable[[], Any], bool]] = {
    "dense": (small_model, classification_data, True),
    "embedding": (embedding, tokens_and_classes, True),
    "one token a sample": (one_token_a_sample, lambda: tokens_and_classes(()), True),
    "two tables": (two_tables, tokens_and_classes, True),
    "table and positions": (table_and_positions, tokens_and_classes, False),
}


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.long), "adam"])
@pytest.mark.parametrize("case", CASES)
def test_whole_steps_give_what_plain_keras_gives(
    case: str, optimizer: str, sums: list[int]
) -> None:
    """The last batch has one sample, so that one rank has none."""
    make_model, data, is_whole = CASES[case]
    assert_trains_as_in_keras(
        make_model,
        lambda: {
            "optimizer": optimizer,
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy"],
            "jit_compile": True,
        },
        lambda: {"x": batches(*data())},
    )
    assert bool(sums) == is_whole


@pytest.mark.parametrize("fit", [{"callbacks": [ReadsLogs()]}, {}], ids=["read", "unread"])
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_logs_and_several_steps_at_a_time(
    steps_per_execution: int, fit: dict[str, Any], sums: list[int]
) -> None:
    assert_trains_as_in_keras(
        embedding,
        lambda: {
            "optimizer": keras.optimizers.Adam(0.1, global_clipnorm=0.5, use_ema=True),
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy"],
            "jit_compile": True,
            "steps_per_execution": steps_per_execution,
        },
        lambda: {"x": batches(*tokens_and_classes()), **fit},
    )
    assert sums


def test_sparse_gradients_of_own_data_are_gathered(sums: list[int]) -> None:
    """Nobody knows how many samples the other ranks have."""
    model = tnt.Model(embedding())
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
    model.fit(batches(*tokens_and_classes()), tnt_distribute_dataset=False, verbose=0)
    assert not sums


def test_sparse_gradients_of_ragged_samples(sums: list[int]) -> None:
    """What they consist of has more rows than there are samples."""
    assert_trains_as_in_keras(
        of_ragged_tokens,
        lambda: {
            "optimizer": "adam",
            "loss": "sparse_categorical_crossentropy",
            "jit_compile": True,
        },
        lambda: {"x": batches(*ragged_tokens_and_classes())},
    )
    assert not sums


def test_an_input_that_is_left_out(sums: list[int]) -> None:
    tokens, classes = tokens_and_classes()
    assert_trains_as_in_keras(
        with_an_optional_input,
        lambda: {
            "optimizer": "adam",
            "loss": "sparse_categorical_crossentropy",
            "jit_compile": True,
        },
        lambda: {"x": [tokens, None], "y": classes, "batch_size": 4},
    )
    assert sums


def slices_of(make: Callable[[Any], Any], *specs: tf.TensorSpec) -> int | None:
    found: list[int | None] = []
    table = tf.Variable(tf.ones([9, 2]))

    @tf.function(autograph=False)
    def look(*samples: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.gather(table, make(*samples)))
        found.append(slices_per_sample(tape.gradient(total, table).indices, samples))

    look.get_concrete_function(*specs)
    return found[-1]


TOKENS = tf.TensorSpec([None, 6], tf.int32)
OF_FOUR = tf.TensorSpec([4, 6], tf.int32)
RAGGED = tf.TensorSpec([None, None], tf.int32)


@pytest.mark.parametrize(
    ("make", "spec", "expected"),
    [
        (lambda x: x, TOKENS, 6),
        (lambda x: x, OF_FOUR, 6),
        (lambda x: x[:, 1], TOKENS, 1),
        (lambda x: tf.where(x > 3, x, 0)[:, tf.newaxis, 2:], TOKENS, 4),
        (lambda x: tf.reshape(x, [-1, 2, 3]), TOKENS, 6),
        (lambda x: x, RAGGED, None),
        (lambda x: x[1:], TOKENS, None),
        (lambda x: x[:3], OF_FOUR, None),
        (lambda x: tf.unique(tf.reshape(x, [-1]))[0], TOKENS, None),
        (lambda x: tf.boolean_mask(x, x > 3), TOKENS, None),
        (lambda x: tf.transpose(x), OF_FOUR, None),
        (lambda x: tf.concat([x, x], 0), OF_FOUR, None),
        (lambda x: tf.range(6), TOKENS, None),
        (lambda x: tf.tile(x, [2, 1]), TOKENS, None),
    ],
)
def test_the_graph_shows_how_many_slices_a_sample_adds(
    make: Callable[[Any], Any], spec: tf.TensorSpec, expected: int | None
) -> None:
    assert slices_of(make, spec) == expected
