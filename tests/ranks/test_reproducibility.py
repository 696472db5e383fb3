"""The same seeds on the same number of ranks give the same bits, run after run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tarantella as tnt

keras.utils.set_random_seed(5)
rng = np.random.default_rng(0)
images, labels = rng.random((50, 12, 12, 1), np.float32), rng.integers(0, 4, 50)
model = tnt.Model(
    keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(4, activation="softmax"),
        ]
    )
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
data = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(50).batch(8)
model.fit(data, epochs=2, verbose=0)
for name, weight in zip([w.path for w in model.weights], model.get_weights()):
    if "seed_generator" not in name and "moving" not in name:
        everyones = tnt.allgather(weight)
        assert all(np.array_equal(weight, other) for other in everyones), name
if tnt.is_master_rank():
    Path(sys.argv[1]).write_bytes(b"".join(w.tobytes() for w in model.get_weights()))
"""


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_two_runs_give_bit_identical_weights(ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "tarantella.cli", "-n", str(ranks), "--no-gpu", "--"]
    for name in ("first", "second"):
        subprocess.run(
            [*command, str(script), str(tmp_path / name)],
            check=True,
            timeout=300,
            env={**os.environ, "TF_DETERMINISTIC_OPS": "1"},
        )
    first = (tmp_path / "first").read_bytes()
    assert len(first) > 1000
    assert first == (tmp_path / "second").read_bytes()
