"""The measurements: as a table, as JSON, and as a picture."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("tarantella", "tensorflow-cpu", "tensorflow", "keras", "numpy", "mpi4py")
FORMS = {
    "": "{:.2f}",
    "%": "{:+.1%}",
    "ms": "{:.1f} ms",
    "s": "{:.1f} s",
    "us": "{:.0f} us",
    "GB/s": "{:.3g} GB/s",
    "MiB": "{:.0f} MiB",
}
SUBJECTS = {
    "lenet5": "LeNet-5",
    "resnet50": "ResNet-50",
    "transformer": "Transformer",
    "mlp": "MLP, 50 MB\nof gradients",
    "embedding": "embedding,\nsparse\ngradients",
}
HIGHEST = 1.4  # in the picture; higher bars are cut off
COLOURS = {"tarantella": "#1f7a8c", "mirrored": "#e0a458", "keras": "#9aa5b1"}
NAMES = {
    "keras": "plain Keras, one process",
    "mirrored": "MultiWorkerMirroredStrategy, 2 workers",
    "tarantella": "Tarantella, 2 ranks",
}


@dataclass(frozen=True)
class Figure:
    """One measurement.

    Attributes:
        part: The part of the benchmarks.
        subject: What it is about: a model, a size.
        what: What was measured: a candidate, a quantity.
        rounds: The values of all rounds; empty if it could not be measured.
        unit: A key of FORMS; empty for a ratio.
        over: For a ratio, which is one of speeds everywhere: what the speed is compared with. Over
            the limit, 1 is the best.
        spread: The lowest and the highest value to show, if not those of the rounds.
        at_least: The target.
        at_most: The target, if less is better.
        problem: Why it was not measured.
    """

    part: str
    subject: str
    what: str
    rounds: Sequence[float]
    unit: str = ""
    over: str = ""
    spread: tuple[float, float] | None = None
    at_least: float | None = None
    at_most: float | None = None
    problem: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.rounds) if self.rounds else None

    @property
    def low_and_high(self) -> tuple[float, float] | None:
        return (self.spread or (min(self.rounds), max(self.rounds))) if self.rounds else None

    @property
    def verdict(self) -> str:
        """Whether it meets the target; empty if there is none."""
        if self.at_least is None and self.at_most is None:
            return ""
        if self.median is None:
            return "not measured"
        enough = self.at_least is None or self.median >= self.at_least
        not_too_much = self.at_most is None or self.median <= self.at_most
        return "met" if enough and not_too_much else "MISSED"

    def described(self) -> dict[str, Any]:
        low, high = self.low_and_high or (None, None)
        derived = {"median": self.median, "low": low, "high": high, "verdict": self.verdict}
        kept = asdict(self) | {"spread": None, "rounds": list(self.rounds)}
        return {
            name: value for name, value in {**kept, **derived}.items() if value not in (None, "")
        }


def missed(figures: Sequence[Figure]) -> list[Figure]:
    """Those that miss their target, or could not be measured."""
    return [figure for figure in figures if figure.verdict not in ("", "met")]


# As a table


def table(figures: Sequence[Figure]) -> str:
    """A line for each figure: median, lowest and highest value, target."""
    rows = [("", "", "", "median", "low to high", "target", ""), *map(_cells, figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligned = [str.ljust, str.ljust, str.ljust, str.rjust, str.ljust, str.rjust, str.ljust]
    return "\n".join(
        "  ".join(
            align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def _cells(figure: Figure) -> tuple[str, ...]:
    form = FORMS[figure.unit].format
    what = f"{figure.what} over {figure.over}" if figure.over else figure.what
    target = ""
    if figure.at_least is not None:
        target = f">= {form(figure.at_least)}"
    if figure.at_most is not None:
        target = f"<= {form(figure.at_most)}"
    if figure.median is None or figure.low_and_high is None:
        return (
            figure.part,
            figure.subject,
            what,
            "-",
            "",
            target,
            f"not measured: {figure.problem}",
        )
    span = " to ".join(map(form, figure.low_and_high))
    return (figure.part, figure.subject, what, form(figure.median), span, target, figure.verdict)


# As JSON


def write_json(figures: Sequence[Figure], path: Path, **more: Any) -> None:
    """Writes a file of figures, and of the machine; `more` is known about it."""
    described = [
        {name: _rounded(value) for name, value in figure.described().items()} for figure in figures
    ]
    content = {"machine": machine() | more, "figures": described}
    path.write_text(json.dumps(content, indent=1) + "\n")


def _rounded(value: Any) -> Any:
    """Numbers with their significant digits."""
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def machine() -> dict[str, Any]:
    """The machine and the versions that the figures depend on."""
    return {
        "system": f"{platform.system()} on {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: release for package in PACKAGES if (release := _version(package))},
        "mpi": _mpi(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _mpi() -> str:
    """The MPI library's name and version; it is not initialized, as this is not a rank."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    code += "print(MPI.Get_library_version().strip('\\0'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    first = run.stdout.splitlines()[0] if run.stdout else ""
    return " ".join(first.split())


