"""Telling a rank from a serial run by the environment."""

from __future__ import annotations

import os

import pytest

from tarantella.runtime.announce import FAILED, RUN_ID, Announcement, announce, parse
from tarantella.runtime.launcher import find_launch, rank_of_parent


@pytest.mark.parametrize(
    ("environ", "rank", "size"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, 1, 2),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "3"}, 3, 4),
        ({"PMIX_RANK": "1"}, 1, None),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "8"}, 2, 8),
    ],
)
def test_started_by_a_launcher(environ: dict[str, str], rank: int, size: int | None) -> None:
    launch = find_launch(environ)
    assert launch is not None
    assert (launch.rank, launch.size) == (rank, size)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},  # the shell of a job
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_serial_start(environ: dict[str, str]) -> None:
    assert find_launch(environ) is None


def test_process_started_by_a_rank() -> None:
    assert rank_of_parent({"TNT_RANK_PROCESS": "1:2/4"}) == (2, 4)
    assert rank_of_parent({"TNT_RANK_PROCESS": f"{os.getpid()}:2/4"}) is None
    assert rank_of_parent({}) is None


def test_announcements_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    news = Announcement(FAILED, 1, "node", 5, status=3, cause="a \n 'cause' \u00e9\udcff")
    reader, writer = os.pipe()
    monkeypatch.setenv(RUN_ID, "abc")
    announce(news, writer)
    os.close(writer)
    line = os.read(reader, 10_000)
    os.close(reader)
    assert line.count(b"\n") == 1
    assert parse(line, "abc") == news


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setenv(RUN_ID, "abc")
    announce(Announcement(FAILED, 1, "node", 5), writer)
    monkeypatch.delenv(RUN_ID)
    announce(Announcement(FAILED, 1, "node", 5), -1)
    os.close(writer)
