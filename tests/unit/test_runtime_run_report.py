"""What a rank tells the command: short enough for one line, and about the right ranks."""

from __future__ import annotations

import os
import select

import pytest

from tarantella.runtime import banner, run_report, servers, world
from tarantella.runtime.announce import EPOCH, MEASURED, RUN_ID, parse
from tarantella.runtime.configuration import Configuration
from tarantella.runtime.meter import PARTS


def test_many_logs_still_fit_into_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    source, sink = os.pipe()
    monkeypatch.setenv(RUN_ID, "this")
    monkeypatch.setattr(run_report, "_descriptor", sink)
    logs = {f"größe_{number}": 0.1 + number for number in range(500)} | {"text": "none"}
    run_report.report_epoch(fit=1, number=2, epochs=3, steps=4, seconds=5.0, logs=logs)
    lines = os.read(source, 1 << 16).splitlines(keepends=True)
    assert [len(line) <= select.PIPE_BUF for line in lines] == [True, True]
    totals, epoch = (parse(line, "this") for line in lines)
    assert (totals.kind, epoch.kind) == (MEASURED, EPOCH)
    assert totals.data["parts"].keys() == set(PARTS)
    assert totals.data["memory"] > 1e6
    kept = epoch.data["logs"]
    assert len(kept) > 50
    assert list(kept.items()) == list(logs.items())[: len(kept)]
    os.close(source)
    os.close(sink)


def test_nothing_is_told_without_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    run_report.start("MPI", "")
    run_report.report_epoch(fit=1, number=1, epochs=1, steps=1, seconds=1.0, logs={})
    assert not run_report.is_wanted()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("hosts", "addresses", "settings", "shown"),
    [
        (
            ("a", "a", "b", "b"),
            ("a:1", "a:2", "b:1", "b:2"),
            Configuration(gpus=(0, 1), threads=(4,)),
            "4 ranks on 2 hosts, 1 GPU and 4 cores a rank; sums by NCCL",
        ),
        (
            ("a", "b"),
            (),
            Configuration(no_gpu=True, threads=(2, 8)),
            "2 ranks on 2 hosts, 2 to 8 cores a rank; sums by MPI in the background",
        ),
        (("a",), (), Configuration(no_gpu=True, threads=(1,)), "1 rank on 1 host, 1 core"),
    ],
)
def test_the_line_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
    hosts: tuple[str, ...],
    addresses: tuple[str, ...],
    settings: Configuration,
    shown: str,
) -> None:
    monkeypatch.setattr(world, "_size", len(hosts))
    monkeypatch.setattr(world, "_host_count", len(set(hosts)))
    monkeypatch.setattr(world, "get_host_names", lambda: hosts)
    monkeypatch.setattr(servers, "_addresses", addresses)
    assert banner.text(settings) == shown


@pytest.mark.parametrize(
    ("ranks", "limit", "settings", "shown"),
    [
        (5, None, Configuration(no_gpu=True, threads=(1,)), "5 ranks on 1 host, 2 cores in all"),
        (3, 1, Configuration(no_gpu=True), "3 ranks on 1 host, 1 core in all"),
        (
            3,
            None,
            Configuration(gpus=(0, 1, 2)),
            "3 ranks on 1 host, 1 GPU a rank and 2 cores in all",
        ),
        (2, None, Configuration(no_gpu=True), "2 ranks on 1 host, 1 core a rank"),
    ],
)
def test_the_line_at_the_start_has_no_cores_of_a_rank_where_ranks_share_them(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    limit: int | None,
    settings: Configuration,
    shown: str,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    location = world.RankLocation("a", frozenset({0, 1}), None, limit)
    monkeypatch.setattr(world, "_size", ranks)
    monkeypatch.setattr(world, "_locations", (location,) * ranks)
    assert banner.text(settings).partition(";")[0] == shown
