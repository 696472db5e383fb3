"""Models, losses, steps and data put together at random train as they do in Keras.

Each number stands for one model; all ranks make the same. `make test ARGS="-m long -k random"`
tries more of them.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from oracle import Decay, assert_trains_as_in_keras

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.ranks(2)]

FEATURES, LENGTH, TOKENS, OUTPUTS = 4, 5, 7, 2


class Adding(layers.Layer):
    """Adds a loss."""

    def __init__(self, added: Any) -> None:
        super().__init__()
        self.added = added

    def call(self, x: Any) -> Any:
        self.add_loss(self.added(x))
        return x


class Lookup(layers.Layer):
    """Looks up tokens and positions, in one table or in two."""

    def __init__(self, same_table: bool, is_tied: bool) -> None:
        super().__init__()
        self.tokens = layers.Embedding(TOKENS, FEATURES)
        self.positions = self.tokens if same_table else layers.Embedding(LENGTH, FEATURES)
        self.is_tied = is_tied

    def build(self, shape: Any) -> None:
        self.tokens.build(shape)
        if self.positions is not self.tokens:
            self.positions.build((LENGTH,))

    def call(self, x: Any) -> Any:
        hidden = self.tokens(x) + self.positions(ops.arange(LENGTH))
        if self.is_tied:
            table = ops.convert_to_tensor(self.tokens.embeddings)
            hidden = ops.matmul(ops.matmul(hidden, ops.transpose(table)), table)
        return ops.mean(hidden, axis=1)


def _weighted_mean(values: Any) -> Any:
    weights = ops.cast(values > 0.1, "float64") + 0.05
    return ops.sum(values * weights) / ops.sum(weights)


NUMBERS = {
    "each": lambda x: ops.sum(ops.square(x), axis=-1),
    "entries": ops.square,
    "mean": lambda x: ops.mean(ops.square(x)),
    "sum": lambda x: ops.sum(ops.square(x)),
    "root": lambda x: ops.sqrt(ops.mean(ops.square(x)) + 0.1),
    "weighted": lambda x: _weighted_mean(ops.square(x)),
}

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
    "accumulating": lambda: keras.optimizers.SGD(0.01, gradient_accumulation_steps=2),
    "averaging": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=3),
}

LOSSES = {
    **{
        f"keras_{reduction}": lambda reduction=reduction: keras.losses.MeanSquaredError(
            reduction=reduction
        )
        for reduction in ("sum", "sum_over_batch_size", "mean_with_sample_weight")
    },
    **{name: lambda number=number: lambda y, p: number(y - p) for name, number in NUMBERS.items()},
}


class OwnStep(keras.Model):
    """Trains two halves of its variables with an optimizer each."""

    number: Any = None
    scales = False
    second: Any = None

    def train_step(self, data: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.number(y - self(x, training=True))
            if weight is not None:
                loss = loss + ops.mean(weight)
            loss = loss + sum(ops.sum(one) for one in self.losses)
            if self.scales:
                loss = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        if self.second is None or self.scales:
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            half = len(variables) // 2
            self.optimizer.apply_gradients(zip(gradients[:half], variables[:half], strict=True))
            self.second.apply_gradients(zip(gradients[half:], variables[half:], strict=True))
        return {"loss": loss if loss.shape.rank == 0 else ops.sum(loss)}


class Choice:
    """What one model is made of."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.has_tokens = self.maybe(0.6)
        self.same_table, self.is_tied = self.maybe(), self.maybe(0.3)
        self.added = self.one_of([None, *NUMBERS])
        self.is_regularized, self.is_normalized = self.maybe(), self.maybe(0.3)
        self.own_step = self.maybe(0.5)
        self.number, self.loss = self.one_of(NUMBERS), self.one_of(LOSSES)
        self.scales, self.has_second = self.maybe(0.3), self.maybe(0.4)
        self.optimizer = self.one_of(OPTIMIZERS)
        self.is_weighted = self.maybe(0.4) and (self.own_step or self.loss.startswith("keras"))
        self.samples, self.batch_size = int(self.rng.integers(8, 15)), int(self.rng.integers(3, 7))
        self.as_arrays, self.drops = self.maybe(0.3), self.maybe(0.3)
        self.execution = self.one_of(["graph", "graph", "graph", "xla"])
        if self.own_step and self.number in ("each", "entries") and self.added != "mean":
            self.added = None  # a sum over the batch for each sample: nothing that ranks can divide
        if self.execution == "xla" and self.added in ("root", "weighted"):
            self.added = "each"  # a compiled call does not show what is warned of otherwise

    def maybe(self, probability: float = 0.5) -> bool:
        return bool(self.rng.random() < probability)

    def one_of(self, names: Any) -> Any:
        names = list(names)
        return names[self.rng.integers(len(names))]

    def __repr__(self) -> str:
        return str({name: value for name, value in vars(self).items() if name != "rng"})


def _make_model(choice: Choice) -> keras.Model:
    inputs = {"features": keras.Input((FEATURES,), name="features")}
    hidden = inputs["features"]
    if choice.has_tokens:
        inputs["tokens"] = keras.Input((LENGTH,), dtype="int32", name="tokens")
        hidden = hidden + Lookup(choice.same_table, choice.is_tied)(inputs["tokens"])
    decay = Decay() if choice.is_regularized else None
    hidden = layers.Dense(5, activation="tanh", kernel_regularizer=decay)(hidden)
    if choice.is_normalized:
        hidden = layers.BatchNormalization(synchronized=True)(hidden)
    if choice.added:
        hidden = Adding(NUMBERS[choice.added])(hidden)
    outputs = layers.Dense(OUTPUTS)(hidden)
    if not choice.own_step:
        return keras.Model(inputs, outputs)
    model = OwnStep(inputs, outputs)
    model.number, model.scales = NUMBERS[choice.number], choice.scales
    model.second = keras.optimizers.Adam(0.005) if choice.has_second else None
    return model


def _data(choice: Choice) -> dict[str, Any]:
    rng = np.random.default_rng(choice.samples)
    x = {"features": rng.normal(size=(choice.samples, FEATURES))}
    if choice.has_tokens:
        x["tokens"] = rng.integers(0, TOKENS, size=(choice.samples, LENGTH))
    y = rng.normal(size=(choice.samples, OUTPUTS))
    data = (x, y, rng.uniform(0.5, 2.0, size=choice.samples)) if choice.is_weighted else (x, y)
    if choice.as_arrays:
        names = ("x", "y", "sample_weight")
        return {**dict(zip(names, data, strict=False)), "batch_size": choice.batch_size}
    dataset = tf.data.Dataset.from_tensor_slices(data)
    return {"x": dataset.batch(choice.batch_size, drop_remainder=choice.drops)}


def _check(seed: int) -> None:
    choice = Choice(seed)
    print(choice)  # shown if it fails

    def optimizer_state(model: keras.Model) -> Any:
        state = list(model.optimizer.variables)
        return [np.array(variable) for variable in state]

    assert_trains_as_in_keras(
        lambda: _make_model(choice),
        lambda: {
            "optimizer": OPTIMIZERS[choice.optimizer](),
            "loss": None if choice.own_step else LOSSES[choice.loss](),
            "jit_compile": choice.execution == "xla",
        },
        lambda: _data(choice),
        tolerance=1e-8,
        atol=1e-11,
        then=optimizer_state,
    )


@pytest.mark.parametrize("seed", range(3))
def test_random_model(seed: int) -> None:
    _check(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", [*range(3, 10), *range(100, 200)])
def test_more_random_models(seed: int) -> None:
    _check(seed)
