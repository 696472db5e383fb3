"""A run that is killed while it saves leaves what it saved before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

KILLS = 20

# Saves models whose weights are all the same number, which grows; a child of a process that has
# imported everything, so that it can be killed and started again quickly.
SAVING = """
import os, random, shutil, signal, sys, time
import keras
import numpy as np
import tarantella as tnt

folder, kills = sys.argv[1], int(sys.argv[2])


def save_again_and_again(number, told):
    layer = keras.layers.Dense(500)
    model = tnt.Model(keras.Sequential([keras.Input((500,)), layer]))  # 1 MB
    while True:
        model.set_weights([np.full_like(weight, number) for weight in model.get_weights()])
        model.save(f"{folder}/model.keras")
        model.save_weights(f"{folder}/model.weights.h5")
        model.save(f"{folder}/model")
        os.write(told, number.to_bytes(4, "little"))
        number += 1


random.seed(0)
number = 1
for kill in range(kills):
    hears, tells = os.pipe()
    child = os.fork()
    if not child:
        save_again_and_again(number, tells)
    os.close(tells)
    os.read(hears, 4)
    time.sleep(random.uniform(0, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while told := os.read(hears, 4):
        number = int.from_bytes(told, "little")
    os.close(hears)
    shutil.copytree(folder, f"{folder}-{kill}-{number}")
    number += 1

for kill_and_number in (name for name in os.listdir(f"{folder}/..") if "-" in name):
    least = int(kill_and_number.split("-")[-1])
    for name in ("model.keras", "model", "model.weights.h5"):
        path = f"{folder}/../{kill_and_number}/{name}"
        if name == "model.weights.h5":
            model.load_weights(path)
        else:
            model = keras.models.load_model(path)
        kernel, bias = model.get_weights()
        assert (kernel == kernel[0, 0]).all() and (bias == kernel[0, 0]).all(), path
        assert kernel[0, 0] >= least, (path, kernel[0, 0], least)
        print("whole", kernel[0, 0] - least)
"""


def test_the_last_complete_file_always_loads(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    result = subprocess.run(
        [sys.executable, "-c", SAVING, str(tmp_path / "saved"), str(KILLS)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    outcomes = result.stdout.splitlines()
    assert len(outcomes) == 3 * KILLS
    assert "whole 1.0" in outcomes  # some were killed between the saves of one round
