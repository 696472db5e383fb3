"""Parallel text from files, in batches of about the same number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from subwords import PADDING, START, Vocabulary

BUCKET_WIDTH = 8  # sentences in one batch differ by less than this many tokens


@dataclass(frozen=True)
class Text:
    """A pair of files: sentences, one per line, and their translations on the same lines."""

    source: Path
    target: Path

    @classmethod
    def named(cls, name: str, data_dir: Path, languages: tuple[str, str]) -> Text:
        source, target = (data_dir / f"{name}.{language}" for language in languages)
        return cls(source, target)

    def problem(self) -> str | None:
        """What is wrong with the files, if anything is."""
        for path in (self.source, self.target):
            if not path.is_file():
                return f"there is no file {path}"
        try:
            sizes = [sum(1 for _ in lines(path)) for path in (self.source, self.target)]
        except UnicodeDecodeError as error:
            return f"{self.source} and {self.target} have to be UTF-8: {error}"
        if sizes[0] != sizes[1]:
            return f"{self.source} has {sizes[0]} lines, but {self.target} has {sizes[1]}"
        if not sizes[0]:
            return f"{self.source} is empty"
        return None

    def pairs(self) -> Iterator[tuple[str, str]]:
        return zip(lines(self.source), lines(self.target), strict=True)


def lines(path: Path) -> Iterator[str]:
    with path.open(
        encoding="utf-8", newline="\n"
    ) as file:  # other line breaks are part of the text
        yield from file


def encoded_pairs(
    text: Text, vocabulary: Vocabulary, max_length: int, shard: tuple[int, int] = (0, 1)
) -> Iterator[tuple[list[int], list[int]]]:
    """The pairs of a text as numbers, without those longer than `max_length`.

    Args:
        text: The files.
        vocabulary: Turns text into numbers.
        max_length: The most tokens that a sentence may have.
        shard: (0, 2) for every other pair, (1, 2) for the rest, and so on. All lines are read, but
            only those of the shard are encoded.
    """
    index, number = shard
    for pair in islice(text.pairs(), index, None, number):
        source, target = map(vocabulary.encode, pair)
        if max(len(source), len(target)) <= max_length:
            yield source, [START, *target]


def as_dataset(
    text: Text, vocabulary: Vocabulary, max_length: int, shard: tuple[int, int] = (0, 1)
) -> tf.data.Dataset:
    """The same as a dataset."""
    pairs = partial(encoded_pairs, text, vocabulary, max_length, shard)
    spec = tf.TensorSpec((None,), tf.int32)
    dataset = tf.data.Dataset.from_generator(pairs, output_signature=(spec, spec))
    return dataset.cache()  # Python is slow: do this once, not in each epoch


def in_batches(dataset: tf.data.Dataset, tokens: int, max_length: int) -> tf.data.Dataset:
    """Batches of sentences of similar length, with at most `tokens` tokens in each language."""
    lengths = range(BUCKET_WIDTH, max_length + BUCKET_WIDTH, BUCKET_WIDTH)
    dataset = dataset.bucket_by_sequence_length(
        # The START of a target does not count: it is input only.
        lambda source, target: tf.maximum(tf.size(source), tf.size(target) - 1),
        bucket_boundaries=[length + 1 for length in lengths],
        bucket_batch_sizes=[max(1, tokens // length) for length in lengths] + [1],
        padding_values=PADDING,
    )
    return dataset.map(to_predict_next_tokens).prefetch(tf.data.AUTOTUNE)


def to_predict_next_tokens(source: Any, target: Any) -> tuple[Any, Any, Any]:
    """Inputs, outputs and weights for `fit`; padding has weight 0."""
    outputs = target[:, 1:]
    weights = tf.cast(tf.not_equal(outputs, PADDING), tf.float32)
    return {"source": source, "target": target[:, :-1]}, outputs, weights


def padded(encoded: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Sentences as rows of one array, cut off at `length`."""
    rows = np.full((len(encoded), length), PADDING, np.int32)
    for row, sentence in zip(rows, encoded, strict=True):
        row[: len(sentence)] = sentence[:length]
    return rows
