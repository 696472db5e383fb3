"""What the command says of a run: its summary, slow ranks, and the time left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tarantella.cli import main as command
from tarantella.cli.run import RunEnd
from tarantella.cli.run_record import Ranks, RunRecord
from tarantella.cli.slow_ranks import SlowRanks
from tarantella.cli.summary import summary
from tarantella.cli.time_left import TimeLeft
from tarantella.runtime.announce import DESCRIBED, EPOCH, MEASURED, Announcement
from tarantella.runtime.meter import CALLBACKS, COMPUTE, EVALUATION, INPUT, SUMS
from tarantella.runtime.words import duration, memory, rate


def measured(rank: int, *, epoch: int | None = None, **parts: float) -> Announcement:
    data = {
        "seconds": 100.0,
        "steps": 500,
        "samples": 8000,
        "parts": {INPUT: 0.0, COMPUTE: 0.0, SUMS: 0.0, CALLBACKS: 0.0, EVALUATION: 0.0, **parts},
        "memory": 1_500_000_000,
        "gpu_memory": None,
        "cpu_seconds": 50.0,
    }
    if epoch is not None:
        data["epoch"] = epoch
    return Announcement(MEASURED, rank, "here", 1, data=data)


def record_of(*announcements: Announcement, hosts: tuple[str, ...]) -> RunRecord:
    record = RunRecord(started=0.0)
    record.begin(Ranks(hosts, ("CPU",) * len(hosts), (1,) * len(hosts)))
    for announcement in announcements:
        record.hear(announcement)
    record.end()
    record.ended = 125.0
    return record


def test_two_ranks_get_a_line_each() -> None:
    ranks = (
        measured(0, input=4.0, compute=56.0, sums=20.0, evaluation=10.0),
        measured(1, input=24.0, compute=55.0, sums=1.0, evaluation=10.0),
    )
    assert summary(record_of(*ranks, hosts=("node1", "node2"))).splitlines() == [
        "the run took 2 min 05 s: 500 steps in 1 min 20 s of training, 200 samples/s on 2 ranks.",
        "  rank   host  samples/s  input  compute  sums  evaluation  other  memory",
        "     0  node1        100     4%      56%   20%         10%    10%  1.5 GB",
        "     1  node2        100    24%      55%    1%         10%    10%  1.5 GB",
        "  slowest: rank 1 on host node2, 32% (19.0 s) slower than the median, mostly waiting for "
        "its data.",
    ]


def test_many_ranks_get_the_least_the_median_and_the_most() -> None:
    ranks = [measured(rank, compute=60.0 + rank % 2, sums=40.0 - rank % 2) for rank in range(64)]
    lines = summary(record_of(*ranks, hosts=("here",) * 64)).splitlines()
    assert lines[0].endswith("5,120 samples/s on 64 ranks.")
    assert [line.split()[:5] for line in lines[1:5]] == [
        ["ranks", "samples/s", "input", "compute", "sums"],
        ["min", "80.0", "0%", "60%", "39%"],
        ["median", "80.0", "0%", "60%", "40%"],
        ["max", "80.0", "0%", "61%", "40%"],
    ]
    assert lines[5:] == []


def test_what_cannot_be_told_apart_is_named_together() -> None:
    alone = record_of(measured(0, compute=100.0), hosts=("here",))
    alone.hear(Announcement(DESCRIBED, 0, "here", 1, data={"unseen": [INPUT]}))
    assert "compute+input" in summary(alone)
    assert "sums" not in summary(alone)
    gpus = record_of(measured(0, compute=90.0), measured(1, compute=90.0), hosts=("here",) * 2)
    gpus.hear(Announcement(DESCRIBED, 0, "here", 1, data={"unseen": [SUMS]}))
    assert "compute+sums  waits" in summary(gpus)


def test_a_failed_run_gets_a_short_summary(tmp_path: Path) -> None:
    record = record_of(measured(0, compute=50.0), measured(1, compute=50.0), hosts=("here",) * 2)
    record.end("rank 0 on host here failed.")
    assert len(summary(record).splitlines()) == 1
    record.files = {"--output-dir": str(tmp_path), "--timeline": str(tmp_path / "not there")}
    assert summary(record).splitlines()[1:] == [f"  written: {tmp_path} (--output-dir)"]


def test_files_of_an_earlier_run_are_not_claimed(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.html"
    for path in (old, new):
        path.touch()
    started = new.stat().st_mtime
    os.utime(old, (started - 60, started - 60))
    record = RunRecord(started=started, files={"--timeline": str(old), "--report": str(new)})
    assert summary(record) == f"written: {new} (--report)"


def test_a_run_that_did_not_train_gets_none() -> None:
    assert summary(record_of(hosts=("here",))) == ""


@pytest.mark.parametrize(("status", "lines"), [(0, 1), (141, 0)])
def test_nothing_is_said_when_nobody_reads_the_output(
    status: int,
    lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """After `tarantella ... | head`, a summary would only be in the way."""
    monkeypatch.setenv("TNT_QUIET", "false")
    monkeypatch.setattr(command, "_run", lambda *_: RunEnd(status))
    (tmp_path / "train.py").touch()
    options = ["-n", "1", "--no-gpu", "--output-dir", str(tmp_path)]
    assert command.main([*options, "--", str(tmp_path / "train.py")]) == status
    assert len(capfd.readouterr().err.splitlines()) == lines


def test_a_slow_rank_is_named_once_for_each_part() -> None:
    warnings: list[str] = []
    slow = SlowRanks({0: "node1", 1: "node1", 2: "node2"}, warnings.append)
    for epoch, waited in enumerate((6.0, 12.0, 18.0), 1):
        slow.hear(measured(0, epoch=epoch, compute=10.0 * epoch, sums=6.0 * epoch))
        slow.hear(measured(1, epoch=epoch, compute=10.0 * epoch, sums=6.0 * epoch))
        assert len(warnings) == (epoch > 1)  # not before all have told
        slow.hear(measured(2, epoch=epoch, compute=10.0 * epoch, input=waited))
    assert warnings == [
        "Rank 2 on host node2 is slow, and the others wait for it: in the last epoch it took 6.0 "
        "seconds (60%) longer than the median of the ranks, mostly waiting for its data."
    ]
    slow.hear(measured(0, epoch=4, compute=60.0))
    slow.hear(measured(1, epoch=4, compute=40.0))
    slow.hear(measured(2, epoch=4, compute=40.0, input=18.0))
    assert warnings[1].startswith("Rank 0 on host node1 is slow")
    assert warnings[1].endswith("20.0 seconds (200%) longer than the median of the ranks, mostly "
                                "in its steps.")  # fmt: skip


@pytest.mark.parametrize(
    ("own", "waits"), [((1.0, 1.9), (0.9, 0.0)), ((100.0, 119.0), (19.0, 0.0))]
)
def test_ranks_are_not_slow_in_short_epochs_or_by_little(
    own: tuple[float, float], waits: tuple[float, float]
) -> None:
    warnings: list[str] = []
    slow = SlowRanks({0: "here", 1: "here"}, warnings.append)
    for rank in (0, 1):
        slow.hear(measured(rank, epoch=1, compute=own[rank], sums=waits[rank]))
    assert warnings == []


def epoch(number: int, seconds: float, fit: int = 1) -> Announcement:
    data = {"fit": fit, "number": number, "epochs": 10, "seconds": seconds}
    return Announcement(EPOCH, 0, "here", 1, data=data)


def test_the_time_left_does_not_count_the_first_epoch() -> None:
    shown: list[str] = []
    left = TimeLeft(shown.append, always=True)
    for news in (epoch(1, 100.0), epoch(2, 20.0), epoch(3, 40.0), epoch(10, 30.0)):
        left.hear(news)
    left.hear(epoch(5, 7.0, fit=2))
    assert shown == [
        "epoch 1 of 10 done, about 15 min 00 s left.",
        "epoch 2 of 10 done, about 2 min 40 s left.",
        "epoch 3 of 10 done, about 3 min 30 s left.",
        "epoch 5 of 10 done, about 35.0 s left.",
    ]


def test_the_time_left_is_shown_seldom_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr("tarantella.cli.time_left.time.monotonic", lambda: clock)
    shown: list[str] = []
    left = TimeLeft(shown.append, always=False)
    for number in range(1, 9):
        clock += 25.0
        left.hear(epoch(number, 25.0))
    assert [line.split()[1] for line in shown] == ["3", "6"]


def test_numbers_are_easy_to_read() -> None:
    assert [duration(number) for number in (3.21, 59.96, 3599.6, 90_000)] == [
        "3.2 s", "1 min 00 s", "1 h 00 min", "25 h 00 min",
    ]  # fmt: skip
    assert [rate(number) for number in (0.5, 12.34, 123_456)] == ["0.50", "12.3", "123,456"]
    assert [memory(number) for number in (730e6, 12.34e9)] == ["730 MB", "12.3 GB"]


def test_a_run_that_continues_with_fewer_ranks_shows_those() -> None:
    ranks = [measured(rank, compute=60.0 + 20 * rank) for rank in range(3)]
    record = record_of(*ranks, hosts=("node1", "node2", "node3"))
    record.begin(Ranks(("node1", "node2"), ("CPU",) * 2, (1,) * 2))
    lines = summary(record).splitlines()
    assert [line.split()[:2] for line in lines[2:4]] == [["0", "node1"], ["1", "node2"]]
    assert "slowest: rank 1 on host node2" in lines[4]
