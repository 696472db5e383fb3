"""The one message about a run that failed."""

from __future__ import annotations

import time

import pytest

from tarantella.cli.gpu_shortage import reminders_of_ranks
from tarantella.cli.outcome import Outcome
from tarantella.runtime.announce import (
    ENDED,
    FAILED,
    FINISHED,
    ON_CPU,
    SHORT_OF_MEMORY,
    STARTED,
    Announcement,
)


def run_of(*news: Announcement, ranks: int = 2) -> Outcome:
    outcome = Outcome(ranks)
    for rank in range(ranks):
        outcome.hear(Announcement(STARTED, rank, f"node{rank}", 100 + rank))
    for each in news:
        outcome.hear(each)
    return outcome


def test_every_rank_ended_well() -> None:
    outcome = run_of(Announcement(ENDED, 0, "node0", 1), Announcement(ENDED, 1, "node1", 2))
    assert outcome.end(0) is None


def test_ranks_without_the_gpus_that_were_planned_are_counted_on_each_host() -> None:
    outcome = run_of(
        Announcement(ON_CPU, 2, "node1", 3, status=1),
        Announcement(ON_CPU, 0, "node0", 1, status=0),
        Announcement(ON_CPU, 1, "node0", 2, status=0),
        ranks=3,
    )
    assert reminders_of_ranks(outcome.on_cpu) == (
        "2 ranks on host node0 used the CPU, and 2 GPUs stood idle: TensorFlow found no GPU "
        "there. Use --gpu to make this an error.",
        "1 rank on host node1 used the CPU, and 1 GPU stood idle: TensorFlow found only 1 GPU "
        "there. Use --gpu to make this an error.",
    )
    assert outcome.failure is None


def test_the_first_failure_is_the_cause() -> None:
    outcome = run_of(
        Announcement(FAILED, 1, "node1", 2, status=1, cause="ValueError: bad value"),
        Announcement(ENDED, 1, "node1", 2, status=1),
        Announcement(FAILED, 0, "node0", 1, status=5, cause="something else"),
    )
    failure = outcome.end(5)
    assert failure is not None
    assert failure.status == 1
    assert outcome.message() == (
        "rank 1 on host node1 failed: ValueError: bad value (exit status 1); "
        f"the other ranks were ended ({failure.when})."
    )
    assert abs(time.mktime(time.strptime(failure.when, "%Y-%m-%d %H:%M:%S")) - time.time()) < 3600


def test_memory_is_named_where_it_is_the_likely_cause() -> None:
    outcome = run_of(
        Announcement(SHORT_OF_MEMORY, 1, "node1", 2, cause="memory ran out, as it does"),
        Announcement(ENDED, 1, "node1", 2, status=-6),
        Announcement(ENDED, 0, "node0", 1, status=-6),
    )
    assert outcome.end(0) is not None
    assert outcome.message().startswith(
        "rank 1 on host node1 failed: it was killed by signal 6 (SIGABRT: memory ran out, as it "
        "does); the other ranks were ended ("
    )


@pytest.mark.parametrize(
    ("ended", "status", "cause"),
    [(3, 3, "exit status 3"), (-9, 137, "SIGKILL"), (-11, 139, "SIGSEGV"), (-63, 191, "signal 63")],
)
def test_process_that_just_ended(ended: int, status: int, cause: str) -> None:
    outcome = run_of(Announcement(ENDED, 0, "node0", 1, status=ended), ranks=1)
    failure = outcome.end(0)
    assert failure is not None
    assert failure.status == status
    assert cause in outcome.message()
    assert "other ranks" not in outcome.message()


@pytest.mark.parametrize(
    ("news", "message"),
    [
        (  # MPICH gives it the status of the one that called MPI_Abort
            [
                Announcement(ENDED, 0, "node0", 1, status=7),
                Announcement(FAILED, 1, "node1", 2, status=7, cause="it called MPI_Abort"),
            ],
            "rank 1 on host node1 failed: it called MPI_Abort",
        ),
        (  # what its victims say is not the cause
            [
                Announcement(ENDED, 1, "node1", 2, status=3),
                Announcement(FAILED, 0, "node0", 1, status=15, cause="Fatal error in Allreduce"),
            ],
            "rank 1 on host node1 failed: it ended with exit status 3",
        ),
    ],
)
def test_rank_that_ends_without_a_word_before_another(
    news: list[Announcement], message: str
) -> None:
    outcome = run_of(*news)
    outcome.end(news[-1].status)
    assert message in outcome.message()


