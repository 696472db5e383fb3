"""What a run has shown of itself: gathered from what its ranks announce, for summary and report.

The command has one record of a run, which continues when the run is restarted. Its size stays
bounded, however long the run is: where there is too much of one kind, neighbours are merged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Generic, TypeVar

from tarantella.runtime.announce import DESCRIBED, EPOCH, MEASURED, WARNED, Announcement
from tarantella.runtime.meter import CALLBACKS as CALLBACKS
from tarantella.runtime.meter import COMPUTE as COMPUTE
from tarantella.runtime.meter import EVALUATION as EVALUATION
from tarantella.runtime.meter import INPUT as INPUT
from tarantella.runtime.meter import PARTS as PARTS
from tarantella.runtime.meter import SUMS as SUMS

WARNING = "warning"
STALL = "stall"
RESTART = "restart"
FAILURE = "failure"

# A report shows no more than this, and a browser draws it without effort.
_MOST_SPANS = 20_000  # of all ranks
_MOST_SPANS_OF_RANK = 1000
_FEWEST_SPANS_OF_RANK = 60
_MOST_EPOCHS = 2000
_MOST_EVENTS = 500

_TOTALS = ("seconds", "steps", "samples", "memory", "gpu_memory", "cpu_seconds")

Item = TypeVar("Item")


@dataclass(frozen=True)
class Span:
    """What a rank did in a span of time.

    Attributes:
        rank: the rank
        time: when the span ended, in seconds since 1970 by the command's clock
        seconds: how long it was
        steps: the training steps that were taken
        samples: the samples of this rank in them; 0 if that is not known
        parts: seconds for each of `PARTS`
        memory: the most resident memory so far, in bytes
        gpu_memory: the most GPU memory so far, in bytes; None without a GPU
        cpu_seconds: the CPU time that the rank's process used
    """

    rank: int
    time: float
    seconds: float
    steps: int
    samples: int
    parts: Mapping[str, float]
    memory: int
    gpu_memory: int | None
    cpu_seconds: float

    def followed_by(self, later: Span) -> Span:
        """This span and the next one, as one."""
        return replace(
            later,
            seconds=self.seconds + later.seconds,
            steps=self.steps + later.steps,
            samples=self.samples + later.samples,
            parts={part: self.parts[part] + later.parts[part] for part in PARTS},
            memory=max(self.memory, later.memory),
            gpu_memory=_most(self.gpu_memory, later.gpu_memory),
            cpu_seconds=self.cpu_seconds + later.cpu_seconds,
        )

    @property
    def training_seconds(self) -> float:
        """The seconds spent in `fit`, without evaluation."""
        return sum(self.parts.values()) - self.parts[EVALUATION]


@dataclass(frozen=True)
class Training:
    """What all ranks of a run have trained together.

    Attributes:
        steps: the steps that they have taken
        samples: the samples in them; 0 if that is not known
        seconds: how long they trained
    """

    steps: int
    samples: int
    seconds: float

    @property
    def steps_per_second(self) -> float:
        return self.steps / max(self.seconds, 1e-9)

    @property
    def samples_per_second(self) -> float:
        return self.samples / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Epoch:
    """An epoch that has ended.

    Attributes:
        time: when it ended, in seconds since 1970
        fit: which `fit` of the run it belongs to, from 1; a restart continues to count
        number: its number in that `fit`, from 1
        epochs: how many epochs the `fit` has in all
        steps: how many steps it had
        seconds: how long it took, validation included
        logs: its logs
    """

    time: float
    fit: int
    number: int
    epochs: int
    steps: int
    seconds: float
    logs: Mapping[str, float]


@dataclass(frozen=True)
class Event:
    """Something that happened once.

    Attributes:
        time: when, in seconds since 1970
        kind: `WARNING`, `STALL`, `RESTART` or `FAILURE`
        text: what, in words
    """

    time: float
    kind: str
    text: str


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run, or of what was restarted; everything by rank.

    Attributes:
        hosts: their hosts
        devices: what they compute on: "CPU", or a GPU with its number and name
        cores: how many cores each has; empty if they share cores
    """

    hosts: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()


class Thinned(Generic[Item]):
    """A sequence of at most `most` items: when there are more, each stands for twice as many.

    Args:
        most: how many items to keep, an even number
        merge: makes one item of two neighbours
    """

    def __init__(self, most: int, merge: Callable[[Item, Item], Item]) -> None:
        self._most = most
        self._merge = merge
        self._items: list[Item] = []
        self._stands_for = 1  # how many of those added become one
        self._in_last = 0

    def add(self, item: Item) -> None:
        if self._items and self._in_last < self._stands_for:
            self._items[-1] = self._merge(self._items[-1], item)
            self._in_last += 1
            return
        if len(self._items) == self._most:
            pairs = zip(self._items[::2], self._items[1::2], strict=True)
            self._items = [self._merge(first, second) for first, second in pairs]
            self._stands_for *= 2
        self._items.append(item)
        self._in_last = 1

    def items(self) -> tuple[Item, ...]:
        return tuple(self._items)


