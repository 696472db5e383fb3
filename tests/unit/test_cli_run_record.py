"""The record of a run: what is kept of what ranks announce, also in runs of days."""

from __future__ import annotations

import json

import pytest

from tarantella.cli.run_record import (
    FAILURE,
    RESTART,
    WARNING,
    Ranks,
    RunRecord,
    Thinned,
    Training,
)
from tarantella.runtime.announce import DESCRIBED, EPOCH, MEASURED, Announcement
from tarantella.runtime.meter import COMPUTE, INPUT, PARTS, SUMS


def record(ranks: int = 2) -> RunRecord:
    made = RunRecord(("train.py",), ("-n", str(ranks)))
    made.begin(Ranks(("here",) * ranks, ("CPU",) * ranks, (1,) * ranks))
    return made


def totals(rank: int, seconds: float, steps: int, *, memory: int = 10) -> Announcement:
    data = {
        "seconds": seconds,
        "steps": steps,
        "samples": 8 * steps,
        "parts": {INPUT: seconds / 4, COMPUTE: seconds / 2},
        "memory": memory,
        "gpu_memory": None,
        "cpu_seconds": seconds / 2,
    }
    return Announcement(MEASURED, rank, "here", 1, data=json.loads(json.dumps(data)))


def epoch(number: int, fit: int = 1) -> Announcement:
    data = {"fit": fit, "number": number, "epochs": 9, "steps": 3, "seconds": 1.5}
    return Announcement(EPOCH, 0, "here", 1, data={**data, "logs": {"loss": 1 / number}})


def test_totals_of_a_rank_become_spans() -> None:
    kept = record()
    for announcement in (totals(0, 4.0, 10), totals(1, 4.0, 10), totals(0, 6.0, 30)):
        kept.hear(announcement)
    first, second = kept.spans(0)
    assert (first.seconds, first.steps, first.samples) == (4.0, 10, 80)
    assert (second.seconds, second.steps, second.samples) == (2.0, 20, 160)
    assert second.parts == dict.fromkeys(PARTS, 0.0) | {INPUT: 0.5, COMPUTE: 1.0}
    assert second.training_seconds == pytest.approx(1.5)
    assert len(kept.spans(1)) == 1
    assert kept.measured_ranks() == (0, 1)


def test_a_lost_announcement_loses_nothing() -> None:
    kept = record()
    kept.hear(totals(0, 4.0, 10))
    kept.hear(totals(0, 9.0, 50))  # the one in between was torn
    total = kept.totals()[0]
    assert (total.seconds, total.steps) == (9.0, 50)
    assert 1 not in kept.totals()


def test_training_is_that_of_all_ranks_which_take_their_steps_together() -> None:
    kept = record(3)
    kept.hear(totals(2, 9.0, 0))
    assert kept.training() is None
    kept.hear(totals(0, 4.0, 10))
    kept.hear(totals(1, 8.0, 9))
    training = kept.training()
    assert training == Training(steps=10, samples=152, seconds=6.0)
    assert training.steps_per_second == pytest.approx(10 / 6)
    assert training.samples_per_second == pytest.approx(152 / 6)


def test_a_restarted_run_continues_its_record() -> None:
    kept = record()
    kept.hear(totals(0, 4.0, 10, memory=30))
    kept.hear(epoch(1))
    kept.hear(epoch(1, fit=2))
    kept.note_restart("rank 1 on host here failed: it was killed.")
    kept.begin(Ranks(("here",), ("CPU",), (1,)))
    kept.hear(totals(0, 3.0, 5, memory=20))
    kept.hear(epoch(2))
    total = kept.totals()[0]
    assert (total.seconds, total.steps, total.memory) == (7.0, 15, 30)
    assert [each.fit for each in kept.epochs] == [1, 2, 3]
    kept.end("rank 0 on host here failed.")
    assert [event.kind for event in kept.events] == [RESTART, FAILURE]
    assert (kept.restarts, kept.failure) == (1, "rank 0 on host here failed.")


def test_a_run_of_days_keeps_a_bounded_record() -> None:
    kept = record(64)
    for number in range(1, 10_001):
        kept.hear(totals(3, 5.0 * number, 2 * number))
        kept.hear(epoch(number))
        kept.note(WARNING, str(number))
    spans = kept.spans(3)
    assert 150 < len(spans) <= 312
    total = kept.totals()[3]
    assert (total.seconds, total.steps) == (50_000.0, 20_000)
    lengths = {span.seconds for span in spans[:-1]}
    assert len(lengths) == 1  # the beginning is as fine as the end
    assert 1000 <= len(kept.epochs) <= 2000
    assert kept.epochs[-1].number == 10_000
    texts = [event.text for event in kept.events]
    assert len(texts) == 500
    assert (texts[0], texts[-1]) == ("1", "10000")


def test_items_are_merged_in_order() -> None:
    thinned: Thinned[str] = Thinned(4, lambda first, second: first + second)
    for letter in "abcdefghijk":
        thinned.add(letter)
    assert thinned.items() == ("abcd", "efgh", "ijk")


def test_the_master_tells_versions_and_engine() -> None:
    kept = record()
    data = {"versions": {"Keras": "3.15.1"}, "engine": "NCCL", "unseen": ["sums"]}
    kept.hear(Announcement(DESCRIBED, 0, "here", 1, data=data))
    assert kept.versions == {"Keras": "3.15.1"}
    assert (kept.engine, kept.unseen) == ("NCCL", {SUMS})
