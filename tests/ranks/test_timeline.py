"""The timeline of a real run; and with it, that gradients travel while others are computed."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT = 240  # seconds, for a machine that is busy with other things
SCRIPT = """
import time
import keras
import numpy as np
import tensorflow as tf
import tarantella as tnt
from tarantella.graph import host_channel
from tarantella.runtime.timeline import timeline

host_channel.ranks_have_spare_cores = lambda: True  # else, all is summed after the backward pass

steps = 0


def late(gradient):
    # The gradient of the first layer is not computed before the sum of the last one's is there.
    global steps
    steps += 1
    deadline = time.monotonic() + 60
    while len(sums_of_last_layer()) < steps and time.monotonic() < deadline:
        time.sleep(0.01)
    return gradient


def sums_of_last_layer():
    spans = list(timeline().spans)
    return [s for s in spans if s.lane.startswith("gradients 1 ") and s.name == "reducing"]


@tf.custom_gradient
def late_backwards(x):
    def gradient(upstream):
        waited = tf.numpy_function(late, [upstream], tf.float32, stateful=False)
        return tf.ensure_shape(waited, upstream.shape)

    return tf.identity(x), gradient


class LateBackwards(keras.layers.Layer):
    def call(self, x):
        return late_backwards(x)


inputs = keras.Input((64,))
first = keras.layers.Dense(64)(inputs)
last = keras.layers.Dense(64)(LateBackwards()(first))
model = tnt.Model(keras.Model(inputs, last))
model.compile("sgd", "mse", metrics=["mae"])
x = np.ones((8, 64), np.float32)
model.fit(x, x, batch_size=4, epochs=2, verbose=0, validation_data=(x, x))
"""
PHASES = ["input", "forward", "backward", "waiting for sums", "update", "between steps"]


def test_timeline_of_a_run(tmp_path: Path) -> None:
    script, trace = tmp_path / "script.py", tmp_path / "trace.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "tarantella.cli", "-n", "2", "--no-gpu"]
    command += ["--fusion-threshold", "1", "--timeline", str(trace), "--", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (result.returncode, result.stderr) == (0, "")
    events = json.loads(trace.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [name.split(" on ")[0] for name in names] == ["rank 0", "rank 1"]
    for rank in range(2):
        of_rank = [event for event in events if event["pid"] == rank]
        check_phases(spans_in("steps", of_rank))
        check_overlap(of_rank)


def spans_in(lane: str, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is in the lane whose name begins so, in the order of time."""
    numbers = {
        e["tid"]
        for e in events
        if e["name"] == "thread_name" and e["args"]["name"].startswith(lane)
    }
    found = [e for e in events if e["ph"] == "X" and e["tid"] in numbers]
    return sorted(found, key=lambda event: event["ts"])


def check_phases(spans: list[dict[str, Any]]) -> None:
    """Four steps, with all their phases, and twice two of validation."""
    names = [span["name"] for span in spans]
    assert [name for name in names if name == "evaluation"] == ["evaluation"] * 4
    training = [name for name in names if name in PHASES[1:5]]
    assert training == PHASES[1:5] * 4
    assert names[:6] == [PHASES[5], *PHASES[:5]]
    for before, after in itertools.pairwise(spans):
        assert before["ts"] + before["dur"] <= after["ts"] + 0.01


def check_overlap(events: list[dict[str, Any]]) -> None:
    """The sum of the last layer's gradient is there before that of the first layer is computed."""
    backward = [s for s in spans_in("steps", events) if s["name"] == "backward"][-1]
    reducing = [s for s in spans_in("gradients 1 ", events) if s["name"] == "reducing"][-1]
    assert reducing["args"] == {"bytes": 64 * 64 * 4}
    assert reducing["ts"] + reducing["dur"] < backward["ts"] + backward["dur"]
