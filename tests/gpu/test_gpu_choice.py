"""`--gpu-sums` chooses how GPUs sum, and every choice gives the same result."""

from __future__ import annotations

import os
from pathlib import Path

import device
import numpy as np
import pytest

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


@device.needs_gpu
@pytest.mark.skipif("," in os.environ.get("TNT_GPUS", ""), reason="needs ranks that share a GPU")
def test_nccl_that_lets_no_ranks_share_a_gpu(tmp_path: Path) -> None:
    """As NCCL does before 2.32: `auto` falls back with one warning, `nccl` is an error."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    target = str(tmp_path / "weights.npz")
    refuses = ("-x", "NCCL_MULTI_RANK_GPU_ENABLE=0")
    result = device.run(script, target, ranks=2, sums="auto", options=refuses)
    assert (result.returncode, result.stdout) == (0, "sums by host\n"), result.stderr
    (warning,) = [line for line in result.stderr.splitlines() if "WARNING" in line]
    assert "The GPUs cannot use NCCL for sums over the ranks: " in warning
    result = device.run(script, target, ranks=2, sums="nccl", options=refuses)
    assert result.returncode == 2, result.stderr
    final = result.stderr.splitlines()[-1]
    assert "The GPUs cannot use NCCL, which `--gpu-sums nccl` asks for: " in final
