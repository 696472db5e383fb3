"""A whole run on GPUs has a timeline, and gives the same bits after a restart."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import device
from test_device_sums_runs import HOST, TRAINING, check_timeline


def run(folder: Path, misbehavior: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(TRAINING.replace("{misbehavior}", misbehavior))
    return device.run(script, ranks=2, options=options)


def test_timeline_and_a_restart_after_a_killed_rank(tmp_path: Path) -> None:
    trace, first = tmp_path / "trace.json", tmp_path / "first"
    undisturbed = run(tmp_path, "pass", "--timeline", str(trace))
    assert undisturbed.returncode == 0, undisturbed.stderr
    check_timeline(json.loads(trace.read_text())["traceEvents"])
    path = f"Path({str(first)!r})"
    killed = f"({path}.touch(), os.kill(os.getpid(), 9)) if not {path}.exists() else None"
    result = run(tmp_path, killed, "--max-restarts", "1")
    assert result.returncode == 0, result.stderr
    assert f"rank 1 on host {HOST}" in result.stderr
    assert "SIGKILL" in result.stderr
    assert result.stdout == undisturbed.stdout  # to the last digit
