"""Which ranks are named when some wait for others that do not arrive."""

from __future__ import annotations

import time

import pytest

from tarantella.cli import stalls as module
from tarantella.cli.stalls import Stalls
from tarantella.runtime import times
from tarantella.runtime.announce import (
    ELSEWHERE,
    FINISHED,
    JOINED,
    JOINS,
    RESUMED,
    STOPPED,
    WAITS,
    Announcement,
)

GRADIENTS = "a sum of gradients of step 3"


def stalls_of(*news: Announcement, ranks: int = 3, warns: bool = True) -> Stalls:
    stalls = Stalls({rank: f"node{rank}" for rank in range(ranks)}, 60, warns)
    for each in news:
        stalls.hear(each)
    return stalls


def waits(rank: int, seconds: int = 61, where: str = GRADIENTS, place: str = "") -> Announcement:
    return Announcement(WAITS, rank, f"node{rank}", 1, status=seconds, cause=where, place=place)


def elsewhere(rank: int, where: str = "train.py:7") -> Announcement:
    return Announcement(ELSEWHERE, rank, f"node{rank}", 1, place=where)


def test_nobody_waits() -> None:
    stalls = stalls_of(elsewhere(0), elsewhere(1), elsewhere(2))
    assert stalls.warning() is None
    assert stalls.failure() is None


def test_one_does_something_else() -> None:
    stalls = stalls_of(waits(0), elsewhere(1), waits(2))
    assert stalls.warning() == (
        "Ranks 0, 2 have been waiting for 61 seconds, in a sum of gradients of step 3. "
        "Rank 1 on host node1 has not arrived: it is at train.py:7."
    )
    assert stalls.warning() is None  # once is enough
    assert stalls.failure() is None


def test_one_is_at_its_end() -> None:
    for end in (Announcement(FINISHED, 1, "node1", 1), elsewhere(1, "")):
        warning = stalls_of(waits(0), end, waits(2)).warning()
        assert warning is not None
        assert warning.endswith(
            "Rank 1 on host node1 has not arrived: it is at the end of its script."
        )


def test_one_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = stalls_of(waits(0), waits(2))
    assert stalls.warning() is None  # it may be about to
    monkeypatch.setattr(times, "TIME_FOR_REPORTS", -1.0)
    warning = stalls.warning()
    assert warning is not None
    assert "Rank 1 on host node1 has not arrived, and reports nothing: it may be stopped" in warning


def test_all_wait_for_each_other() -> None:
    stalls = stalls_of(waits(0), waits(1, where="a sum of metrics"), waits(2))
    warning = stalls.warning()
    assert warning is not None
    assert "Rank 1 has been waiting for 61 seconds, in a sum of metrics" in warning
    assert warning.endswith("they must do the same things, in the same order.")


EVALUATE = "evaluate (train.py:12)"


@pytest.mark.parametrize(
    ("others", "hint"),
    [
        ([elsewhere(1, ""), elsewhere(2, ""), elsewhere(3, "")],
         "Rank 0 is in evaluate (train.py:12), ranks 1-3 are not: call it on all ranks."),
        ([elsewhere(1, "save (train.py:9)"), elsewhere(2), elsewhere(3, "")],
         "Rank 0 is in evaluate (train.py:12), ranks 1-3 are not: all ranks must call it."),
        ([waits(1, place=EVALUATE), elsewhere(2), waits(3, place=EVALUATE)],
         "Ranks 0, 1, 3 are in evaluate (train.py:12), rank 2 is not: all ranks must call it."),
        # A rank that is in the same call is only slow.
        ([elsewhere(1, EVALUATE), elsewhere(2, ""), elsewhere(3, "")], ""),
        ([waits(1, place="fit (train.py:20)"), elsewhere(2, ""), elsewhere(3, "")], ""),
    ],
)  # fmt: skip
def test_a_call_that_only_some_ranks_make(others: list[Announcement], hint: str) -> None:
    warning = stalls_of(waits(0, place=EVALUATE), *others, ranks=4).warning()
    assert warning is not None
    assert "seconds, in a sum of gradients of step 3, in evaluate (train.py:12)" in warning
    assert warning.endswith(hint or ".")
    assert bool(hint) == ("call it" in warning)


