"""The Transformer (Vaswani et al., 2017) made of Keras layers, and how it translates.

Nothing here depends on ranks: it is all plain Keras.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops
from subwords import END, PADDING, START


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    inner_width: int  # between the two dense layers of a block


SIZES = {
    "tiny": Size(layers=2, width=64, heads=4, inner_width=128),
    "small": Size(layers=3, width=256, heads=4, inner_width=1024),
    "base": Size(layers=6, width=512, heads=8, inner_width=2048),
    "big": Size(layers=6, width=1024, heads=16, inner_width=4096),
}


def transformer(size: Size, vocabulary_size: int, dropout: float) -> keras.Model:
    """A model that predicts each next token of the target from the source sentence.

    Inputs are token numbers of shape (sentences, length); 0 is padding. Outputs are logits.
    """
    source = keras.Input((None,), dtype="int32", name="source")
    target = keras.Input((None,), dtype="int32", name="target")
    embedding = TokenEmbedding(vocabulary_size, size.width, name="embedding")
    encoded = make_encoder(size, dropout)([embedding(source), source])
    decoded = make_decoder(size, dropout)([embedding(target), encoded, source])
    logits = embedding(decoded, reverse=True)
    return keras.Model({"source": source, "target": target}, logits, name="transformer")


def make_encoder(size: Size, dropout: float) -> keras.Model:
    vectors = keras.Input((None, size.width))
    source = keras.Input((None,), dtype="int32")
    hidden = keras.layers.Dropout(dropout)(vectors)
    for _ in range(size.layers):
        hidden = attend(hidden, None, size, dropout, attention_mask=no_padding(source))
        hidden = think(hidden, size, dropout)
    encoded = keras.layers.LayerNormalization()(hidden)
    return keras.Model([vectors, source], encoded, name="encoder")


def make_decoder(size: Size, dropout: float) -> keras.Model:
    vectors = keras.Input((None, size.width))
    encoded = keras.Input((None, size.width))
    source = keras.Input((None,), dtype="int32")
    hidden = keras.layers.Dropout(dropout)(vectors)
    for _ in range(size.layers):
        # A token attends only to those before it, so never to the padding at the end.
        hidden = attend(hidden, None, size, dropout, use_causal_mask=True)
        hidden = attend(hidden, encoded, size, dropout, attention_mask=no_padding(source))
        hidden = think(hidden, size, dropout)
    decoded = keras.layers.LayerNormalization()(hidden)
    return keras.Model([vectors, encoded, source], decoded, name="decoder")


def no_padding(source: Any) -> Any:
    """The attention mask: which tokens to attend to, the same for all queries."""
    return ops.expand_dims(ops.not_equal(source, PADDING), 1)


def attend(hidden: Any, memory: Any, size: Size, dropout: float, **masks: Any) -> Any:
    """Attention of each token to the memory, or to its own sentence if there is none."""
    query = keras.layers.LayerNormalization()(hidden)
    attention = keras.layers.MultiHeadAttention(
        size.heads, size.width // size.heads, dropout=dropout
    )
    seen = attention(query, query if memory is None else memory, **masks)
    return keras.layers.add([hidden, keras.layers.Dropout(dropout)(seen)])


def think(hidden: Any, size: Size, dropout: float) -> Any:
    """The feed-forward block: two dense layers for each token separately."""
    inner = keras.layers.LayerNormalization()(hidden)
    inner = keras.layers.Dense(size.inner_width, activation="relu")(inner)
    inner = keras.layers.Dense(size.width)(inner)
    return keras.layers.add([hidden, keras.layers.Dropout(dropout)(inner)])


@keras.saving.register_keras_serializable("transformer")
class TokenEmbedding(keras.layers.Layer):
    """Tokens to vectors, with their positions; in reverse, vectors to logits of tokens.

    Both directions, and both languages, use the same weights.
    """

    def __init__(self, vocabulary_size: int, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocabulary_size = vocabulary_size
        self.width = width

    def build(self, input_shape: Any) -> None:
        self.embeddings = self.add_weight(
            shape=(self.vocabulary_size, self.width),
            initializer=keras.initializers.RandomNormal(stddev=self.width**-0.5),
            name="embeddings",
        )

    def call(self, inputs: Any, reverse: bool = False) -> Any:
        if reverse:
            return ops.matmul(inputs, ops.transpose(self.embeddings))
        vectors = ops.take(self.embeddings, inputs, axis=0) * self.width**0.5
        return vectors + positions(ops.shape(inputs)[1], self.width, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        own = {"vocabulary_size": self.vocabulary_size, "width": self.width}
        return {**super().get_config(), **own}


def positions(length: Any, width: int, dtype: str) -> Any:
    """Sines and cosines of many wavelengths, which encode positions."""
    places = ops.expand_dims(ops.cast(ops.arange(length), dtype), 1)
    exponents = ops.arange(width // 2, dtype=dtype) / (width // 2)
    frequencies = ops.exp(-math.log(10_000) * exponents)
    angles = places * frequencies
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)


class Translator(keras.Model):
    """Translates with the layers of a transformer, and always with its current weights.

    `predict` takes source sentences as the transformer does, and returns the tokens of their
    translations. Decoding is greedy: it always takes the most likely next token.
    """

    def __init__(self, trained: keras.Model, max_length: int) -> None:
        super().__init__()
        self.embedding = trained.get_layer("embedding")
        self.encoder = trained.get_layer("encoder")
        self.decoder = trained.get_layer("decoder")
        self.max_length = max_length

    def call(self, source: Any) -> Any:
        encoded = self.encoder([self.embedding(source), source])

        def unfinished(length: Any, tokens: Any) -> Any:
            return ops.any(ops.all(tokens != END, axis=1))

        def add_token(length: Any, tokens: Any) -> Any:
            decoded = self.decoder([self.embedding(tokens[:, :length]), encoded, source])
            logits = self.embedding(decoded[:, -1], reverse=True)
            best = ops.cast(ops.argmax(logits, axis=-1), tokens.dtype)
            here = ops.equal(ops.arange(self.max_length + 1), length)
            return length + 1, ops.where(here, ops.expand_dims(best, 1), tokens)

        tokens = ops.full((ops.shape(source)[0], self.max_length), PADDING, "int32")
        tokens = ops.pad(tokens, ((0, 0), (1, 0)), constant_values=START)
        _, tokens = ops.while_loop(
            unfinished, add_token, (1, tokens), maximum_iterations=self.max_length
        )
        return tokens[:, 1:]
