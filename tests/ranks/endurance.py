"""Many steps of a tiny model, with evaluation and checkpoints in between: does anything grow?

    tarantella -n 3 --no-gpu -- tests/ranks/endurance.py --steps 20000

Each rank notes its memory, open files and threads after every round: an epoch of `fit` with
validation and a checkpoint, then an `evaluate`, a `predict` and a `save`. From a tenth of all steps
on, nothing may grow. The exit status is 1 if something does.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np

import tarantella as tnt

ROUNDS = 20
MOST_MEMORY = 8.0  # MiB; what the allocator may keep more or less of


def state() -> list[float]:
    """Memory in MiB, open files and threads of this process."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory = int(status["VmRSS"].split()[0]) / 1024
    return [memory, float(len(list(Path("/proc/self/fd").iterdir()))), float(status["Threads"])]


def train(steps: int, folder: Path) -> np.ndarray:
    """The states of all ranks after each round."""
    layers = [keras.Input((8,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    model = tnt.Model(keras.Sequential(layers))
    model.compile("adam", "mse", metrics=["mae"])
    x = np.random.default_rng(1).normal(size=(6 * steps // ROUNDS, 8)).astype("float32")
    y = x[:, :1] ** 2
    states = []

    class Note(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            model.evaluate(x[:60], y[:60], batch_size=6, verbose=0)
            model.predict(x[:60], batch_size=6, verbose=0)
            model.save(folder / "model.keras")
            states.append(state())

    callbacks = [
        keras.callbacks.ModelCheckpoint(folder / "checkpoint.keras"),
        keras.callbacks.BackupAndRestore(folder / "backup", save_freq=200),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        Note(),
    ]
    for _ in range(2):  # a second `fit` must not cost more than it needs
        model.fit(
            x, y, batch_size=6, epochs=ROUNDS // 2, verbose=0, callbacks=callbacks,
            validation_data=(x[:60], y[:60]),
        )  # fmt: skip
    return np.array(tnt.allgather(np.array(states)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    folder = Path(tempfile.mkdtemp()) if tnt.is_master_rank() else Path()
    folder = Path(str(tnt.broadcast(str(folder))))
    ranks = train(steps, folder)
    first, last = ranks[:, ROUNDS // 10 - 1], ranks[:, -1]
    if tnt.is_master_rank():
        print("| rank | memory at a tenth (MiB) | at the end | open files | threads |")
        print("| --- | --- | --- | --- | --- |")
        for rank, (before, after) in enumerate(zip(first, last, strict=True)):
            print(f"| {rank} | {before[0]:.1f} | {after[0]:.1f} | {before[1]:.0f} to {after[1]:.0f}"
                  f" | {before[2]:.0f} to {after[2]:.0f} |")  # fmt: skip
        for number, row in enumerate(ranks[:, :, 0].T, 1):
            print(number * steps // ROUNDS, *(f"{memory:.1f}" for memory in row))
    growth = last - first
    return int((growth > [MOST_MEMORY, 0.0, 0.0]).any())


if __name__ == "__main__":
    sys.exit(main())