# As a picture


def picture(figures: Sequence[Figure], path: Path) -> None:
    """Draws how close each candidate comes to the limit, with a group of bars for each model."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    ratios = [f for f in figures if f.part == "step" and f.over == "limit" and f.rounds]
    subjects = list(dict.fromkeys(figure.subject for figure in ratios))
    candidates = [name for name in COLOURS if name in {figure.what for figure in ratios}]
    width = 0.8 / max(len(candidates), 1)
    # Narrow, with bars that lie: it fits a phone, where text of 11 points is still legible.
    figure_, axes = plt.subplots(figsize=(4.4, 1.4 + 1.05 * len(subjects)), layout="constrained")
    for number, candidate in enumerate(candidates):
        of_candidate = [figure for figure in ratios if figure.what == candidate]
        middles = [
            subjects.index(figure.subject) + (number - (len(candidates) - 1) / 2) * width
            for figure in of_candidate
        ]
        _bars(axes, middles, of_candidate, width)
    axes.axvline(1, color="#333333", linewidth=1, linestyle="--", zorder=0.9)
    axes.set_yticks(range(len(subjects)), [SUBJECTS.get(s, s) for s in subjects], fontsize=11)
    axes.set_ylim(len(subjects) - 0.45, -0.55)
    axes.set_xlabel("speed relative to the limit, which is 1", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=11)
    axes.xaxis.grid(True, color="#e5e7eb")
    axes.set_axisbelow(True)
    axes.set_xlim(0, HIGHEST)
    figure_.legend(loc="outside upper left", ncols=1, frameon=False, fontsize=11)
    figure_.savefig(path, dpi=150, facecolor="white")
    plt.close(figure_)


def _bars(axes: Any, middles: list[float], figures: list[Figure], width: float) -> None:
    """The bars of one candidate, with their spread and their length as a number."""
    lengths = [statistics.median(figure.rounds) for figure in figures]
    below = [length - min(f.rounds) for length, f in zip(lengths, figures, strict=True)]
    above = [max(f.rounds) - length for length, f in zip(lengths, figures, strict=True)]
    candidate = figures[0].what
    axes.barh(
        middles,
        lengths,
        0.92 * width,
        color=COLOURS[candidate],
        label=NAMES[candidate],
        xerr=(below, above),
        error_kw={"ecolor": "#4b5563", "elinewidth": 1, "capsize": 2},
    )
    for middle, length, more in zip(middles, lengths, above, strict=True):
        axes.annotate(
            f"{length:.2f}",
            (min(length + more, HIGHEST - 0.2), middle),
            xytext=(4, 0),
            textcoords="offset points",
            ha="left",
            va="center",
            fontsize=11,
            color="#111827",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )
