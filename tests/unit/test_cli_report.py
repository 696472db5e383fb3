"""The report of a run: its figures, its page in a real browser, and its file."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from chromium import Chromium, find_chromium, run_chromium

from tarantella.cli.host import Host
from tarantella.cli.main import _ranks, main
from tarantella.cli.options import Options
from tarantella.cli.plan import make_plan
from tarantella.cli.report.figures import Figure, course_figures, metric_figures, part_figures
from tarantella.cli.report.page import page
from tarantella.cli.report.report_file import ReportFile
from tarantella.cli.report.series import course
from tarantella.cli.run_record import WARNING, Ranks, RunRecord
from tarantella.runtime import times
from tarantella.runtime.announce import EPOCH, MEASURED, Announcement
from tarantella.runtime.meter import CALLBACKS, COMPUTE, EVALUATION, INPUT, PARTS, SUMS

SPAN = 5.0  # seconds between two announcements of a rank
STEPS = 50  # in that time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Sets the clock that the record reads, in seconds since the start of the run."""
    began = time.time() - 10_000

    def set_to(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: began + seconds)

    set_to(0.0)
    yield set_to
    monkeypatch.undo()


Clock = Callable[[float], None]


def started(ranks: int) -> RunRecord:
    """The record of a run that has just started."""
    record = RunRecord(
        ("train.py", "--comment", "<i>a & b</i></script>"),
        ("-n", str(ranks), "--no-gpu", "--", "train.py", "--comment", "<i>a & b</i></script>"),
        versions={"Tarantella": "0.1.0", "TensorFlow": "2.21.0"},
        engine="MPI and shared memory",
        started=time.time(),
    )
    hosts = tuple(f"node{rank // 8 + 1:02}.rack-7.cluster.example.org" for rank in range(ranks))
    record.begin(Ranks(hosts, ("CPU",) * ranks, (2,) * ranks))
    return record


def measure(
    record: RunRecord,
    clock: Clock,
    spans: int = 40,
    slow: int | None = None,
    without: Collection[str] = (),
) -> None:
    """The ranks train; the slow one computes 50 % longer, and the others wait for it.

    Parts that they are without take no time.
    """
    ranks = len(record.ranks.hosts)
    for index in range(1, spans + 1):
        clock(SPAN * index)
        for rank in range(ranks):
            own = 3.0 if rank == slow else 2.0
            parts = {INPUT: 0.5, COMPUTE: own, SUMS: 3.5 - own, CALLBACKS: 0.25, EVALUATION: 0.25}
            parts |= dict.fromkeys(without, 0.0)
            data = {
                "seconds": SPAN * index,
                "steps": STEPS * index,
                "samples": 32 * STEPS * index,
                "parts": {part: seconds * index for part, seconds in parts.items()},
                "memory": (700 + rank) * 1_000_000,
                "gpu_memory": None,
                "cpu_seconds": 7.5 * index,
            }
            host = record.ranks.hosts[rank]
            record.hear(Announcement(MEASURED, rank, host, 1, data=data))


def train(record: RunRecord, fit: int, epochs: int, first: int = 1) -> None:
    """A `fit` in which the validation loss of the second epoch is not a number."""
    for epoch in range(first, epochs + 1):
        logs = {"loss": 1 / epoch, "accuracy": 1 - 1 / epoch, "learning_rate": 0.001}
        logs |= {"val_loss": math.nan if epoch == 2 else 2 / epoch, "val_accuracy": 0.5}
        data = {"fit": fit, "number": epoch, "epochs": epochs, "steps": 9, "seconds": 1.0}
        record.hear(Announcement(EPOCH, 0, "here", 1, data={**data, "logs": logs}))


def all_figures(record: RunRecord) -> dict[str, Figure]:
    figures = [
        *metric_figures(record.epochs),
        *course_figures(record, course(record)),
        *part_figures(record.totals(), record.unseen),
    ]
    return {figure.title: figure for figure in figures}


def html(record: RunRecord) -> str:
    return b"".join(page(record, b"/* Plotly */")).decode()


@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_figures_are_valid_for_plotly_and_name_their_axes(clock: Clock, ranks: int) -> None:
    objects = pytest.importorskip("plotly.graph_objects")
    record = started(ranks)
    measure(record, clock, slow=0)
    train(record, 1, 3)
    figures = all_figures(record)
    assert {"loss", "accuracy", "Throughput", "Step time", "The parts of a step"} <= figures.keys()
    for figure in figures.values():
        drawn = objects.Figure(data=figure.data, layout=figure.layout)
        titles = [drawn.layout.xaxis.title.text, drawn.layout.yaxis.title.text]
        lies = figure.data[0].get("orientation") == "h"  # with the names of ranks at one side
        assert titles[0], figure.title
        assert titles[1] or lies, figure.title


def test_numbers_over_time_are_those_that_ranks_measured(clock: Clock) -> None:
    record = started(2)
    measure(record, clock, slow=1)
    figures = all_figures(record)
    assert figures["Throughput"].data[0]["y"] == pytest.approx([2 * 32 * STEPS / 4.25] * 40)
    assert figures["Step time"].data[0]["y"] == pytest.approx([85.0] * 40)
    own = figures["Step time without waiting for other ranks"]
    assert [trace["name"] for trace in own.data] == ["rank 0", "rank 1"]
    assert [trace["y"][0] for trace in own.data] == pytest.approx([55.0, 75.0])
    assert figures["CPU use of a rank"].data[1]["y"] == pytest.approx([1.5] * 40)
    assert figures["Peak memory so far"].data[1]["y"] == pytest.approx([701.0] * 40)
    parts = {trace["name"]: trace["x"] for trace in figures["The parts of a step"].data}
    assert parts["waiting for sums"] == pytest.approx([30.0, 10.0])


def test_a_part_keeps_its_colour_when_another_is_left_out(clock: Clock) -> None:
    record = started(1)
    measure(record, clock)
    span = replace(record.totals()[0], parts=dict.fromkeys(PARTS, 0.0) | {COMPUTE: 1.0, SUMS: 1.0})
    [of_step, _] = part_figures({0: span}, frozenset({INPUT}))
    assert of_step.legend == {"compute": "var(--c1)", "waiting for sums": "var(--c2)"}
    assert of_step.note == "Here, input cannot be told apart from compute."


@pytest.mark.parametrize(("ranks", "is_shown"), [(2, True), (5, False)])
def test_cores_of_a_rank_are_shown_unless_ranks_share_them(
    clock: Clock, ranks: int, is_shown: bool
) -> None:
    options = Options(program=("train.py",), ranks=ranks, no_gpu=True)
    record = started(ranks)
    record.begin(_ranks(make_plan(options, [Host("laptop", ((0, 1),))])))
    measure(record, clock)
    text = html(record)
    assert ("CPU, 1 core<" in text) is is_shown
    assert ("Each rank has 1 core." in text) is is_shown


def test_many_ranks_are_a_band_their_median_and_the_slowest(clock: Clock) -> None:
    record = started(64)
    measure(record, clock, slow=21)
    figures = all_figures(record)
    own = figures["Step time without waiting for other ranks"]
    assert [trace["name"] for trace in own.data] == ["all ranks", "median", "slowest: rank 21"]
    assert [own.data[index]["y"][0] for index in (1, 2)] == pytest.approx([55.0, 75.0])
    assert all(len(f.data) <= 3 for f in figures.values() if f.data[0]["type"] == "scatter")
    assert len(figures["The parts of a step"].data[0]["x"]) == 64


def test_time_without_training_is_a_gap(clock: Clock) -> None:
    record = started(1)
    measure(record, clock, 10)
    rank = record.totals()[0]
    clock(10 * SPAN + 50.0)
    data = {"seconds": 100.0, "steps": rank.steps, "samples": rank.samples, "parts": rank.parts}
    data |= {"memory": rank.memory, "gpu_memory": None, "cpu_seconds": rank.cpu_seconds}
    record.hear(Announcement(MEASURED, 0, "here", 1, data=data))
    values = all_figures(record)["Step time"].data[0]["y"]
    assert None not in values[:5]
    assert values[-4:] == [None] * 4


def test_epochs_of_a_second_fit_follow_those_of_the_first(clock: Clock) -> None:
    record = started(1)
    train(record, 1, 3)
    train(record, 2, 4, first=3)
    [training, validation] = all_figures(record)["loss"].data
    assert training["x"] == [1, 2, 3, None, 4, 5]
    assert training["text"][-1] == "fit 2, epoch 4"
    assert [trace["name"] for trace in (training, validation)] == ["training", "validation"]


def test_a_loss_that_is_not_a_number_is_a_gap_and_is_told(clock: Clock) -> None:
    record = started(1)
    train(record, 1, 3)
    loss = all_figures(record)["loss"]
    assert loss.data[1]["y"] == [2.0, None, pytest.approx(0.666667)]
    assert loss.note == "Not a finite number in 1 of 3 epochs, first in epoch 2."


def test_the_page_says_how_a_run_stands(clock: Clock) -> None:
    record = started(2)
    assert "Running when this was written." in html(record)
    assert "Nothing was trained with a tnt.Model." in html(record)
    record.note(WARNING, "Mind the <gap>.")
    record.note_restart("rank 1 on host a failed")
    assert "Mind the &lt;gap&gt;." in html(record)
    record.end()
    assert "Succeeded." in html(record)
    record.end("rank 1 on host b failed: ValueError: </p>")
    assert "Rank 1 on host b failed: ValueError: &lt;/p&gt;" in html(record)


def test_no_text_of_a_user_becomes_part_of_the_page(clock: Clock) -> None:
    record = started(1)
    logs = {"</script><b>": 1.0}
    data = {"fit": 1, "number": 1, "epochs": 1, "steps": 9, "seconds": 1.0, "logs": logs}
    record.hear(Announcement(EPOCH, 0, "here", 1, data=data))
    text = html(record)
    assert "<i>" not in text
    assert "<b>" not in re.sub(r"<small>.*?</b>", "", text)
    [content] = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', text)
    assert json.loads(content)[0]["layout"]["yaxis"]["title"]["text"] == "&lt;/script&gt;&lt;b&gt;"


def test_values_of_variables_are_not_in_the_page(clock: Clock) -> None:
    """They may be keys, and a report is sent to others."""
    own = ("-n", "1", "-x", "API_KEY=secret", "B=secret too", "--stall-timeout=60", "-xC=secret")
    script = ("train.py", "rate=0.1")
    record = started(1)
    record.options, record.script = (*own, "--", *script), script
    text = html(record)
    assert "secret" not in text
    line = "tarantella -n 1 -x API_KEY=... B=... --stall-timeout=60 -xC=... -- train.py rate=0.1"
    assert f"<code>{line}</code>" in text


def test_the_page_of_a_function_has_no_command_and_no_options_of_it(clock: Clock) -> None:
    """`tnt.run` has started it, and nobody can run its command."""
    record = started(1)
    record.function = "train"
    record.files = {"--report": "run.html"}
    record.note(WARNING, "use --no-gpu to run on the CPU.")
    text = html(record)
    assert "<th>command</th>" not in text
    assert "<th>files</th><td><code>run.html (report)</code>" in text
    assert "Use no_gpu=True to run on the CPU." in text


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    if find_chromium() is None:
        pytest.skip("there is no Chromium")
    with run_chromium() as chromium:
        yield chromium


# What is wider than the screen; what a figure draws outside of its axes is cut off.
TOO_WIDE = """
[...document.querySelectorAll("details")].forEach(each => each.open = true);
[...document.querySelectorAll("body, body *:not(svg *)")]
  .filter(each => each.getBoundingClientRect().right > innerWidth + 0.5)
  .map(each => each.outerHTML.slice(0, 80))
"""
# For each figure: how many of its lines, points and bars have a size.
DRAWN = """
[...document.querySelectorAll("figure")].map(figure =>
  [...figure.querySelectorAll(".scatterlayer path, .barlayer path")]
    .filter(each => each.getBBox().width + each.getBBox().height > 0).length)
"""
SMALLEST_TEXT = """
Math.min(...[...document.querySelectorAll("svg text")].map(each =>
  parseFloat(getComputedStyle(each).fontSize)))
"""
# For each figure with bars: the colours of the bars, and those of the legend.
COLOURS_OF_BARS = """
[...document.querySelectorAll("figure:has(.barlayer .trace)")].map(figure => [
  [...figure.querySelectorAll(".barlayer .trace")]
    .map(each => getComputedStyle(each.querySelector("path")).fill),
  [...figure.querySelectorAll(".legend span")]
    .map(each => getComputedStyle(each, "::before").backgroundColor)])
"""
COLOURS = """
[getComputedStyle(document.body).backgroundColor,
 getComputedStyle(document.querySelector("svg .xtick text")).fill]
"""


@pytest.mark.parametrize("ranks", [0, 2, 64])
def test_page_in_a_browser(browser: Chromium, clock: Clock, tmp_path: Path, ranks: int) -> None:
    """Without a network, on a phone and on a desktop, light and dark; 0: nothing is trained."""
    pytest.importorskip("plotly")
    record = started(max(ranks, 1))
    if ranks:
        measure(record, clock, 40, slow=ranks // 3)
        train(record, 1, 3)
        train(record, 2, 2)
    for _ in range(ranks):
        record.note(WARNING, "A_long_word_" * 20 + "and a <b>warning</b> with some words more.")
    if ranks == 64:
        record.end("rank 1 on host a failed")
    path = tmp_path / "run.html"
    ReportFile(str(path), record, pytest.fail).write()
    for width, dark in ((390, False), (1280, True)) if ranks else ((390, False),):
        browser.open(path, width, dark=dark, phone=width == 390)
        assert browser.requests == [path.as_uri()]
        assert browser.complaints == []
        assert browser.evaluate(TOO_WIDE) == []
        assert browser.evaluate("document.documentElement.scrollWidth") == width
        drawn = browser.evaluate(DRAWN)
        assert len(drawn) == len(all_figures(record))
        assert all(drawn), drawn
        if drawn:
            assert browser.evaluate(SMALLEST_TEXT) >= 12
            paper, ink = map(brightness, browser.evaluate(COLOURS))
            assert (ink - paper if dark else paper - ink) > 120


@pytest.mark.parametrize("without", [(EVALUATION,), (INPUT,), (INPUT, CALLBACKS, EVALUATION)])
def test_each_part_is_drawn_in_its_colour_of_the_legend(
    browser: Chromium, clock: Clock, tmp_path: Path, without: tuple[str, ...]
) -> None:
    pytest.importorskip("plotly")
    record = started(2)
    measure(record, clock, without=without)
    path = tmp_path / "run.html"
    ReportFile(str(path), record, pytest.fail).write()
    browser.open(path, 1280)
    figures = browser.evaluate(COLOURS_OF_BARS)
    assert len(figures) == 2
    for bars, legend in figures:
        assert len(set(legend)) == len(legend)
        assert bars == legend
    assert len(figures[1][1]) == len(PARTS) + 1 - len(without)


def brightness(colour: str) -> float:
    channels = list(map(int, re.findall(r"\d+", colour)[:3]))
    return sum(channels) / 3


def test_a_report_without_plotly_is_an_error_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    script = tmp_path / "train.py"
    script.write_text("print('started')\n")
    assert main(["-n", "1", "--no-gpu", "--report", str(tmp_path / "a.html"), str(script)]) == 2
    assert "pip install plotly" in (text := capfd.readouterr()).err
    assert text.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train.py", "does not end in .html"),
        ("missing/run.html", "cannot be written (No such file or directory)"),
        ("train.py/run.html", "cannot be written (Not a directory)"),
        ("folder.html", "cannot be written (Is a directory)"),
    ],
)
def test_a_report_that_cannot_be_written_is_an_error_before_anything_starts(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    message: str,
    dry_run: tuple[str, ...],
) -> None:
    pytest.importorskip("plotly")
    script = tmp_path / "train.py"
    script.write_text("print('started')\n")
    (tmp_path / "folder.html").mkdir()
    report = ("--report", str(tmp_path / name))
    assert main(["-n", "1", "--no-gpu", *report, *dry_run, str(script)]) == 2
    assert message in (text := capfd.readouterr()).err
    assert text.out == ""
    assert script.read_text() == "print('started')\n"


def test_a_dry_run_writes_no_report(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    (tmp_path / "train.py").touch()
    report = ("--report", str(tmp_path / "run.html"))
    assert main(["-n", "1", "--no-gpu", *report, "--dry-run", str(tmp_path / "train.py")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_report_that_cannot_be_written_again_is_a_warning_once(
    clock: Clock, tmp_path: Path
) -> None:
    pytest.importorskip("plotly")
    warnings: list[str] = []
    path = tmp_path / "reports" / "run.html"
    path.parent.mkdir()
    report = ReportFile(str(path), started(1), warnings.append)
    report.write()
    path.unlink()
    path.parent.rmdir()
    report.write()
    report.write()
    [warning] = warnings
    assert "cannot be written (No such file or directory)" in warning
    path.parent.mkdir()
    report.write()
    assert path.read_bytes().endswith(b"</html>\n")


def test_the_file_is_written_less_often_as_the_run_gets_older(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly")
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    path = tmp_path / "run.html"
    report = ReportFile(str(path), started(1), pytest.fail)
    report.write()
    written = []
    for _ in range(1500):
        now += 1.0
        path.unlink(missing_ok=True)
        report.update()
        if path.exists():
            written.append(now - 1000.0)
    waits = [later - earlier for earlier, later in pairwise(written)]
    assert waits[0] == times.SHORTEST_TIME_BETWEEN_PAGES
    assert waits == sorted(waits)
    assert waits[-1] == times.LONGEST_TIME_BETWEEN_PAGES
