"""What ranks have measured, as numbers over time that figures can draw.

Ranks measure at times of their own. To add up their numbers and to compare them, the time of the
run is divided into intervals, and what a rank did in a span counts for each interval by how much
of the span is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from tarantella.cli.run_record import RunRecord, Span
from tarantella.runtime.meter import SUMS

_MOST_INTERVALS = 240  # about as many as a phone has room for
# Up to this many ranks, a figure has a line for each.
_MOST_LINES = 4

Values = list[float | None]


@dataclass
class Interval:
    """What a rank did in an interval of time; `Span` explains each number."""

    seconds: float = 0.0
    training: float = 0.0
    waiting: float = 0.0
    steps: float = 0.0
    samples: float = 0.0
    cpu: float = 0.0
    memory: int | None = None
    gpu_memory: int | None = None

    def add(self, span: Span, share: float) -> None:
        """Count a share of a span."""
        self.seconds += share * span.seconds
        self.training += share * span.training_seconds
        self.waiting += share * span.parts[SUMS]
        self.steps += share * span.steps
        self.samples += share * span.samples
        self.cpu += share * span.cpu_seconds
        self.memory = max(self.memory or 0, span.memory)
        if span.gpu_memory is not None:
            self.gpu_memory = max(self.gpu_memory or 0, span.gpu_memory)


@dataclass(frozen=True)
class Course:
    """What the ranks did in the course of the run.

    Attributes:
        times: the middle of each interval, in seconds since the start
        ranks: the intervals of each rank
    """

    times: tuple[float, ...]
    ranks: dict[int, tuple[Interval, ...]]

    def of_each(self, value: Callable[[Interval], float | None]) -> dict[int, Values]:
        """A value of each rank, in each interval."""
        return {rank: list(map(value, all_)) for rank, all_ in self.ranks.items()}


@dataclass(frozen=True)
class Line:
    """A line of a figure; or a band, between this line and another."""

    name: str
    values: Values
    band_to: Values | None = None


def course(record: RunRecord) -> Course:
    """What all ranks did, in as many intervals as there is something to show in."""
    spans = {rank: record.spans(rank) for rank in record.measured_ranks()}
    if not spans:
        return Course((), {})
    last = max(all_[-1].time for all_ in spans.values()) - record.started
    busiest = max(len(all_) for all_ in spans.values())
    steps = max(sum(span.steps for span in all_) for all_ in spans.values())
    # A step that takes longer than an interval would leave gaps.
    number = max(1, min(_MOST_INTERVALS, busiest, steps or busiest))
    width = max(last / number, 1e-3)
    ranks = {rank: _intervals(all_, record.started, width, number) for rank, all_ in spans.items()}
    return Course(tuple(width * (index + 0.5) for index in range(number)), ranks)


def _intervals(
    spans: Sequence[Span], start: float, width: float, number: int
) -> tuple[Interval, ...]:
    intervals = tuple(Interval() for _ in range(number))
    for span in spans:
        end = span.time - start
        begin = end - span.seconds
        first = min(max(int(begin / width), 0), number - 1)
        last = min(max(int(end / width), first), number - 1)
        for index in range(first, last + 1):
            # What lies before the first interval or after the last one is counted there.
            left = begin if index == first else index * width
            right = end if index == last else (index + 1) * width
            intervals[index].add(span, (right - left) / span.seconds if span.seconds > 0 else 1.0)
    return intervals


def own_step_time(interval: Interval) -> float | None:
    """Milliseconds for a step, without waiting for other ranks."""
    return _ratio(1000 * (interval.training - interval.waiting), interval.steps)


def busy_cores(interval: Interval) -> float | None:
    """How many cores a rank keeps busy."""
    return _ratio(interval.cpu, interval.seconds)


def throughput(run: Course) -> Values:
    """Samples that all ranks train on in a second, in each interval."""
    return [
        sum(rates)
        if (rates := [_ratio(each.samples, each.training) or 0.0 for each in all_ if each.steps])
        else None
        for all_ in zip(*run.ranks.values(), strict=True)
    ]


def step_time(run: Course) -> Values:
    """Milliseconds for a step, in each interval; the ranks take their steps together."""
    return [
        _ratio(1000 * sum(each.training for each in all_), sum(each.steps for each in all_))
        for all_ in zip(*run.ranks.values(), strict=True)
    ]


def lines(values: dict[int, Values], extreme: str) -> list[Line]:
    """Lines to draw: one for each rank, if they are few; otherwise those that tell most.

    Args:
        values: the values of each rank
        extreme: what to call the rank with the highest values, as in "slowest"
    """
    if len(values) <= _MOST_LINES:
        return [Line(f"rank {rank}", each) for rank, each in values.items()]
    known = [
        [value for value in each if value is not None]
        for each in zip(*values.values(), strict=True)
    ]
    highest = max(values, key=lambda rank: _mean(values[rank]))
    lowest_values: Values = [min(each, default=None) for each in known]
    highest_values: Values = [max(each, default=None) for each in known]
    return [
        Line("all ranks", lowest_values, band_to=highest_values),
        Line("median", [median(each) if each else None for each in known]),
        Line(f"{extreme}: rank {highest}", values[highest]),
    ]


def _mean(values: Values) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def _ratio(amount: float, count: float) -> float | None:
    return amount / count if count > 0 else None
