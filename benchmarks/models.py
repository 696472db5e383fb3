"""The models of the benchmarks, and how they are trained.

Keras 3 and legacy Keras can both build them: a builder takes the `keras` module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CLASSES = 10
TRANSFORMER_VOCABULARY, TRANSFORMER_LENGTH, TRANSFORMER_WIDTH, TRANSFORMER_BLOCKS = 8000, 64, 256, 4
MLP_WIDTH, MLP_LAYERS = 2048, 3
EMBEDDING_VOCABULARY, EMBEDDING_LENGTH, EMBEDDING_WIDTH = 200_000, 32, 64


@dataclass(frozen=True)
class Case:
    """A model and its training.

    Attributes:
        build: Builds the model with a `keras` module.
        batch: The global batch size.
        warm_up: Steps of a round that are not measured.
        steps: Steps of a round that are measured.
        shape: The shape of a sample.
        vocabulary: The number of tokens, if samples are tokens.
        momentum: Of SGD. With momentum, the gradients of an embedding do not stay sparse.
    """

    build: Callable[[Any], Any]
    batch: int
    warm_up: int
    steps: int
    shape: tuple[int, ...]
    vocabulary: int = 0
    momentum: float = 0.9

    def data(self, batch: int) -> tuple[Any, Any]:
        """A batch of samples and labels, the same each time."""
        import numpy as np

        rng = np.random.default_rng(1)
        shape = (batch, *self.shape)
        tokens = self.vocabulary
        x = rng.integers(0, tokens, shape, np.int32) if tokens else rng.random(shape, np.float32)
        return x, rng.integers(0, CLASSES, batch)


def lenet5(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(20, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(50, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(500, activation="relu"),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def resnet50(keras: Any) -> Any:
    return keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=CLASSES)


def transformer(keras: Any) -> Any:
    """An encoder of tokens, with a class for each sequence."""
    layers, width = keras.layers, TRANSFORMER_WIDTH

    class Positions(layers.Layer):  # type: ignore[name-defined]
        """Adds a learned vector for each position."""

        def build(self, shape: Any) -> None:
            self.vectors = self.add_weight(
                name="vectors", shape=(TRANSFORMER_LENGTH, width), initializer="uniform"
            )

        def call(self, x: Any) -> Any:
            return x + self.vectors

    tokens = keras.Input((TRANSFORMER_LENGTH,), dtype="int32")
    x = Positions()(layers.Embedding(TRANSFORMER_VOCABULARY, width)(tokens))
    for _ in range(TRANSFORMER_BLOCKS):
        normal = layers.LayerNormalization()(x)
        x = layers.add([x, layers.MultiHeadAttention(4, width // 4)(normal, normal)])
        inner = layers.Dense(4 * width, activation="relu")(layers.LayerNormalization()(x))
        x = layers.add([x, layers.Dense(width)(inner)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(tokens, layers.Dense(CLASSES, activation="softmax")(x))


def mlp(keras: Any) -> Any:
    """Large layers and little computation: 50 MB of gradients."""
    hidden = [keras.layers.Dense(MLP_WIDTH, activation="relu") for _ in range(MLP_LAYERS)]
    last = keras.layers.Dense(CLASSES, activation="softmax")
    return keras.Sequential([keras.Input((MLP_WIDTH,)), *hidden, last])


def embedding(keras: Any) -> Any:
    """A large table, of which a step uses a few rows: its gradient is sparse."""
    return keras.Sequential(
        [
            keras.Input((EMBEDDING_LENGTH,), dtype="int32"),
            keras.layers.Embedding(EMBEDDING_VOCABULARY, EMBEDDING_WIDTH),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ]
    )


CASES = {
    "lenet5": Case(lenet5, 256, 10, 60, (28, 28, 1)),
    "resnet50": Case(resnet50, 32, 3, 12, (64, 64, 3)),
    "transformer": Case(
        transformer, 32, 4, 20, (TRANSFORMER_LENGTH,), vocabulary=TRANSFORMER_VOCABULARY
    ),
    "mlp": Case(mlp, 64, 5, 30, (MLP_WIDTH,)),
    "embedding": Case(
        embedding, 256, 20, 100, (EMBEDDING_LENGTH,), vocabulary=EMBEDDING_VOCABULARY, momentum=0.0
    ),
}
