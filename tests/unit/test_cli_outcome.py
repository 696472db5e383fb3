"""The one message about a run that failed."""

from __future__ import annotations

import pytest

from tarantella.cli.outcome import Outcome
from tarantella.runtime.announce import ENDED, FAILED, FINISHED, STARTED, Announcement


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
        "the other ranks were ended."
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


def test_rank_that_left_early_with_status_zero() -> None:
    outcome = run_of(Announcement(ENDED, 1, "node1", 2))
    failure = outcome.end(0)
    assert failure is not None
    assert (failure.rank, failure.status) == (1, 1)


def test_ranks_of_which_nothing_was_heard() -> None:
    outcome = run_of(Announcement(FINISHED, 0, "node0", 1), Announcement(ENDED, 0, "node0", 1))
    failure = outcome.end(0)
    assert failure is not None
    assert failure.rank == 1


def test_abort_by_the_user() -> None:
    outcome = run_of()
    outcome.hear_abort(
        b"Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 7)\n"
    )
    failure = outcome.end(7)
    assert failure is not None
    assert (failure.rank, failure.host, failure.status) == (1, "node1", 7)


def test_process_that_hydra_saw_killed() -> None:
    outcome = run_of()
    outcome.hear_bad_termination(
        b"=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
        b"=   PID 101 RUNNING AT node1\n=   EXIT CODE: 9\n"
    )
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
