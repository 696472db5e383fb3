"""A vocabulary of subwords, learned from text.

Frequent words become one piece; rare ones consist of several, down to single letters. So a small
vocabulary covers almost all words. A space belongs to the word after it, so joining the pieces
gives the text again.

Pieces are learned by byte-pair encoding (Sennrich et al., 2016): starting from letters, the most
frequent pair of neighbours is merged into a new piece, again and again.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

PADDING, START, END, UNKNOWN = range(4)
SPECIAL = 4  # smaller numbers are not pieces

WORD = re.compile(r" ?\w+| ?[^\w\s]")  # punctuation is separate
Pair = tuple[str, str]


class Vocabulary:
    """Turns text into numbers, and back."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = list(pieces)
        self._numbers = {piece: number for number, piece in enumerate(self.pieces, SPECIAL)}
        self._longest = max(map(len, self.pieces))
        self._known_words: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return SPECIAL + len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """The numbers of the pieces of a text, followed by END."""
        return [number for word in words_of(text) for number in self._encode_word(word)] + [END]

    def decode(self, numbers: Iterable[int]) -> str:
        """The text of the numbers up to END."""
        pieces = []
        for number in numbers:
            if number == END:
                break
            pieces.append(self.pieces[number - SPECIAL] if number >= SPECIAL else "")
        return "".join(pieces).strip()

    def _encode_word(self, word: str) -> list[int]:
        if word not in self._known_words:
            self._known_words[word] = list(self._pieces_of(word))
        return self._known_words[word]

    def _pieces_of(self, word: str) -> Iterator[int]:
        """The longest piece that the word begins with, then the same for the rest of it."""
        while word:
            starts = (word[:length] for length in range(min(self._longest, len(word)), 0, -1))
            piece = next((start for start in starts if start in self._numbers), word[0])
            yield self._numbers.get(piece, UNKNOWN)
            word = word[len(piece) :]

    def save(self, path: Path) -> None:
        path.write_text(self.to_json() + "\n", encoding="utf-8")

    def to_json(self) -> str:
        return json.dumps(self.pieces, ensure_ascii=False, indent=0)

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        pieces = json.loads(text)
        if not isinstance(pieces, list) or not pieces or not all(map(is_text, pieces)):
            raise ValueError("not a JSON list of subwords")
        return cls(pieces)


def is_text(piece: object) -> bool:
    return isinstance(piece, str) and piece != ""


def learn(lines: Iterable[str], size: int) -> Vocabulary:
    """Learns a vocabulary of at most `size` numbers from these lines.

    It contains all letters, even if there are more of them than `size`.
    """
    counts = Counter(word for line in lines for word in words_of(line))
    words = {word: list(word) for word in counts}
    pieces = sorted({letter for word in words for letter in word})
    pairs: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[str]] = defaultdict(set)
    for word in words:
        count_pairs(word, words[word], counts[word], pairs, places)
    while len(pieces) < size - SPECIAL and pairs:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        if pairs[best] < 2:
            break
        pieces.append("".join(best))
        for word in places.pop(best):
            count_pairs(word, words[word], -counts[word], pairs, places)
            words[word] = joined(words[word], best)
            count_pairs(word, words[word], counts[word], pairs, places)
        del pairs[best]
    return Vocabulary(list(dict.fromkeys(pieces)))


def count_pairs(
    word: str,
    pieces: list[str],
    count: int,
    pairs: Counter[Pair],
    places: defaultdict[Pair, set[str]],
) -> None:
    """Adds the pairs of neighbours in one word to `pairs`, or removes them."""
    for pair in pairwise(pieces):
        pairs[pair] += count
        places[pair].add(word)


def joined(pieces: list[str], pair: Pair) -> list[str]:
    result: list[str] = []
    for piece in pieces:
        if result and (result[-1], piece) == pair:
            result[-1] += piece
        else:
            result.append(piece)
    return result


def words_of(text: str) -> list[str]:
    return WORD.findall(" " + " ".join(text.split()))
