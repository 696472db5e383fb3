"""`--gpu-sums` chooses how GPUs sum, and every choice gives the same result."""

from __future__ import annotations

from pathlib import Path

import device
import numpy as np

SCRIPT = """
import sys
import keras
import numpy as np
import tarantella as tnt
from tarantella.graph import engine

keras.utils.set_random_seed(5)
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
rng = np.random.default_rng(0)
model = tnt.Model(keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)]))
model.compile("adam", "mse")
model.fit(rng.random((12, 5)), rng.random((12, 3)), batch_size=4, verbose=0)
if tnt.is_master_rank():
    np.savez(sys.argv[1], *model.get_weights())
    print("sums by", engine.device_hint() or "host")
"""
# On the CPU, `auto` is `host`.
CHOICES = {
    "gpu": {"nccl": "nccl", "auto": "nccl", "host": "host"},
    "cpu": {"ring": "ring", "auto": "host", "host": "host"},
}


def test_every_choice_is_followed_and_gives_the_same_weights(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    weights = []
    for choice, used in CHOICES[device.DEVICE].items():
        target = tmp_path / f"{choice}.npz"
        result = device.run(script, str(target), ranks=2, sums=choice)
        assert (result.returncode, result.stdout) == (0, f"sums by {used}\n"), result.stderr
        assert "WARNING" not in result.stderr
        with np.load(target) as arrays:
            weights.append([arrays[name] for name in arrays.files])
    for others in weights[1:]:
        for one, other in zip(weights[0], others, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)
