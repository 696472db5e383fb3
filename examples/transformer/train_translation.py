"""A Transformer learns to translate, on as many ranks as you like.

    python make_corpus.py --data_dir=corpus
    tarantella -n 2 --no-gpu -- train_translation.py --data_dir=corpus --model_dir=model

The model is trained as a `tnt.Model`. Only the master rank translates sentences, with a plain
Keras model that has the same layers.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import keras
import tensorflow as tf
from batches import Text, as_dataset, encoded_pairs, in_batches
from sacrebleu import corpus_bleu
from scores import Perplexity, SmoothedCrossentropy, TokenAccuracy, WarmUp
from subwords import Vocabulary, learn
from transformer import SIZES, Translator, transformer
from translate import translations

import tarantella as tnt

SAMPLE = 50  # sentences to translate after each epoch


def main() -> None:
    args = parse_args()
    # The number of batches is known only after the first epoch, and Keras warns about that.
    warnings.filterwarnings("ignore", message="Your input ran out of data")
    keras.utils.set_random_seed(args.seed)
    train, validation, test = find_texts(args)
    vocabulary = agree_on_vocabulary(args, train)

    plain_model = transformer(SIZES[args.model_size], len(vocabulary), args.dropout)
    translator = Translator(plain_model, args.max_length)
    model = tnt.Model(plain_model)
    model.compile(
        optimizer=keras.optimizers.Adam(
            WarmUp(args.learning_rate, args.warmup_steps), beta_2=0.98, epsilon=1e-9
        ),
        loss=SmoothedCrossentropy(),
        weighted_metrics=[TokenAccuracy(), Perplexity()],
    )

    manual = args.shards == "manual"
    train_dataset = make_dataset(args, train, vocabulary, shuffled=True)
    validation_dataset = make_dataset(args, validation, vocabulary)
    score = ScoreTranslations(translator, vocabulary, validation)
    model.fit(
        train_dataset,
        validation_data=validation_dataset,
        tnt_distribute_dataset=not manual,
        tnt_distribute_validation_dataset=not manual,
        epochs=args.train_epochs,
        callbacks=[tnt.keras.callbacks.Callback(score, run_on_all_ranks=False)],
        verbose=args.verbose,
    )

    test_dataset = make_dataset(args, test, vocabulary)
    results = model.evaluate(
        test_dataset, tnt_distribute_dataset=not manual, return_dict=True, verbose=0
    )
    say("test " + ", ".join(f"{name}: {value:.4f}" for name, value in results.items()))
    if args.model_dir:
        model.save(args.model_dir / "transformer.keras")
    if tnt.is_master_rank():
        say(f"test BLEU: {bleu(translator, vocabulary, test):.1f}")


def make_dataset(
    args: argparse.Namespace, text: Text, vocabulary: Vocabulary, shuffled: bool = False
) -> tf.data.Dataset:
    """This rank's batches with manual shards, otherwise the global ones, for Tarantella to split.

    With manual shards, a rank has 1/n of the sentences, and batches of 1/n of the tokens.
    """
    number = tnt.get_size() if args.shards == "manual" else 1
    index = tnt.get_rank() if args.shards == "manual" else 0
    if next(encoded_pairs(text, vocabulary, args.max_length), None) is None:
        fail(f"--max_length {args.max_length}: all sentences of {text.source} are longer")
    dataset = as_dataset(text, vocabulary, args.max_length, shard=(index, number))
    if shuffled:
        dataset = dataset.shuffle(args.shuffle_buffer, seed=args.seed)
    return in_batches(dataset, args.tokens_per_batch // number, args.max_length)


def agree_on_vocabulary(args: argparse.Namespace, train: Text) -> Vocabulary:
    """The master rank learns or reads the vocabulary, and broadcasts it."""
    pieces = ""
    if tnt.is_master_rank():
        vocabulary = read_vocabulary(args) if args.vocabulary else learn_vocabulary(args, train)
        if args.model_dir:
            args.model_dir.mkdir(parents=True, exist_ok=True)
            vocabulary.save(args.model_dir / "vocabulary.json")
        pieces = vocabulary.to_json()
    vocabulary = Vocabulary.from_json(tnt.broadcast(pieces))
    say(f"vocabulary: {len(vocabulary)} subwords")
    return vocabulary


def learn_vocabulary(args: argparse.Namespace, train: Text) -> Vocabulary:
    return learn(chain.from_iterable(train.pairs()), args.vocabulary_size)


def read_vocabulary(args: argparse.Namespace) -> Vocabulary:
    try:
        return Vocabulary.from_json(args.vocabulary.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(f"--vocabulary {args.vocabulary}: {error}")


class ScoreTranslations(keras.callbacks.Callback):
    """Translates some sentences after each epoch, and prints their BLEU score."""

    def __init__(self, translator: Translator, vocabulary: Vocabulary, text: Text) -> None:
        super().__init__()
        self.translator = translator
        self.vocabulary = vocabulary
        self.text = text

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        score = bleu(self.translator, self.vocabulary, self.text, SAMPLE)
        say(f"BLEU after epoch {epoch + 1}: {score:.1f}")


def bleu(
    translator: Translator, vocabulary: Vocabulary, text: Text, number: int | None = None
) -> float:
    """The BLEU score of translations of the first sentences of the text."""
    sources, references = zip(*list(text.pairs())[:number], strict=True)
    translated = translations(translator, vocabulary, sources)
    return corpus_bleu(translated, [[line.strip() for line in references]]).score


def find_texts(args: argparse.Namespace) -> list[Text]:
    languages = (args.source_language, args.target_language)
    texts = [
        Text.named(n, args.data_dir, languages) for n in (args.train, args.validation, args.test)
    ]
    for text in texts:
        problem = text.problem()
        if problem:
            fail(f"--data_dir {args.data_dir}: {problem}")
    return texts


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description="Train a Transformer to translate."
    )
    add = parser.add_argument
    add(
        "--data_dir",
        type=Path,
        default=Path("corpus"),
        help="folder with the text (default: corpus)",
    )
    add("--train", default="train", help="training text, without extension (default: train)")
    add("--validation", default="newstest2013", help="default: newstest2013")
    add("--test", default="newstest2014", help="default: newstest2014")
    add("--source_language", default="en", help="extension of the source files (default: en)")
    add("--target_language", default="de", help="extension of the translations (default: de)")
    add("--model_dir", type=Path, help="where to save model and vocabulary (default: nowhere)")
    add("--model_size", choices=SIZES, default="tiny", help="default: tiny")
    add("--tokens_per_batch", type=at_least(1), default=1024, help="of all ranks (default: 1024)")
    add("--train_epochs", type=at_least(1), default=3, help="default: 3")
    add(
        "--max_length", type=at_least(1), default=40, help="most tokens in a sentence (default: 40)"
    )
    add("--vocabulary_size", type=at_least(1), default=400, help="most subwords (default: 400)")
    add("--vocabulary", type=Path, help="file with a vocabulary (default: learned from the text)")
    add("--learning_rate", type=positive, default=0.004, help="its peak (default: 0.004)")
    add("--warmup_steps", type=at_least(1), default=100, help="steps to the peak (default: 100)")
    add("--dropout", type=fraction, default=0.0, help="default: 0")
    add("--shards", choices=("manual", "automatic"), default="manual", help="default: manual")
    add("--shuffle_buffer", type=at_least(1), default=100_000, help="pairs (default: 100000)")
    add("--seed", type=at_least(0), default=42, help="weights and order of pairs (default: 42)")
    add("--verbose", type=int, choices=(0, 1, 2), default=2, help="as in Keras (default: 2)")
    args = parser.parse_args()
    if args.tokens_per_batch < args.max_length * tnt.get_size():
        fail(
            f"--tokens_per_batch {args.tokens_per_batch}: {tnt.get_size()} ranks need "
            f"{args.max_length * tnt.get_size()} for a sentence of --max_length each"
        )
    return args


def at_least(smallest: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {smallest}")
        return int(text)

    return integer


def positive(text: str) -> float:
    number = as_number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def fraction(text: str) -> float:
    number = as_number(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return number


def as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def say(message: str) -> None:
    """Prints once, however many ranks there are."""
    if tnt.is_master_rank():
        print(message, flush=True)


def fail(message: str) -> NoReturn:
    sys.exit(f"train_translation.py: {message}")


if __name__ == "__main__":
    main()