def test_status_that_nobody_explains() -> None:
    outcome = run_of(Announcement(ENDED, 1, "node1", 2, status=3))
    outcome.hear_early_end(5)
    assert outcome.failure is None
    outcome.forgive(-2)
    outcome.hear_early_end(5)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.status) == (1, 3)


def test_rank_that_left_early_with_status_zero() -> None:
    outcome = run_of(Announcement(ENDED, 1, "node1", 2))
    failure = outcome.end(0)
    assert failure is not None
    assert (failure.rank, failure.status) == (1, 1)


def test_rank_that_left_long_before_the_others() -> None:
    outcome = run_of(Announcement(ENDED, 1, "node1", 2))
    outcome.hear_early_end(60)
    assert outcome.failure is None
    outcome.hear_early_end(-1)
    assert outcome.failure is not None
    assert outcome.failure.rank == 1


def test_rank_that_someone_else_has_ended() -> None:
    outcome = run_of(Announcement(ENDED, 1, "node1", 2, status=-15, cause="it was asked to"))
    outcome.hear_early_end(60)
    assert outcome.failure is None
    outcome.hear_early_end(-1)
    assert "rank 1 on host node1 failed: it was killed by signal 15" in outcome.message()


def test_ranks_that_all_leave_without_a_word() -> None:
    outcome = run_of(Announcement(ENDED, 1, "node1", 2), Announcement(ENDED, 0, "node0", 1))
    outcome.hear_early_end(-1)
    assert outcome.end(0) is None


def test_host_of_which_nothing_is_heard_any_more() -> None:
    outcome = run_of(Announcement(ENDED, 0, "node0", 1))
    outcome.hear_silence(60)
    assert outcome.failure is None
    outcome.hear_silence(-1)
    assert "rank 1 on host node1 failed: nothing was heard" in outcome.message()


def test_time_in_which_nobody_listened_does_not_count() -> None:
    outcome = run_of(Announcement(ENDED, 0, "node0", 1))
    outcome.forgive(100)
    outcome.hear_silence(-50)
    outcome.hear_early_end(-50)
    assert outcome.failure is None


def test_programs_that_are_no_scripts_end_when_they_like() -> None:
    outcome = Outcome(2, scripts=False)
    for rank in (0, 1):
        outcome.hear(Announcement(STARTED, rank, "node", 100))
    outcome.hear(Announcement(ENDED, 1, "node", 2))
    outcome.hear_early_end(-1)
    assert outcome.failure is None


def test_launcher_that_had_to_be_killed_after_a_good_end() -> None:
    outcome = run_of(Announcement(ENDED, 0, "node0", 1), Announcement(ENDED, 1, "node1", 2))
    assert outcome.end(-9) is None


def test_rank_that_does_not_start() -> None:
    outcome = Outcome(2)
    outcome.hear(Announcement(STARTED, 0, "node0", 1))
    outcome.hear_no_start({0: "node0", 1: "node1"}, 60)
    assert "rank 1 on host node1 failed: it did not start within 60 seconds" in outcome.message()


def test_ranks_of_which_nothing_was_heard() -> None:
    outcome = run_of(Announcement(FINISHED, 0, "node0", 1), Announcement(ENDED, 0, "node0", 1))
    failure = outcome.end(0)
    assert failure is not None
    assert failure.rank == 1


def test_abort_by_the_user() -> None:
    outcome = run_of()
    outcome.hear_abort(rank=1, code=7)
    failure = outcome.end(7)
    assert failure is not None
    assert (failure.rank, failure.host, failure.status) == (1, "node1", 7)


def test_process_that_hydra_saw_killed() -> None:
    outcome = run_of()
    outcome.hear_killed(None, "node1", 9)
    failure = outcome.end(9)
    assert failure is not None
    assert failure.status == 137
    assert "a rank on host node1 failed" in outcome.message()


def test_launcher_that_failed_by_itself() -> None:
    outcome = run_of()
    failure = outcome.end(255)
    assert failure is not None
    assert failure.status == 255
    assert "mpiexec" in outcome.message()
