"""A custom callback that writes a file, and so runs on the master rank only.

    tarantella -n 2 --no-gpu -- custom_callback.py --report=confusions.csv

After each epoch, the callback records which digits the model confuses. It predicts with the
plain Keras model that the `tnt.Model` was made from: both share their weights, and the plain one
needs no other rank. `predict` of the `tnt.Model` would wait here for the other ranks, which do not
run the callback. The logs are those of the global batch, on any number of ranks.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

import tarantella as tnt

SAMPLES_TO_TEST = 300


class Confusions(keras.callbacks.Callback):
    """Writes a row after each epoch: the loss, the accuracy, and the most confused pair."""

    def __init__(self, plain: keras.Model, x: np.ndarray, y: np.ndarray, file: Path) -> None:
        super().__init__()
        self._plain = plain
        self._x, self._y = x, y
        self._file = file

    def on_train_begin(self, logs: Any = None) -> None:
        self._write(["epoch", "loss", "accuracy", "digit", "taken for", "times"], mode="w")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        guesses = np.argmax(self._plain.predict(self._x, verbose=0), axis=1)
        counts = np.zeros((10, 10), int)
        np.add.at(counts, (self._y, guesses), 1)
        accuracy = np.trace(counts) / len(self._y)
        np.fill_diagonal(counts, 0)
        digit, guess = np.unravel_index(np.argmax(counts), counts.shape)
        row = [epoch + 1, round(logs["loss"], 4), round(accuracy, 4), digit, guess, counts.max()]
        self._write(row, mode="a")

    def _write(self, row: list[Any], mode: str) -> None:
        with self._file.open(mode, newline="") as file:
            csv.writer(file).writerow(row)


def main() -> None:
    args = parse_args()
    keras.utils.set_random_seed(42)
    scans, labels = load_digits(return_X_y=True)
    x, y = (scans / 16).astype("float32"), labels
    train, test = slice(SAMPLES_TO_TEST, None), slice(SAMPLES_TO_TEST)

    layers = keras.layers
    plain = keras.Sequential([keras.Input((64,)), layers.Dense(64, "relu"), layers.Dense(10)])
    model = tnt.Model(plain)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.003), loss)

    report = Confusions(plain, x[test], y[test], args.report)
    model.fit(
        x[train],
        y[train],
        batch_size=64,
        epochs=args.epochs,
        verbose=2,
        callbacks=[tnt.keras.callbacks.Callback(report, run_on_all_ranks=False)],
    )
    if tnt.is_master_rank():
        print(args.report.read_text(), end="")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on digits, and record which are confused.")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs (10)")
    parser.add_argument(
        "--report", type=Path, default=Path("confusions.csv"), help="file to write (confusions.csv)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