@dataclass
class RunRecord:
    """Everything that is known about a run.

    Attributes:
        script: the script and its arguments
        options: the command line, without the name of the command
        ranks: the ranks, now
        versions: of Tarantella, Python, TensorFlow, Keras and MPI, by these names; empty until the
            master rank has told
        engine: what sums over the ranks, in words; empty until it is known
        unseen: the parts that are counted as computing, as they cannot be told apart from it: sums
            on GPUs, input on a single rank
        started: when the run began, in seconds since 1970
        ended: when it ended; None while it goes on
        restarts: how often it was restarted
        failure: why it failed; empty if it did not
        files: the files that it writes, and the option that asks for each
        function: the name of the function that `tnt.run` runs; empty for a script
    """

    script: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    ranks: Ranks = Ranks()
    versions: dict[str, str] = field(default_factory=dict)
    engine: str = ""
    unseen: frozenset[str] = frozenset()
    started: float = field(default_factory=time.time)
    ended: float | None = None
    restarts: int = 0
    failure: str = ""
    files: dict[str, str] = field(default_factory=dict)
    function: str = ""

    def __post_init__(self) -> None:
        self._spans: dict[int, Thinned[Span]] = {}
        self._totals: dict[int, Span] = {}  # what each rank has announced last
        self._epochs: Thinned[Epoch] = Thinned(_MOST_EPOCHS, lambda _, later: later)
        self._events: list[Event] = []
        self._fits_before = self._fits = 0

    def spans(self, rank: int) -> tuple[Span, ...]:
        """What a rank did, in order of time."""
        return self._spans[rank].items() if rank in self._spans else ()

    def measured_ranks(self) -> tuple[int, ...]:
        """The ranks that have told what they did; a run may be restarted with fewer."""
        return tuple(sorted(rank for rank in self._spans if rank < len(self.ranks.hosts)))

    def totals(self) -> dict[int, Span]:
        """What each of these ranks did in all."""
        return {rank: reduce(Span.followed_by, self.spans(rank)) for rank in self.measured_ranks()}

    def training(self) -> Training | None:
        """How the ranks have trained; None if they have not."""
        trained = [total for total in self.totals().values() if total.steps]
        if not trained:
            return None
        return Training(
            steps=max(each.steps for each in trained),
            samples=sum(each.samples for each in trained),
            seconds=max(each.training_seconds for each in trained),
        )

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        return self._epochs.items()

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(self._events)

    def begin(self, ranks: Ranks) -> None:
        """The ranks are started, or started again."""
        self.ranks = ranks
        self._totals.clear()
        self._fits_before = self._fits

    def end(self, failure: str = "") -> None:
        """The run has ended."""
        self.ended = time.time()
        self.failure = failure
        if failure:
            self.note(FAILURE, failure)

    def note_restart(self, failure: str) -> None:
        """The run has failed and is started again."""
        self.restarts += 1
        self.note(RESTART, failure)

    def note(self, kind: str, text: str) -> None:
        """Something has happened; of too many events, the first and the last ones are kept."""
        self._events.append(Event(time.time(), kind, text))
        if len(self._events) > _MOST_EVENTS:
            del self._events[_MOST_EVENTS // 2]

    def hear(self, news: Announcement) -> None:
        """A rank announces something."""
        if news.kind == DESCRIBED:
            self.versions |= news.data.get("versions", {})
            self.engine = news.data.get("engine", self.engine)
            self.unseen |= set(news.data.get("unseen", ()))
        elif news.kind == MEASURED:
            self._hear_totals(news.rank, news.data)
        elif news.kind == EPOCH:
            self._hear_epoch(news.data)
        elif news.kind == WARNED:
            self.note(WARNING, f"rank {news.rank} on host {news.host}: {news.cause}")

    def _hear_totals(self, rank: int, data: Mapping[str, Any]) -> None:
        now = _span(rank, data)
        span, self._totals[rank] = _difference(now, self._totals.get(rank)), now
        if rank not in self._spans:
            even = _MOST_SPANS // max(len(self.ranks.hosts), 1) // 2 * 2
            most = max(_FEWEST_SPANS_OF_RANK, min(_MOST_SPANS_OF_RANK, even))
            self._spans[rank] = Thinned(most, Span.followed_by)
        self._spans[rank].add(span)

    def _hear_epoch(self, data: Mapping[str, Any]) -> None:
        epoch = Epoch(time.time(), **data)
        self._fits = self._fits_before + epoch.fit
        self._epochs.add(replace(epoch, fit=self._fits))


def _most(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _span(rank: int, data: Mapping[str, Any]) -> Span:
    parts = {part: float(data["parts"].get(part, 0.0)) for part in PARTS}
    others = {name: data[name] for name in _TOTALS}
    return Span(rank, time.time(), parts=parts, **others)


def _difference(now: Span, before: Span | None) -> Span:
    """What has come since a rank's last announcement of its totals."""
    if before is None:
        return now
    return replace(
        now,
        seconds=now.seconds - before.seconds,
        steps=now.steps - before.steps,
        samples=now.samples - before.samples,
        parts={part: now.parts[part] - before.parts[part] for part in PARTS},
        cpu_seconds=now.cpu_seconds - before.cpu_seconds,
    )
