"""The figures of a report, as Plotly's JavaScript draws them: `data` and `layout`.

Colours and fonts come from the page, which has them for light and dark screens.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tarantella.cli.report import series
from tarantella.cli.report.series import Course, Line, Values
from tarantella.cli.run_record import FAILURE, RESTART, Epoch, RunRecord, Span
from tarantella.runtime.meter import CALLBACKS, COMPUTE, EVALUATION, INPUT, PARTS, SUMS
from tarantella.runtime.words import count

# What the parts of the time are called.
_PARTS = {
    INPUT: "input",
    COMPUTE: "compute",
    SUMS: "waiting for sums",
    CALLBACKS: "callbacks",
    EVALUATION: "evaluation",
}
_MOST_MARKED_FITS = 12
_FEW_POINTS = 30  # that few are marked, as one alone makes no line
# More bars than this stand side by side; fewer lie one below the other, with room for names.
_MOST_LYING_BARS = 12
_MB = 1_000_000
_BAND = "rgba(128,128,128,0.35)"


@dataclass(frozen=True)
class Figure:
    """A figure, with what the page writes above and below it.

    Attributes:
        title: what it shows
        data: the traces, for Plotly
        layout: the axes, for Plotly
        note: what a reader should know about it
        height: in pixels
    """

    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    note: str = ""
    height: int = 240

    @property
    def legend(self) -> dict[str, str]:
        """The names in the figure, and the colour of each for a style sheet; empty for only one."""
        names = {
            trace["name"]: trace.get("fillcolor", f"var(--c{index})")
            for index, trace in enumerate(self.data)
            if trace.get("visible", True)
        }
        return names if len(names) > 1 else {}


@dataclass(frozen=True)
class _Time:
    """The unit of a time axis."""

    name: str
    seconds: float

    @classmethod
    def for_length(cls, seconds: float) -> _Time:
        if seconds < 180:
            return cls("s", 1)
        return cls("min", 60) if seconds < 3 * 3600 else cls("h", 3600)


def metric_figures(epochs: Sequence[Epoch]) -> list[Figure]:
    """Loss and metrics over the epochs, the loss first; each with its value in validation."""
    names = dict.fromkeys(name for epoch in epochs for name in epoch.logs)
    own = [name for name in names if not (name.startswith("val_") and name[4:] in names)]
    own.sort(key=lambda name: name != "loss")
    return [_metric_figure(name, epochs) for name in own]


def _metric_figure(name: str, epochs: Sequence[Epoch]) -> Figure:
    places = _places(epochs)
    traces = []
    for key, label in ((name, "training"), (f"val_{name}", "validation")):
        if not any(key in epoch.logs for epoch in epochs):
            continue
        xs: Values = []
        ys: Values = []
        texts: list[str] = []
        for index, (place, epoch) in enumerate(zip(places, epochs, strict=True)):
            if index and epoch.fit != epochs[index - 1].fit:
                xs, ys, texts = [*xs, None], [*ys, None], [*texts, ""]  # a line for each fit
            if key in epoch.logs:
                xs.append(place)
                ys.append(epoch.logs[key])
                texts.append(f"fit {epoch.fit}, epoch {epoch.number}")
        traces.append(_trace(label, xs, ys) | {"text": texts, "connectgaps": False})
    starts = [
        (place - 0.5, f"fit {epoch.fit}", "left")
        for index, (place, epoch) in enumerate(zip(places, epochs, strict=True))
        if index and epoch.fit != epochs[index - 1].fit
    ]
    several = len({epoch.fit for epoch in epochs}) > 1
    axis: dict[str, Any] = {"title": _title("epoch, of all calls of fit" if several else "epoch")}
    if places[-1] - places[0] < 10:
        axis |= {"dtick": 1, "range": [places[0] - 0.5, places[-1] + 0.5]}
    broken = [epoch for epoch in epochs if not all(map(math.isfinite, _both(epoch.logs, name)))]
    constant = len({value for trace in traces for value in trace["y"] if value is not None}) < 2
    note = ""
    if broken:
        first = f"epoch {broken[0].number}" + (f" of fit {broken[0].fit}" if several else "")
        note = f"Not a finite number in {len(broken)} of {len(epochs)} epochs, first in {first}."
    return Figure(
        name,
        traces,
        _layout(axis, escape(name), starts if len(starts) <= _MOST_MARKED_FITS else (), constant),
        note,
    )


def _both(logs: Mapping[str, float], name: str) -> list[float]:
    return [logs[key] for key in (name, f"val_{name}") if key in logs]


def _places(epochs: Sequence[Epoch]) -> list[int]:
    """Where each epoch stands on the axis: those of the second fit follow those of the first."""
    places: list[int] = []
    for index, epoch in enumerate(epochs):
        if index == 0:
            places.append(epoch.number)
            continue
        before = epochs[index - 1]
        step = epoch.number - before.number if before.fit == epoch.fit else 1
        places.append(places[-1] + step)
    return places


def course_figures(record: RunRecord, run: Course) -> list[Figure]:
    """What the ranks did over time: throughput, step time, memory and CPU."""
    if not run.times:
        return []
    length = (record.ended or run.times[-1] + record.started) - record.started
    unit = _Time.for_length(length)
    marks = [
        ((event.time - record.started) / unit.seconds, event.kind, "right")
        for event in record.events
        if event.kind in (RESTART, FAILURE)
    ]
    axis = {"title": _title(f"time since the start ({unit.name})"), "rangemode": "tozero"}

    def figure(title: str, drawn: Iterable[Line], label: str, note: str = "") -> Figure:
        xs = [seconds / unit.seconds for seconds in run.times]
        traces = [
            _band(line, xs) if line.band_to else _trace(line.name, xs, line.values)
            for line in drawn
        ]
        return Figure(title, traces, _layout(axis, label, marks, zero=True), note)

    figures = []
    rates = series.throughput(run)
    if any(rates):
        figures.append(figure("Throughput", [Line("all ranks", rates)], "samples/s"))
    steps = series.step_time(run)
    if any(steps):
        figures.append(figure("Step time", [Line("all ranks", steps)], "ms per step"))
    if len(run.ranks) > 1 and SUMS not in record.unseen and any(steps):
        own = series.lines(run.of_each(series.own_step_time), "slowest")
        note = "Ranks take their steps together: the slowest one here keeps the others waiting."
        figures.append(
            figure("Step time without waiting for other ranks", own, "ms per step", note)
        )
    memory = run.of_each(lambda each: None if each.memory is None else each.memory / _MB)
    figures.append(figure("Peak memory so far", series.lines(memory, "most"), "MB"))
    on_gpu = run.of_each(lambda each: None if each.gpu_memory is None else each.gpu_memory / _MB)
    if _has_values(on_gpu):
        figures.append(figure("Peak GPU memory so far", series.lines(on_gpu, "most"), "MB"))
    busy = run.of_each(series.busy_cores)
    cores = set(record.ranks.cores)
    note = f"Each rank has {count(min(cores), 'core')}." if len(cores) == 1 else ""
    figures.append(figure("CPU use of a rank", series.lines(busy, "most"), "busy cores", note))
    return figures


def _has_values(values: Mapping[int, Values]) -> bool:
    return any(value is not None for each in values.values() for value in each)


def part_figures(totals: Mapping[int, Span], unseen: Collection[str]) -> list[Figure]:
    """Where the time went on each rank: that of a step, and all of it.

    Args:
        totals: what each rank did
        unseen: parts that cannot be told apart from computing
    """
    names = _PARTS | ({SUMS: "other waits"} if SUMS in unseen else {})
    hidden = " and ".join(_PARTS[part] for part in PARTS if part in unseen)
    note = f"Here, {hidden} cannot be told apart from compute." if hidden else ""
    figures = []
    trained = {rank: total for rank, total in totals.items() if total.steps}
    if trained:
        parts = {
            names[part]: [1000 * each.parts[part] / each.steps for each in trained.values()]
            for part in PARTS
            if part != EVALUATION
        }
        figures.append(_bars("The parts of a step", trained, parts, "ms per step", note))
    if totals:
        unit = _Time.for_length(max(total.seconds for total in totals.values()))
        parts = {
            names[part]: [each.parts[part] / unit.seconds for each in totals.values()]
            for part in PARTS
        }
        parts["other"] = [
            max(0.0, each.seconds - sum(each.parts.values())) / unit.seconds
            for each in totals.values()
        ]
        figures.append(_bars("The time of each rank", totals, parts, unit.name, note))
    return figures


def _bars(
    title: str,
    ranks: Mapping[int, Span],
    parts: Mapping[str, Sequence[float]],
    label: str,
    note: str,
) -> Figure:
    lying = len(ranks) <= _MOST_LYING_BARS
    places: list[Any] = [f"rank {rank}" for rank in ranks] if lying else list(ranks)
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": part,
            "visible": any(values),  # a part keeps its colour, even if others are left out
            "orientation": "h" if lying else "v",
            "x": _rounded(values) if lying else places,
            "y": places if lying else _rounded(values),
        }
        for part, values in parts.items()
    ]
    values_axis = {"title": _title(label), "rangemode": "tozero"}
    if lying:
        axes = {"xaxis": values_axis, "yaxis": {"autorange": "reversed", "type": "category"}}
    else:
        axes = {"xaxis": {"title": _title("rank")}, "yaxis": values_axis}
    layout = {**axes, "barmode": "stack", "bargap": 0.25 if lying else 0.1}
    height = 80 + 34 * len(ranks) if lying else 300
    return Figure(title, traces, layout, note, height)


def _trace(name: str, xs: Sequence[float | None], ys: Values) -> dict[str, Any]:
    points = sum(y is not None for y in ys)
    return {
        "type": "scatter",
        "mode": "lines+markers" if points <= _FEW_POINTS else "lines",
        "name": name,
        "x": _rounded(xs),
        "y": _rounded(ys),
    }


def _band(line: Line, xs: Sequence[float]) -> dict[str, Any]:
    """The area between the two edges of a band; where there is a gap, another one begins."""
    assert line.band_to is not None
    areas_x: Values = []
    areas_y: Values = []
    run: list[tuple[float, float, float]] = []
    for x, low, high in [*zip(xs, line.values, line.band_to, strict=True), (0.0, None, None)]:
        if low is not None and high is not None:
            run.append((x, low, high))
        elif run:
            areas_x += [*(each[0] for each in run), *(each[0] for each in reversed(run)), None]
            areas_y += [*(each[1] for each in run), *(each[2] for each in reversed(run)), None]
            run = []
    return {
        "type": "scatter",
        "mode": "lines",
        "name": line.name,
        "x": _rounded(areas_x),
        "y": _rounded(areas_y),
        "fill": "toself",
        "fillcolor": _BAND,
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def _layout(
    axis: Mapping[str, Any],
    label: str,
    marks: Sequence[tuple[float, str, str]] = (),
    zero: bool = False,
) -> dict[str, Any]:
    """A layout with vertical lines at some places, each with a word that begins or ends there."""
    return {
        "xaxis": dict(axis),
        "yaxis": {"title": _title(label), "rangemode": "tozero" if zero else "normal"},
        "shapes": [
            {
                "type": "line",
                "xref": "x",
                "yref": "paper",
                "x0": _round(x),
                "x1": _round(x),
                "y0": 0,
                "y1": 1,
                "line": {"width": 1, "dash": "dot", "color": "gray"},
            }
            for x, _, _ in marks
        ],
        "annotations": [
            {
                "xref": "x",
                "yref": "paper",
                "x": _round(x),
                "y": 0,
                "text": word,
                "showarrow": False,
                "xanchor": anchor,
                "yanchor": "bottom",
            }
            for x, word, anchor in marks
        ],
    }


def _title(text: str) -> dict[str, Any]:
    return {"text": text, "standoff": 10}


def _rounded(values: Iterable[float | None]) -> Values:
    return [_round(value) for value in values]


def _round(value: float | None) -> float | None:
    """As many digits as a figure shows; None, which leaves a gap, for what is no finite number."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