def test_of_many_some_are_named() -> None:
    warning = stalls_of(waits(0), *map(elsewhere, range(1, 100)), ranks=100).warning()
    assert warning is not None
    assert "Rank 8 on host node8" in warning
    assert "Rank 9 " not in warning
    assert warning.endswith("; 91 more.")


def test_a_new_stall_is_told_of_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = stalls_of(waits(0), elsewhere(1), elsewhere(2))
    assert stalls.warning() is not None
    with monkeypatch.context() as patch:
        patch.setattr(times, "REPORT_IS_FRESH", -1.0)  # what was said is old
        assert stalls.warning() is None
    assert stalls.warning() is not None


def test_too_long_is_a_failure() -> None:
    stalls = stalls_of(waits(0, 601), elsewhere(1), waits(2, 601))
    failure = stalls.failure()
    assert failure is not None
    assert (failure.rank, failure.host, failure.status) == (1, "node1", 1)
    assert "it is at train.py:7" in failure.cause
    everyone = stalls_of(waits(0, 601), waits(1, 601), waits(2, 601)).failure()
    assert everyone is not None
    assert (everyone.rank, everyone.host) == (None, "")


def test_without_warnings_it_is_still_a_failure() -> None:
    stalls = stalls_of(waits(0, 601), elsewhere(1), waits(2, 601), warns=False)
    assert stalls.warning() is None
    assert stalls.failure() is not None


def test_ranks_that_wait_in_the_first_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = stalls_of(Announcement(JOINS, 0, "node0", 1), Announcement(JOINS, 2, "node2", 1))
    assert stalls.warning() is None
    now = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 70)
    assert stalls.warning() is None  # the others may be about to say something
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 80)
    warning = stalls.warning()
    assert warning is not None
    assert warning.startswith("Ranks 0, 2 have been waiting for 80 seconds, in the start of comm")
    assert "Rank 1 on host node1 has not arrived: it may not have reached `import" in warning
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 610)
    failure = stalls.failure()
    assert failure is not None
    assert failure.rank == 1
    for rank in (0, 2):
        stalls.hear(Announcement(JOINED, rank, f"node{rank}", 1))
    assert stalls.failure() is None


def stopped(rank: int) -> Announcement:
    return Announcement(STOPPED, rank, f"node{rank}", 17, status=19)


def test_one_that_is_stopped_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the start of communication, in which it could say nothing itself."""
    joins = [Announcement(JOINS, rank, f"node{rank}", 1) for rank in range(3)]
    stalls = stalls_of(*joins, stopped(1))
    now = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 61)
    assert stalls.warning() == (
        "Ranks 0, 2 have been waiting for 61 seconds, in the start of communication. Rank 1 on "
        "host node1 has not arrived: it is stopped by SIGSTOP: `kill -CONT 17` there resumes it."
    )
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 601)
    failure = stalls.failure()
    assert failure is not None
    assert failure.rank == 1


def test_one_that_is_stopped_while_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = stalls_of(stopped(2))
    now = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 59)
    assert stalls.warning() is None
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 70)
    stalls.warning()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 80)
    assert stalls.failure() is None
    stalls.hear(Announcement(RESUMED, 2, "node2", 17))
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 700)
    assert stalls.failure() is None
    stalls.hear(stopped(2))
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 1301)
    failure = stalls.failure()
    assert failure is not None
    assert (failure.rank, failure.host) == (2, "node2")


def test_all_are_stopped_by_who_suspends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = stalls_of(*(stopped(rank) for rank in range(3)))
    now = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 6000)
    assert stalls.warning() is None
    assert stalls.failure() is None
