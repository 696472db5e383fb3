"""Translates its input, one sentence per line, with a model saved by `train_translation.py`.

    python translate.py --model_dir=model < corpus/newstest2014.en > translated.de

It does not need Tarantella: the saved model is a plain Keras model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import keras
import scores  # noqa: F401, the loss and the metrics that the model was compiled with
from batches import padded
from subwords import Vocabulary
from transformer import Translator


def main() -> None:
    args = parse_args()
    text = (args.model_dir / "vocabulary.json").read_text(encoding="utf-8")
    model = keras.saving.load_model(args.model_dir / "transformer.keras")
    translator = Translator(model, args.max_length)
    lines = sys.stdin.buffer.read().decode("utf-8").splitlines()
    translated = translations(translator, Vocabulary.from_json(text), lines)
    sys.stdout.buffer.write("".join(f"{line}\n" for line in translated).encode("utf-8"))


def translations(translator: Translator, vocabulary: Vocabulary, lines: Sequence[str]) -> list[str]:
    """The translated lines; lines that are too long for the translator are cut off."""
    encoded = [vocabulary.encode(line) for line in lines]
    sources = padded(encoded, min(translator.max_length, max(map(len, encoded))))
    tokens = translator.predict(sources, verbose=0)
    return [vocabulary.decode(sentence) for sentence in tokens]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] < TEXT", description="Translate with a trained Transformer."
    )
    add = parser.add_argument
    add(
        "--model_dir", type=Path, default=Path("model"), help="folder of the model (default: model)"
    )
    add("--max_length", type=int, default=40, help="most tokens in a sentence (default: 40)")
    args = parser.parse_args()
    if args.max_length < 1:
        sys.exit(f"translate.py: --max_length {args.max_length}: it must be at least 1")
    for name in ("transformer.keras", "vocabulary.json"):
        if not (args.model_dir / name).is_file():
            sys.exit(f"translate.py: --model_dir {args.model_dir}: there is no {name} in it")
    return args


if __name__ == "__main__":
    main()
