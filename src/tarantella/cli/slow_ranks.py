"""Ranks that take longer than the others: all wait for the slowest one, which is worth a look.

What counts is a rank's own time: its input, its steps and its callbacks, but not waiting for
others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median_low

from tarantella.runtime.announce import MEASURED, Announcement
from tarantella.runtime.meter import CALLBACKS, COMPUTE, INPUT

_OWN = (INPUT, COMPUTE, CALLBACKS)
_SLOW = 0.2  # by how much of the median a rank is slower when it is worth a warning
_SHORTEST = 2.0  # seconds; what an epoch takes varies by less, from tracing and other programs

_IN_WORDS = {
    INPUT: "waiting for its data",
    COMPUTE: "in its steps",
    CALLBACKS: "in callbacks",
}

Parts = Mapping[str, float]  # seconds for each part of the time


@dataclass(frozen=True)
class Slowest:
    """The rank that needs the most time of its own.

    Attributes:
        rank: the rank
        part: what it takes longer for than the others, most of all
        seconds: how much longer than the median of the ranks
        ratio: the same, as a fraction of the median
    """

    rank: int
    part: str
    seconds: float
    ratio: float


def find_slowest(parts: Mapping[int, Parts]) -> Slowest | None:
    """The slowest of several ranks; None if there are no several, or they did nothing.

    Of an even number of ranks, the median is the lower one of the two in the middle: one of two
    ranks is compared with the other.

    Args:
        parts: what each rank did
    """
    own = {rank: sum(each[part] for part in _OWN) for rank, each in parts.items()}
    if len(own) < 2 or not (middle := median_low(own.values())):
        return None
    rank = max(own, key=lambda rank: own[rank])
    excess = {part: parts[rank][part] - _median(parts, part) for part in _OWN}
    part = max(excess, key=lambda part: excess[part])
    return Slowest(rank, part, own[rank] - middle, own[rank] / middle - 1)


def in_words(part: str) -> str:
    """What a rank does in a part of its time."""
    return _IN_WORDS[part]


def _median(parts: Mapping[int, Parts], part: str) -> float:
    return median_low(each[part] for each in parts.values())


class SlowRanks:
    """Warns of ranks that are slow for a whole epoch, once for each rank and part.

    Args:
        hosts: the host of each rank
        warn: shows a warning
    """

    def __init__(self, hosts: Mapping[int, str], warn: Callable[[str], None]) -> None:
        self._hosts = hosts
        self._warn = warn
        self._before = dict.fromkeys(hosts, dict.fromkeys(_OWN, 0.0))
        self._epochs: dict[int, dict[int, dict[str, float]]] = {}  # parts by epoch and rank
        self._warned: set[tuple[int, str]] = set()

    def hear(self, news: Announcement) -> None:
        """A rank announces something."""
        epoch = news.data.get("epoch") if news.kind == MEASURED else None
        if epoch is None:
            return
        heard = self._epochs.setdefault(epoch, {})
        heard[news.rank] = {part: float(news.data["parts"][part]) for part in _OWN}
        if heard.keys() == self._hosts.keys():
            # What was lost of an earlier epoch counts for this one.
            self._epochs = {number: some for number, some in self._epochs.items() if number > epoch}
            self._judge(heard)

    def _judge(self, totals: dict[int, dict[str, float]]) -> None:
        parts = {
            rank: {part: each[part] - self._before[rank][part] for part in _OWN}
            for rank, each in totals.items()
        }
        self._before = totals
        slowest = find_slowest(parts)
        if slowest is None or slowest.ratio < _SLOW or slowest.seconds < _SHORTEST:
            return
        if (slowest.rank, slowest.part) in self._warned:
            return
        self._warned.add((slowest.rank, slowest.part))
        self._warn(
            f"Rank {slowest.rank} on host {self._hosts[slowest.rank]} is slow, and the others wait "
            f"for it: in the last epoch it took {slowest.seconds:.1f} seconds "
            f"({slowest.ratio:.0%}) longer than the median of the ranks, mostly "
            f"{in_words(slowest.part)}."
        )
