"""The summary at the end of a run: how fast it was, where the time went, what was written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from tarantella.cli.run_record import RunRecord, Span
from tarantella.cli.slow_ranks import Slowest, find_slowest, in_words
from tarantella.runtime import times
from tarantella.runtime.meter import COMPUTE, INPUT, PARTS, SUMS
from tarantella.runtime.words import count, duration, memory, rate

_MOST_ROWS = 8  # of single ranks; more are shown as the least, the median and the most of them
_OTHER = "other"  # imports, and what the script does outside of `fit`
_WORTH_A_COLUMN = 0.005  # of the time
# Differences below these, of the median and in seconds, come and go.
_SLOWER = 0.05
_WORTH_A_LINE = 2.0

Column = tuple[str, Callable[[Span], float], Callable[[float], str]]


def summary(record: RunRecord) -> str:
    """The summary of a run that has ended; empty if there is nothing to tell.

    A run that has failed, or was interrupted, gets a short one: what ended it counts more.
    """
    ranks = record.totals()
    lines: list[str] = []
    if ranks:
        lines.append(_headline(record, len(ranks)))
    if ranks and not record.failure:
        lines += _table(record, ranks)
        lines += _slowest(record, ranks)
    written = [
        f"{path} ({option})"
        for option, path in record.files.items()
        if _was_written(Path(path), record.started)
    ]
    if written:
        lines.append(f"written: {', '.join(written)}")
    return "\n".join(lines[:1] + [f"  {line}" for line in lines[1:]])


def samples_per_second(span: Span) -> float:
    """This rank's samples in a second of training; 0 if they are not known."""
    return span.samples / span.training_seconds if span.training_seconds > 0 else 0.0


def _headline(record: RunRecord, ranks: int) -> str:
    began, ended = record.started, record.ended or record.started
    restarts = f" and {count(record.restarts, 'restart')}" if record.restarts else ""
    took = f"the run took {duration(ended - began)}{restarts}"
    training = record.training()
    if training is None:
        return f"{took}."
    trained = f"{count(training.steps, 'step')} in {duration(training.seconds)} of training"
    if not training.samples:
        return f"{took}: {trained}, {rate(training.steps_per_second)} steps/s."
    speed = rate(training.samples_per_second)
    return f"{took}: {trained}, {speed} samples/s on {count(ranks, 'rank')}."


def _table(record: RunRecord, ranks: Mapping[int, Span]) -> list[str]:
    spans = list(ranks.values())
    columns = _columns(record, spans)
    values = [[value(span) for _, value, _ in columns] for span in spans]
    if len(spans) > _MOST_ROWS:
        names = [["ranks"], ["min"], ["median"], ["max"]]
        by_column = list(zip(*values, strict=True))
        values = [list(map(pick, by_column)) for pick in (min, median, max)]
    else:
        hosts = record.ranks.hosts
        shows_hosts = len(set(hosts)) > 1
        names = [["rank", "host"] if shows_hosts else ["rank"]]
        names += [[str(rank), hosts[rank]] if shows_hosts else [str(rank)] for rank in ranks]
    rows = [
        [*name, *(text(number) for number, (_, _, text) in zip(numbers, columns, strict=True))]
        for name, numbers in zip(names[1:], values, strict=True)
    ]
    return _aligned([[*names[0], *(title for title, _, _ in columns)], *rows])


def _columns(record: RunRecord, spans: Sequence[Span]) -> list[Column]:
    """The columns that have something to show."""
    unseen = record.unseen
    columns: list[Column] = []
    if any(span.samples for span in spans):
        columns.append(("samples/s", samples_per_second, rate))
    titles = {part: part for part in PARTS} | {
        COMPUTE: "+".join([COMPUTE, *sorted(unseen)]),
        SUMS: "waits" if SUMS in unseen else SUMS,
    }
    always = {INPUT, COMPUTE, SUMS} if len(spans) > 1 else {COMPUTE}
    for part in (*PARTS, _OTHER):
        share = _share_of(part)
        if part in always or max(map(share, spans)) >= _WORTH_A_COLUMN:
            columns.append((titles.get(part, part), share, "{:.0%}".format))
    columns.append(("memory", lambda span: span.memory, memory))
    if any(span.gpu_memory is not None for span in spans):
        columns.append(("GPU memory", lambda span: span.gpu_memory or 0, memory))
    return columns


def _share_of(part: str) -> Callable[[Span], float]:
    """What fraction of its time a rank spends in a part."""

    def share(span: Span) -> float:
        other = max(span.seconds - sum(span.parts.values()), 0.0)
        seconds = other if part == _OTHER else span.parts[part]
        return seconds / span.seconds if span.seconds > 0 else 0.0

    return share


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _slowest(record: RunRecord, ranks: Mapping[int, Span]) -> list[str]:
    found: Slowest | None = find_slowest({rank: span.parts for rank, span in ranks.items()})
    if found is None or not any(span.steps for span in ranks.values()):
        return []
    if found.ratio < _SLOWER or found.seconds < _WORTH_A_LINE:
        return []
    who = f"rank {found.rank} on host {record.ranks.hosts[found.rank]}"
    slower = f"{found.ratio:.0%} ({duration(found.seconds)}) slower than the median"
    return [f"slowest: {who}, {slower}, mostly {in_words(found.part)}."]


def _was_written(path: Path, since: float) -> bool:
    """Whether there is a folder, or a file that is not left from an earlier run."""
    if path.is_dir():
        return True
    try:
        return path.stat().st_mtime >= since - times.CLOCK_ERROR_OF_FILES
    except OSError:
        return False
