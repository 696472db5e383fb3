"""The benchmarks run, on real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OF_OTHER_RUNS = ("MPI", "PMI", "PYTEST", "TNT_")


def run_benchmark(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(OF_OTHER_RUNS)}
    name, *options = words
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *options],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.long
def test_step_times_are_measured_on_two_ranks(tmp_path: Path) -> None:
    options = ["--models", "lenet5", "--candidates", "limit", "barrier", "tarantella"]
    run = run_benchmark(tmp_path, "bench.py", "--quick", "--only", "step", *options)
    assert run.returncode == 0, run.stdout + run.stderr
    (line,) = [line for line in run.stdout.splitlines() if "tarantella over limit" in line]
    assert ">= 0.95" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_cost_of_a_step_is_measured_by_part(tmp_path: Path) -> None:
    run = run_benchmark(tmp_path, "bench.py", "--quick", "--only", "cost")
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("step cost")]
    assert len(lines) == 8
    assert all(" us " in line for line in lines if "tarantella over limit" not in line)


def test_the_benchmark_of_gpus_runs_without_one(tmp_path: Path) -> None:
    options = ["--models", "mlp", "--precision", "mixed_float16", "--sums", "limit", "nccl"]
    options += ["--device", "cpu", "--rounds", "1", "--output", "gpu.json"]
    run = run_benchmark(tmp_path, "gpu.py", *options)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [line.split(" | ") for line in run.stdout.splitlines() if line.startswith("| mlp ")]
    assert [row[2] for row in rows] == ["limit", "nccl"]
    assert all(row[3].endswith(" ms") and row[5].endswith(" s") for row in rows), run.stderr
    figures = json.loads((tmp_path / "gpu.json").read_text())["figures"]
    (ratio,) = [figure["median"] for figure in figures if figure.get("over") == "limit"]
    assert rows[1][4] == f"{ratio:.2f}"
