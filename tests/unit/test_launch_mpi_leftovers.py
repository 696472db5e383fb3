"""Files that MPI libraries leave behind, on a machine made of files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tarantella.launch.mpi_leftovers import remove_leftovers


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, Path]:
    folders = {name: tmp_path / name for name in ("memory", "temporary", "proc")}
    for folder in folders.values():
        folder.mkdir()
    return folders


def test_folders_of_launchers_that_are_gone_are_removed(machine: dict[str, Path]) -> None:
    (machine["proc"] / "31").mkdir()
    for name in ("ompi.31", "ompi.32", "prted.33", "mine.34", "ompi.35.notes", "ompi.36"):
        folder = machine["temporary"] / name / "1"
        folder.mkdir(parents=True)
        (folder / "file").touch()
    yesterday = time.time() - 24 * 60 * 60
    os.utime(machine["temporary"] / "ompi.36", (yesterday, yesterday))
    remove_leftovers(60, **machine)
    left = sorted(folder.name for folder in machine["temporary"].iterdir())
    assert left == ["mine.34", "ompi.31", "ompi.35.notes", "ompi.36"]


def test_shared_memory_that_nobody_uses_is_removed(machine: dict[str, Path]) -> None:
    for name in ("sm_segment.node1.0.1", "mpich_shm_1", "other"):
        (machine["memory"] / name).touch()
    process = machine["proc"] / "31"
    (process / "fd").mkdir(parents=True)
    (process / "stat").write_text("31 (python) S 1 31")
    (process / "maps").write_text(f"7f0-7f1 rw-s 0 0:1 5 {machine['memory']}/mpich_shm_1\n")
    remove_leftovers(60, **machine)
    assert sorted(file.name for file in machine["memory"].iterdir()) == ["mpich_shm_1", "other"]
