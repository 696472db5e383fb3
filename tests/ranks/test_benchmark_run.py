"""The benchmarks run, on real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OF_OTHER_RUNS = ("MPI", "PMI", "PYTEST", "TNT_")


@pytest.mark.long
def test_step_times_are_measured_on_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "bench.py"), "--quick", "--only", "step"]
    command += ["--models", "lenet5", "--candidates", "limit", "tarantella"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(OF_OTHER_RUNS)}
    run = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (line,) = [line for line in run.stdout.splitlines() if "tarantella over limit" in line]
    assert ">= 0.95" in line
    assert list(tmp_path.iterdir()) == []
