"""The models of the benchmarks, and how they are trained.

Keras 3 and legacy Keras can both build them: a builder takes the `keras` module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

CLASSES, IMAGENET_CLASSES = 10, 1000
PIXELS, GPU_PIXELS, TINY_PIXELS = 64, 224, 32
TRANSFORMER_VOCABULARY, TRANSFORMER_LENGTH, TRANSFORMER_WIDTH, TRANSFORMER_BLOCKS = 8000, 64, 256, 4
HEAD_WIDTH = 64
MLP_WIDTH, MLP_LAYERS = 2048, 3
EMBEDDING_VOCABULARY, EMBEDDING_LENGTH, EMBEDDING_WIDTH = 200_000, 32, 64
# A Transformer that keeps a GPU busy, and models for a look at whether a benchmark runs.
GPU_LENGTH, GPU_WIDTH, GPU_BLOCKS = 128, 512, 6
TINY_LENGTH, TINY_WIDTH, TINY_VOCABULARY = 8, 64, 100


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


def resnet50(keras: Any, pixels: int = PIXELS, classes: int = CLASSES) -> Any:
    shape = (pixels, pixels, 3)
    return keras.applications.ResNet50(weights=None, input_shape=shape, classes=classes)


def transformer(
    keras: Any,
    length: int = TRANSFORMER_LENGTH,
    width: int = TRANSFORMER_WIDTH,
    blocks: int = TRANSFORMER_BLOCKS,
) -> Any:
    """An encoder of tokens, with a class for each sequence."""
    layers = keras.layers

    class Positions(layers.Layer):  # type: ignore[name-defined]
        """Adds a learned vector for each position."""

        def build(self, shape: Any) -> None:
            self.vectors = self.add_weight(
                name="vectors", shape=(length, width), initializer="uniform"
            )

        def call(self, x: Any) -> Any:
            return x + self.vectors

    tokens = keras.Input((length,), dtype="int32")
    x = Positions()(layers.Embedding(TRANSFORMER_VOCABULARY, width)(tokens))
    for _ in range(blocks):
        normal = layers.LayerNormalization()(x)
        x = layers.add(
            [x, layers.MultiHeadAttention(width // HEAD_WIDTH, HEAD_WIDTH)(normal, normal)]
        )
        inner = layers.Dense(4 * width, activation="relu")(layers.LayerNormalization()(x))
        x = layers.add([x, layers.Dense(width)(inner)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(tokens, layers.Dense(CLASSES, activation="softmax")(x))


def mlp(keras: Any, width: int = MLP_WIDTH) -> Any:
    """Large layers and little computation: 50 MB of gradients."""
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(MLP_LAYERS)]
    last = keras.layers.Dense(CLASSES, activation="softmax")
    return keras.Sequential([keras.Input((width,)), *hidden, last])


def embedding(keras: Any, vocabulary: int = EMBEDDING_VOCABULARY) -> Any:
    """A large table, of which a step uses a few rows: its gradient is sparse."""
    return keras.Sequential(
        [
            keras.Input((EMBEDDING_LENGTH,), dtype="int32"),
            keras.layers.Embedding(vocabulary, EMBEDDING_WIDTH),
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

# The same models with the sizes that they have on GPUs.
GPU_CASES = {
    "resnet50": Case(
        partial(resnet50, pixels=GPU_PIXELS, classes=IMAGENET_CLASSES),
        128,
        3,
        15,
        (GPU_PIXELS, GPU_PIXELS, 3),
    ),
    "transformer": Case(
        partial(transformer, length=GPU_LENGTH, width=GPU_WIDTH, blocks=GPU_BLOCKS),
        128,
        3,
        20,
        (GPU_LENGTH,),
        vocabulary=TRANSFORMER_VOCABULARY,
    ),
    "mlp": Case(mlp, 1024, 10, 60, (MLP_WIDTH,)),
    "lenet5": Case(lenet5, 1024, 10, 60, (28, 28, 1)),
    "embedding": Case(
        embedding, 1024, 10, 60, (EMBEDDING_LENGTH,), vocabulary=EMBEDDING_VOCABULARY, momentum=0.0
    ),
}

# The same models as small as possible: figures of them mean nothing.
TINY_CASES = {
    "resnet50": Case(partial(resnet50, pixels=TINY_PIXELS), 4, 1, 2, (TINY_PIXELS, TINY_PIXELS, 3)),
    "transformer": Case(
        partial(transformer, length=TINY_LENGTH, width=TINY_WIDTH, blocks=1),
        4,
        1,
        2,
        (TINY_LENGTH,),
        vocabulary=TRANSFORMER_VOCABULARY,
    ),
    "mlp": Case(partial(mlp, width=TINY_WIDTH), 8, 1, 2, (TINY_WIDTH,)),
    "lenet5": Case(lenet5, 8, 1, 2, (28, 28, 1)),
    "embedding": Case(
        partial(embedding, vocabulary=TINY_VOCABULARY),
        8,
        1,
        2,
        (EMBEDDING_LENGTH,),
        vocabulary=TINY_VOCABULARY,
        momentum=0.0,
    ),
}

SIZES = {"cpu": CASES, "gpu": GPU_CASES, "tiny": TINY_CASES}
