"""Whole runs whose sums are TensorFlow's own collectives, here as a ring between CPUs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HOST = socket.gethostname()
LIMIT = 180  # seconds, for a machine that is busy with other things; a hang is what it catches
TRAINING = """
import os, signal, sys, time
from pathlib import Path

import tarantella as tnt
import keras
import numpy as np
import tensorflow as tf

steps = 0


def misbehave(values):
    global steps
    steps += 1
    if steps == 4 and tnt.get_rank() == 1:
        {misbehavior}
    return values


def loss(truth, prediction):
    values = tf.numpy_function(misbehave, [prediction], tf.float32)
    values = tf.stop_gradient(tf.ensure_shape(values, prediction.shape))
    return keras.losses.mean_squared_error(truth, prediction) * (1.0 + 0.0 * values[:, 0])


keras.utils.set_random_seed(1)
model = tnt.Model(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
model.compile("sgd", loss)
x = np.arange(60, dtype="float32").reshape(20, 3) / 60
model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, shuffle=False)
if tnt.is_master_rank():
    print(*np.concatenate([np.ravel(weight) for weight in model.get_weights()]))
"""


def run(
    folder: Path, misbehavior: str, *options: str, sums: str = "ring"
) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(TRAINING.replace("{misbehavior}", misbehavior))
    command = [sys.executable, "-m", "tarantella.cli", "-n", "2", *options]
    if sums == "ring":
        command.append("--no-gpu")
    return subprocess.run(
        [*command, "--", str(script)],
        env={**os.environ, "TNT_GPU_SUMS": sums},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def test_timeline_and_a_restart_after_a_killed_rank(tmp_path: Path) -> None:
    trace, first = tmp_path / "trace.json", tmp_path / "first"
    undisturbed = run(tmp_path, "pass", "--timeline", str(trace))
    assert (undisturbed.returncode, undisturbed.stderr) == (0, "")
    check_timeline(json.loads(trace.read_text())["traceEvents"])
    killed = "(first.touch(), os.kill(os.getpid(), 9)) if not first.exists() else None"
    result = run(tmp_path, killed.replace("first", f"Path({str(first)!r})"), "--max-restarts", "1")
    assert result.returncode == 0, result.stderr
    assert f"rank 1 on host {HOST}" in result.stderr
    assert "SIGKILL" in result.stderr
    for noise in ("0000 00:00:", "GRPC", "Collective", "Traceback"):
        assert noise not in result.stderr
    assert len(result.stdout.split()) == 4
    assert result.stdout == undisturbed.stdout  # to the last digit


def check_timeline(events: list[dict[str, Any]]) -> None:
    """Ten steps, each with all its phases and one sum."""
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for rank in range(2):
        of_rank = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        sums = [e for e in of_rank if lanes[rank, e["tid"]].startswith("gradients 1 (0.00 MB)")]
        assert [e["name"] for e in sums] == ["summing"] * 10
        assert all(e["args"] == {"bytes": 4 * 4} for e in sums)
        phases = [e["name"] for e in of_rank if lanes[rank, e["tid"]] == "steps"]
        for name in ("forward", "backward", "waiting for sums", "update"):
            assert phases.count(name) == 10


def test_a_rank_that_waits_in_a_sum_is_known_to(tmp_path: Path) -> None:
    result = run(tmp_path, "time.sleep(600)", "--stall-timeout", "1")
    assert result.returncode == 1
    warning, failure = result.stderr.splitlines()
    waits = "seconds, in a sum by TensorFlow's collectives of step 4, in fit (script.py:"
    assert warning.startswith("tarantella WARNING: Rank 0 has been waiting for ")
    assert waits in warning
    assert failure.startswith(f"tarantella: rank 1 on host {HOST} failed: others have waited for")
    assert waits in failure


def test_nccl_without_gpus_is_an_error(tmp_path: Path) -> None:
    result = run(tmp_path, "pass", sums="nccl")
    assert result.returncode == 2
    problem = "`--gpu-sums nccl` asks for: TensorFlow finds no GPU"
    assert f"{problem}. With `--gpu-sums auto` or `host`" in result.stderr
    assert problem in result.stderr.splitlines()[-1]
