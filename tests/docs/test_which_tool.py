"""What the page about other tools says of MirroredStrategy, which everybody has, still holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Trains on two logical CPU devices and on one, and prints how far the weights are apart.
TRIAL = """
import contextlib, json
import keras, numpy as np, tensorflow as tf

keras.config.set_floatx("float64")
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
x = np.random.default_rng(1).normal(size=(65, 8))

def train(samples, batch, scope):
    keras.utils.set_random_seed(1)
    with scope:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile(optimizer="adam", loss="mse")
    y = x.sum(axis=1, keepdims=True)
    model.fit(x[:samples], y[:samples], batch_size=batch, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()[0]

def difference(samples, batch):
    try:
        mirrored = train(samples, batch, strategy.scope())
    except tf.errors.InvalidArgumentError:
        return "error"
    return float(np.abs(mirrored - train(samples, batch, contextlib.nullcontext())).max())

cases = {"even": (64, 32), "odd": (63, 63), "short": (65, 64)}
print(json.dumps({name: difference(*case) for name, case in cases.items()}))
"""


def test_mirrored_strategy_works_if_batches_divide_evenly(
    shell: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "trial.py").write_text(TRIAL)
    finished = shell("python trial.py")
    assert finished.status == 0, finished.output
    differences = json.loads(finished.output.splitlines()[-1])
    assert differences["even"] < 1e-12
    assert differences["odd"] == "error", (
        "docs/which-tool.md: MirroredStrategy takes odd batches now"
    )
    assert differences["short"] > 1e-6, (
        "docs/which-tool.md: MirroredStrategy weights by samples now"
    )
