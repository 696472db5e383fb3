"""Step time of training on two ranks, over that of two processes that do not communicate.

Two processes that train on half a batch each and never talk are as fast as two ranks can be:
the limit. Both candidates run in the same two processes, alternately, with one compute thread
each: a plain Keras model on half the batch, and a tnt.Model on the whole one. A round's figure
is the median of its steps, on the slower of the two; the result is the median of the rounds.

    python benchmarks/step_time.py                  # LeNet-5 and ResNet-50
    python benchmarks/step_time.py --models lenet5 --rounds 5 --fusion-threshold 1024
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

from common import compiled, is_rank, lenet5, on_ranks, step_times

RANKS = 2
# Model: global batch, steps to warm up with, steps to measure.
MODELS = {"lenet5": (256, 20, 100), "resnet50": (32, 4, 15)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fusion-threshold", type=int, metavar="KB")
    options = parser.parse_args()
    if is_rank():
        for model in options.models:
            compare(model, options.rounds)
        return
    fusion = options.fusion_threshold
    threshold = [] if fusion is None else ["--fusion-threshold", str(fusion)]
    command = [*on_ranks(RANKS, *threshold, "-x", "TNT_THREADS=1"), *sys.argv]
    os.execv(command[0], command)


def compare(name: str, rounds: int) -> None:
    """Measures both candidates alternately and prints a line of figures."""
    import tarantella as tnt

    batch, warm_up, steps = MODELS[name]
    candidates = {
        "limit": (compiled(make(name)), batch // RANKS),
        "tarantella": (compiled(tnt.Model(make(name))), batch),
    }
    times: dict[str, list[float]] = {kind: [] for kind in candidates}
    for _ in range(rounds):
        for kind, (model, size) in candidates.items():
            median = median_step(model, size, warm_up, steps)
            times[kind].append(tnt.allreduce(median, op="max"))
    ratios = sorted(a / b for a, b in zip(times["limit"], times["tarantella"], strict=True))
    if tnt.is_master_rank():
        limit, ours = (statistics.median(times[kind]) for kind in ("limit", "tarantella"))
        print(
            f"{name:10} limit {1e3 * limit:8.2f} ms   tarantella {1e3 * ours:8.2f} ms   ratio "
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )


def median_step(model: Any, batch: int, warm_up: int, steps: int) -> float:
    """Trains on data in memory and returns the median time of a step."""
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(1)
    data = (rng.random((batch, *model.input_shape[1:]), np.float32), rng.integers(0, 10, batch))
    dataset = tf.data.Dataset.from_tensors(data).repeat(warm_up + steps)
    return statistics.median(step_times(model, dataset, shuffle=False)[warm_up:])


def make(name: str) -> Any:
    import keras

    if name == "resnet50":
        return keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)
    return lenet5()


if __name__ == "__main__":
    main()
