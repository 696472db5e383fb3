"""The messages of launchers among what ranks print."""

from __future__ import annotations

import pytest

from tarantella.cli.launcher_messages import LauncherMessages
from tarantella.cli.outcome import Outcome
from tarantella.cli.streams import StreamFilter
from tarantella.runtime.announce import ENDED, STARTED, Announcement

RULE = "-" * 74 + "\n"
HYDRA_RULE = "\n" + "=" * 83 + "\n"
MPICH = (
    f"{HYDRA_RULE}=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
    "=   PID 12 RUNNING AT node2\n=   EXIT CODE: 9\n=   CLEANING UP REMAINING PROCESSES\n"
    f"=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES{HYDRA_RULE}"
    "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
    "This typically refers to a problem with your application.\n"
    "Please see the FAQ page for debugging suggestions\n"
)
INTEL = (
    f"{HYDRA_RULE}=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
    f"=   RANK 2 PID 12 RUNNING AT node2\n=   KILLED BY SIGNAL: 9 (Killed){HYDRA_RULE}"
)
OPEN_MPI = (
    f"{RULE}prterun noticed that process rank 3 with PID 267 on node node2 exited on\n"
    f"signal 9 (Killed).\n{RULE}\0"
)
OPEN_MPI_ABORT = (
    f"{RULE}MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD\n"
    "  Proc: [[37352,1],3]\n  Errorcode: 5\n\n"
    f"NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.\n{RULE}"
)
OPEN_MPI_LOST_PEER = (
    "[node1:00000] *** An error occurred in Socket closed\n"
    "[node1:00000] *** on a NULL communicator\n"
    "[node1:00000] ***    and MPI will try to terminate your MPI job as well)\n"
)


def filtered(text: str, outcome: Outcome, stream: int, ending: bool = False) -> str:
    """What remains of a text that comes in two pieces."""
    words = LauncherMessages(outcome, ["node1.example.org"], lambda: ending)
    stream_filter = StreamFilter(words.in_output() if stream == 1 else words.in_errors())
    half = len(text) // 2
    shown = [stream_filter.feed(piece.encode()) for piece in (text[:half], text[half:])]
    return b"".join([*shown, stream_filter.flush()]).decode()


@pytest.mark.parametrize(
    ("banner", "stream", "rank"),
    [(MPICH, 1, None), (INTEL, 1, None), (OPEN_MPI, 2, 3)],
    ids=["mpich", "intel", "open-mpi"],
)
def test_banner_about_a_killed_rank_is_heard_and_not_shown(
    banner: str, stream: int, rank: int | None
) -> None:
    outcome = Outcome(4)
    assert filtered(f"before{banner}after\n", outcome, stream) == "beforeafter\n"
    failure = outcome.end(1)
    assert failure is not None
    assert (failure.rank, failure.host, failure.status) == (rank, "node2", 137)


def test_what_open_mpi_says_of_a_race_in_itself() -> None:
    line = "[node1:00089] plm:ssh: Warning: setpgid(92,92) failed in parent with errno=...\n"
    assert filtered(line, Outcome(4), 2) == ""


MPICH_ABORT = "Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM, 7)\n"
MPICH_ERROR = "Abort(69) on node 1 (rank 1 in comm 0): Fatal error in internal_Init: Other error\n"


def test_abort_under_mpich() -> None:
    outcome = Outcome(2)
    outcome.hear(Announcement(STARTED, 1, "node1", 12))
    assert filtered(MPICH_ABORT, outcome, 2) == ""
    failure = outcome.end(7)
    assert failure is not None
    assert (failure.rank, failure.host, failure.status) == (1, "node1", 7)


def test_error_in_mpich_is_shown() -> None:
    outcome = Outcome(2)
    assert filtered(MPICH_ERROR, outcome, 2) == MPICH_ERROR
    assert outcome.failure is None


def test_abort_under_open_mpi() -> None:
    outcome = Outcome(4)
    outcome.hear(Announcement(STARTED, 3, "node2", 12))
    assert filtered(OPEN_MPI_ABORT, outcome, 2) == ""
    assert outcome.message().startswith(
        "rank 3 on host node2 failed: it called MPI_Abort (exit status 5); "
        "the other ranks were ended ("
    )


def test_rank_that_lost_another_is_not_the_cause() -> None:
    outcome = Outcome(2)
    outcome.hear(
        Announcement(
            ENDED, 0, "node1", 1, status=14, cause="it lost its connection to another rank"
        )
    )
    assert filtered(OPEN_MPI_LOST_PEER, outcome, 2) == ""
    assert outcome.failure is None
    outcome.hear(Announcement(ENDED, 1, "node2", 1, status=-9))
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.status) == (1, 137)


def test_rank_that_lost_another_is_the_cause_if_there_is_no_other() -> None:
    outcome = Outcome(1)
    outcome.hear(
        Announcement(
            ENDED, 0, "node1", 1, status=14, cause="it lost its connection to another rank"
        )
    )
    failure = outcome.end(14)
    assert failure is not None
    assert (failure.rank, failure.status) == (0, 14)


@pytest.mark.parametrize(
    "line", ["[node1:00012] PMIX ERROR: x\n", "[mpiexec@node1] x\n", "[cli_0]: readline failed\n"]
)
def test_lines_are_shown_unless_the_run_goes_down(line: str) -> None:
    assert filtered(line, Outcome(2), 2) == line
    assert filtered(line, Outcome(2), 2, ending=True) == ""


@pytest.mark.parametrize(
    "text", [f"{RULE}a table\n{RULE}", "[node1] 3 of 5\n", "a\0b", "Abort(ed)\n"]
)
def test_what_ranks_print_stays(text: str) -> None:
    assert filtered(text, Outcome(2), 2, ending=True) == text
