"""Progress and callback output of training appears once, or marked with its rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import keras
import numpy as np

import tarantella as tnt

model = tnt.Model(keras.Sequential([keras.layers.Dense(1)]))
model.compile("sgd", "mse")
x = np.ones((16, 2))
shout = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("\\nshout", epoch))
model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=2, callbacks=[shout])
model.evaluate(x, x[:, :1], verbose=2)
print("done", tnt.get_rank())
"""


def _output(tmp_path: Path, *options: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "tarantella.cli", "-n", "2", "--no-gpu", *options, "--"]
    result = subprocess.run(
        [*command, str(script)], check=True, timeout=300, capture_output=True, text=True
    )
    return result.stdout.splitlines()


def test_output_of_training_appears_once(tmp_path: Path) -> None:
    lines = _output(tmp_path)
    assert [line for line in lines if line.startswith("Epoch")] == ["Epoch 1/2", "Epoch 2/2"]
    assert [line for line in lines if "shout" in line] == ["shout 0", "shout 1"]
    assert sum(line.startswith("4/4 - ") for line in lines) == 2
    assert sorted(line for line in lines if "done" in line) == ["done 0", "done 1"]


def test_output_of_every_rank_is_marked(tmp_path: Path) -> None:
    lines = _output(tmp_path, "--output-on-all-devices")
    for rank in (0, 1):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert sum("Epoch" in line for line in own) == 2
        assert sum("shout" in line for line in own) == 2
    assert all(line.startswith("[rank ") for line in lines if "shout" in line or "Epoch" in line)
