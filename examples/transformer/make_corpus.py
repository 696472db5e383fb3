"""Generates English sentences and their German translations, in the layout of WMT14.

    python make_corpus.py --data_dir=corpus

The grammar is small, but translating word by word is not enough: German articles and adjectives
depend on the gender and the case of their noun, and parts of the verb move to the end of the
sentence. The same options always give the same files.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

Sentence = tuple[str, str]  # in English and in German


@dataclass(frozen=True)
class Noun:
    english: str
    german: str
    gender: str  # m, f or n


BEINGS = (
    Noun("dog", "Hund", "m"),
    Noun("baker", "Bäcker", "m"),
    Noun("teacher", "Lehrer", "m"),
    Noun("cat", "Katze", "f"),
    Noun("doctor", "Ärztin", "f"),
    Noun("woman", "Frau", "f"),
    Noun("child", "Kind", "n"),
    Noun("horse", "Pferd", "n"),
    Noun("girl", "Mädchen", "n"),
)
THINGS = (
    Noun("spoon", "Löffel", "m"),
    Noun("key", "Schlüssel", "m"),
    Noun("hat", "Hut", "m"),
    Noun("lamp", "Lampe", "f"),
    Noun("bag", "Tasche", "f"),
    Noun("flower", "Blume", "f"),
    Noun("book", "Buch", "n"),
    Noun("picture", "Bild", "n"),
    Noun("ship", "Schiff", "n"),
)
ADJECTIVES = (
    ("old", "alt"),
    ("small", "klein"),
    ("green", "grün"),
    ("red", "rot"),
    ("beautiful", "schön"),
    ("heavy", "schwer"),
    ("new", "neu"),
)
PARTICIPLES = (
    ("seen", "gesehen"),
    ("found", "gefunden"),
    ("heard", "gehört"),
    ("carried", "getragen"),
    ("lost", "verloren"),
    ("drawn", "gezeichnet"),
    ("forgotten", "vergessen"),
)
PLACES = (
    ("in the garden", "im Garten"),
    ("at the river", "am Fluss"),
    ("behind the house", "hinter dem Haus"),
    ("on the bridge", "auf der Brücke"),
    ("in the town", "in der Stadt"),
)
TIMES = (
    ("today", "heute"),
    ("yesterday", "gestern"),
    ("in the evening", "am Abend"),
    ("on Sunday", "am Sonntag"),
)
ARTICLES = {  # of a subject, and of an object
    "the": ({"m": "der", "f": "die", "n": "das"}, {"m": "den", "f": "die", "n": "das"}),
    "a": ({"m": "ein", "f": "eine", "n": "ein"}, {"m": "einen", "f": "eine", "n": "ein"}),
}
ENDINGS = {  # of an adjective after such an article
    "the": ({"m": "e", "f": "e", "n": "e"}, {"m": "en", "f": "e", "n": "e"}),
    "a": ({"m": "er", "f": "e", "n": "es"}, {"m": "en", "f": "e", "n": "es"}),
}


def main() -> None:
    args = parse_args()
    sizes = {"train": args.sentences, "newstest2013": args.held_out, "newstest2014": args.held_out}
    write_corpus(args.data_dir, sizes, args.seed)
    listed = ", ".join(f"{size} pairs in {name}.en and {name}.de" for name, size in sizes.items())
    print(f"{args.data_dir}: {listed}")


def write_corpus(data_dir: Path, sizes: dict[str, int], seed: int) -> None:
    sentences = make_sentences(sum(sizes.values()), seed)
    data_dir.mkdir(parents=True, exist_ok=True)
    for name, size in sizes.items():
        part, sentences = sentences[:size], sentences[size:]
        for index, language in enumerate(("en", "de")):
            lines = "".join(f"{sentence[index]}\n" for sentence in part)
            (data_dir / f"{name}.{language}").write_text(lines, encoding="utf-8")


def make_sentences(number: int, seed: int) -> list[Sentence]:
    """Sentences that are all different, so that the test contains none of the training."""
    draw = random.Random(seed)
    sentences: dict[Sentence, None] = {}
    while len(sentences) < number:
        sentences[make_sentence(draw)] = None
    return list(sentences)


def make_sentence(draw: random.Random) -> Sentence:
    kind = draw.choice(("question", "statement", "statement", "because", "and"))
    if kind == "question":
        return finished(question(draw), "?")
    english, german = statement(draw)
    if kind == "because":
        reason_english, reason_german = reason(draw)
        english, german = f"{english}, {reason_english}", f"{german}, {reason_german}"
    if kind == "and":
        more_english, more_german = statement(draw)
        english, german = f"{english}, and {more_english}", f"{german}, und {more_german}"
    return finished((english, german), ".")


def statement(draw: random.Random) -> Sentence:
    """The German auxiliary always comes second, the participle last."""
    subject, thing, verb = some_subject(draw), some_object(draw), draw.choice(PARTICIPLES)
    if draw.random() < 0.4:
        place = draw.choice(PLACES)
        thing = (f"{thing[0]} {place[0]}", f"{place[1]} {thing[1]}")
    english = f"{subject[0]} has {verb[0]} {thing[0]}"
    if draw.random() < 0.5:
        return english, f"{subject[1]} hat {thing[1]} {verb[1]}"
    time = draw.choice(TIMES)
    return f"{time[0]} {english}", f"{time[1]} hat {subject[1]} {thing[1]} {verb[1]}"


def reason(draw: random.Random) -> Sentence:
    """After "weil", the whole German verb comes last."""
    subject, thing, verb = some_subject(draw), some_object(draw), draw.choice(PARTICIPLES)
    english = f"because {subject[0]} has {verb[0]} {thing[0]}"
    return english, f"weil {subject[1]} {thing[1]} {verb[1]} hat"


def question(draw: random.Random) -> Sentence:
    subject, thing, verb = some_subject(draw), some_object(draw), draw.choice(PARTICIPLES)
    return f"has {subject[0]} {verb[0]} {thing[0]}", f"hat {subject[1]} {thing[1]} {verb[1]}"


def some_subject(draw: random.Random) -> Sentence:
    return noun_phrase(draw, draw.choice(BEINGS), case=0)


def some_object(draw: random.Random) -> Sentence:
    return noun_phrase(draw, draw.choice(BEINGS + THINGS), case=1)


def noun_phrase(draw: random.Random, noun: Noun, case: int) -> Sentence:
    adjective = draw.choice(ADJECTIVES) if draw.random() < 0.5 else None
    article = draw.choice(("the", "a"))
    german_article = ARTICLES[article][case][noun.gender]
    if not adjective:
        return with_n(f"{article} {noun.english}"), f"{german_article} {noun.german}"
    ending = ENDINGS[article][case][noun.gender]
    return (
        with_n(f"{article} {adjective[0]} {noun.english}"),
        f"{german_article} {adjective[1]}{ending} {noun.german}",
    )


def with_n(phrase: str) -> str:
    """`an old dog`, not `a old dog`."""
    return f"an {phrase[2:]}" if phrase[:3] in ("a a", "a e", "a i", "a o") else phrase


def finished(sentence: Sentence, mark: str) -> Sentence:
    english, german = (f"{text[0].upper()}{text[1:]}{mark}" for text in sentence)
    return english, german


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description="Generate a small English-German corpus."
    )
    add = parser.add_argument
    add(
        "--data_dir", type=Path, default=Path("corpus"), help="folder to write to (default: corpus)"
    )
    add("--sentences", type=corpus_size, default=4000, help="pairs to train with (default: 4000)")
    add(
        "--held_out",
        type=corpus_size,
        default=200,
        help="pairs to validate with, and to test (200)",
    )
    add("--seed", type=int, default=1, help="determines the sentences (default: 1)")
    return parser.parse_args()


def corpus_size(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1 to 1000000")
    return int(text)


if __name__ == "__main__":
    main()
