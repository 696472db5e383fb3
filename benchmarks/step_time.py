"""Step time of training on two ranks, over that of two processes that do not communicate.

Two processes that train on half a batch each and never talk are as fast as two ranks can be:
the limit. Both candidates run alternately, several rounds each, with one compute thread a
process; a round's figure is the median of its steps, the result the median of the rounds.

    python benchmarks/step_time.py                  # LeNet-5 and ResNet-50
    python benchmarks/step_time.py --models lenet5 --rounds 5
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS = 2
# Model: global batch, steps to warm up with, steps to measure.
MODELS = {"lenet5": (256, 20, 100), "resnet50": (32, 4, 15)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fusion-threshold", type=int, metavar="KB")
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "MODEL"), help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(*options.worker, options.results)
        return
    for model in options.models:
        compare(model, options)


def compare(model: str, options: argparse.Namespace) -> None:
    """Runs both candidates alternately and prints a line of figures."""
    rounds: dict[str, list[float]] = {"limit": [], "tarantella": []}
    for _ in range(options.rounds):
        for kind, medians in rounds.items():
            medians.append(run(kind, model, options.fusion_threshold))
    limit, ours = (statistics.median(rounds[kind]) for kind in ("limit", "tarantella"))
    spread = sorted(a / b for a, b in zip(rounds["limit"], rounds["tarantella"], strict=True))
    print(
        f"{model:10} limit {1e3 * limit:8.2f} ms   tarantella {1e3 * ours:8.2f} ms   "
        f"ratio {limit / ours:.3f} (rounds {spread[0]:.3f} to {spread[-1]:.3f})",
        flush=True,
    )


def run(kind: str, model: str, fusion_threshold: int | None) -> float:
    """The median step time of the slowest process in one round."""
    with tempfile.TemporaryDirectory() as folder:
        worker = [__file__, "--worker", kind, model, "--results", folder]
        bin_dir = Path(sys.executable).parent
        environment = dict(os.environ)
        if kind == "tarantella":
            command = [str(bin_dir / "tarantella"), "-n", str(RANKS), "--no-gpu"]
            if fusion_threshold is not None:
                command += ["--fusion-threshold", str(fusion_threshold)]
            command += ["--", *worker]
            environment["TNT_THREADS"] = "1"
            processes = [subprocess.Popen(command, env=environment)]
        else:
            processes = [
                subprocess.Popen(
                    [sys.executable, *worker], env=environment, stderr=subprocess.DEVNULL
                )
                for _ in range(RANKS)
            ]
        statuses = [process.wait() for process in processes]
        if any(statuses):
            raise SystemExit(f"A round of {kind} on {model} failed.")
        return max(json.loads(file.read_text()) for file in Path(folder).iterdir())


def measure(kind: str, model_name: str, results: Path) -> None:
    """What each process of a round does: trains, and writes its median step time."""
    import tensorflow as tf

    if kind == "tarantella":
        import tarantella as tnt
    else:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(4)
    import keras
    import numpy as np

    batch, warm_up, steps = MODELS[model_name]
    keras.utils.set_random_seed(1)
    model = lenet5() if model_name == "lenet5" else resnet50()
    shape = model.input_shape[1:]
    if kind == "tarantella":
        model = tnt.Model(model)
    else:
        batch //= RANKS
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy")
    rng = np.random.default_rng(1)
    data = (rng.random((batch, *shape), np.float32), rng.integers(0, 10, batch))
    dataset = tf.data.Dataset.from_tensors(data).repeat(warm_up + steps)
    clock = Clock()
    model.fit(dataset, verbose=0, callbacks=[clock.callback()])
    (results / str(os.getpid())).write_text(json.dumps(clock.median(warm_up)))


class Clock:
    """Notes the time at the end of every step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def callback(self) -> Any:
        import keras

        return keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: self.times.append(time.perf_counter())
        )

    def median(self, warm_up: int) -> float:
        times = self.times[warm_up:]
        return statistics.median(b - a for a, b in itertools.pairwise(times))


def lenet5() -> Any:
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(20, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(50, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(500, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


def resnet50() -> Any:
    import keras

    return keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)


if __name__ == "__main__":
    main()
