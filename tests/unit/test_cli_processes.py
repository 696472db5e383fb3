"""Which processes belong to a run, and which of them to send a signal so that all end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tarantella.cli.processes import (
    Process,
    known_as,
    of_run,
    of_script,
    own_processes,
    to_signal,
)
from tarantella.launch.process_identity import identity


def test_commands_are_asked_and_who_has_none() -> None:
    """One run was started by a command that is here, one by a command elsewhere, one by mpiexec."""
    here = {"TNT_COMMAND": "10"}
    elsewhere = {"TNT_COMMAND": "99"}
    found = [
        Process(11, 10, here),
        Process(12, 11, here),
        Process(21, 20, elsewhere),
        Process(22, 21, elsewhere),
        Process(31, 30, {"PMI_RANK": "0"}),
    ]
    assert to_signal(found) == [10, 21, 31]


def test_processes_are_known_by_their_environment() -> None:
    environ = {"TNT_RUN_ID": "run-of-a-test", "TNT_SCRIPT": "/no/such/script.py"}
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert [each.pid for each in of_run("run-of-a-test")] == [process.pid]
        assert of_run("run-of-a-test", except_launcher=process.pid) == []
        assert [each.pid for each in of_script("/no/such/script.py")] == [process.pid]
        assert of_script("/no/such/other.py") == []
        known = identity(process.pid)
        assert [each.pid for each in known_as([known])] == [process.pid]
        assert known_as([known + "1", ""]) == []
        process.communicate(b"\n")


def test_a_process_does_not_find_itself() -> None:
    import os

    assert os.getpid() not in [each.pid for each in own_processes()]
    assert os.getppid() not in [each.pid for each in own_processes()]


def test_module_of_plain_mpiexec_is_found_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "package" / "train.py"
    file.parent.mkdir()
    file.write_text("print(flush=True); input()")
    with subprocess.Popen(
        [sys.executable, "-m", "package.train", str(tmp_path / "other.py")],
        cwd=tmp_path,
        env={"PMI_RANK": "0", "PMI_SIZE": "2"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert [each.pid for each in of_script(str(file))] == [process.pid]
        assert of_script(str(tmp_path / "train.py")) == []
        process.communicate(b"\n")
