"""The timeline of ranks on two hosts, whose gradients are summed in the background."""

from __future__ import annotations

import json
from typing import Any

from commands import Cluster

SCRIPT = """
import keras
import numpy as np
import tarantella as tnt

keras.utils.set_random_seed(1)
layers = [keras.layers.Dense(300) for _ in range(3)]
model = tnt.Model(keras.Sequential([keras.Input((300,)), *layers]))
model.compile("sgd", "mse")
x = np.ones((8, 300), np.float32)
model.fit(x, x, batch_size=4, epochs=2, verbose=0)
"""
STEPS = 4
MESSAGES = 3  # each layer has more than 256 kB


def test_timeline_of_two_hosts(cluster: Cluster) -> None:
    trace = cluster.folder / "trace.json"
    options = ["--fusion-threshold", "256", "--timeline", str(trace)]
    result = cluster.run(*options, "--", cluster.script(SCRIPT))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    events = json.loads(trace.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0 on node1", "rank 1 on node2"]
    for number in range(1, MESSAGES + 1):
        first, second = (reductions(events, rank, f"gradients {number} (") for rank in range(2))
        assert len(first) == len(second) == STEPS
        for one, other in zip(first, second, strict=True):
            # Nobody has a sum before all have met: so the clocks are the same.
            assert max(one[0], other[0]) < min(one[1], other[1])


def reductions(events: list[dict[str, Any]], rank: int, lane: str) -> list[tuple[float, float]]:
    """When a rank has handed a message in, and when it had the sum."""
    of_rank = [event for event in events if event["pid"] == rank]
    lanes = {e["tid"]: e["args"]["name"] for e in of_rank if e["name"] == "thread_name"}
    spans = [e for e in of_rank if e["ph"] == "X" and lanes[e["tid"]].startswith(lane)]
    begins = sorted(e["ts"] for e in spans if e["name"] == "waiting")
    ends = sorted(e["ts"] + e["dur"] for e in spans if e["name"] == "reducing")
    return list(zip(begins, ends, strict=True))
