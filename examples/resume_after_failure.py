"""Training that resumes after a failure, and ends as if there had been none.

    tarantella -n 2 --no-gpu --max-restarts 1 -- resume_after_failure.py --fail_at_step=100

All it takes is Keras's BackupAndRestore. With `--fail_at_step`, the last rank is killed in the
middle of an epoch, as if memory had run out; the command restarts the run, and training resumes
from the last backup. The weights at the end, and so the last line printed, are those of a run
without `--fail_at_step`, to the last bit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

import tarantella as tnt


class Accident(keras.callbacks.Callback):
    """Kills the last rank at a step of the first attempt."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        first_attempt = os.environ.get("TNT_RESTARTS", "0") == "0"
        here = tnt.get_rank() == tnt.get_size() - 1
        if first_attempt and here and int(self.model.optimizer.iterations) == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    args = parse_args()
    keras.utils.set_random_seed(42)
    scans, labels = load_digits(return_X_y=True)
    x, y = (scans / 16).astype("float32"), labels

    layers = keras.layers
    model = tnt.Model(
        keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(64, "relu"),
                layers.Dropout(0.1, seed=1),
                layers.Dense(10, "softmax"),
            ]
        )
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    callbacks = [keras.callbacks.BackupAndRestore(args.backup_dir, save_freq=10)]
    if args.fail_at_step:
        callbacks.append(Accident(args.fail_at_step))
    model.fit(x, y, batch_size=64, epochs=args.epochs, verbose=2, callbacks=callbacks)

    loss, accuracy = model.evaluate(x, y, verbose=0)
    if tnt.is_master_rank():
        weights = b"".join(np.ascontiguousarray(each).tobytes() for each in model.get_weights())
        digest = hashlib.sha256(weights).hexdigest()[:16]
        print(f"loss: {loss:.6f}, accuracy: {accuracy:.2%}, weights: {digest}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on digits, with a backup every ten steps.")
    parser.add_argument("--epochs", type=int, default=8, help="number of epochs (8)")
    parser.add_argument("--backup_dir", default="backup", help="folder of the backup (backup)")
    parser.add_argument(
        "--fail_at_step", type=int, help="kill a rank at this step of the first attempt"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
