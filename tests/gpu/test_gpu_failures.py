"""A rank that fails while others wait in a sum on the GPU ends the run: soon, with one message."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import device
import pytest

HOST = socket.gethostname()
LONGEST_RUN, LONGEST_END = 120.0, 60.0  # seconds; the second from the failure to the end
# Three steps are taken; then the last rank fails, and the others wait in the sum of the fourth.
START = """
import os, signal, sys, time
from pathlib import Path
import keras
import numpy as np
import tensorflow as tf
import tarantella as tnt
from tarantella.graph import engine

last = tnt.get_rank() == tnt.get_size() - 1
assert engine.device_hint() in ("nccl", "ring")

def fail():
    Path(sys.argv[1]).write_text(str(time.time()))
    {failure}
"""
OWN_LOOP = """
weights = [keras.Variable(tf.ones(3))]
optimizer = tnt.keras.optimizers.Optimizer(keras.optimizers.SGD())
optimizer.build(weights)

@tf.function(jit_compile=False)
def step():
    optimizer.apply([tf.ones(3)], weights)

for number in range(4):
    if last and number == 3:
        time.sleep(1)  # the others wait by then
        fail()
    step()
print("the end")
"""
FIT = """
class Failing(keras.layers.Layer):
    steps = 0

    def call(self, x):
        def count(x):
            if last:
                Failing.steps += 1
                if Failing.steps == 4:
                    fail()
            return x
        return tf.ensure_shape(tf.py_function(count, [x], x.dtype), x.shape)

model = tnt.Model(keras.Sequential([keras.Input((5,)), Failing(), keras.layers.Dense(3)]))
model.compile("sgd", "mse", jit_compile=False)
model.fit(np.ones((40, 5)), np.ones((40, 3)), batch_size=4, verbose=0)
print("the end")
"""
# Compiled with XLA, as by default on a GPU: nothing on the CPU waits for the sum.
COMPILED_FIT = """
def rows(i):
    def look(i):
        if last and i >= 24:
            fail()
        return np.ones(5, "float32"), np.ones(3, "float32")
    x, y = tf.numpy_function(look, [i], [tf.float32, tf.float32])
    return tf.ensure_shape(x, [5]), tf.ensure_shape(y, [3])

model = tnt.Model(keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)]))
model.compile("sgd", "mse", jit_compile=True)
model.fit(tf.data.Dataset.range(40).map(rows).batch(4), verbose=0)
print("the end")
"""
DEATHS = {
    "raises": ("raise ValueError('bad value')", 1, "ValueError: bad value (exit status 1)"),
    "exits": ("os._exit(3)", 3, "exit status 3"),
    "is_killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
}


def run(folder: Path, script: str, failure: str, ranks: int, *options: str) -> tuple[int, str]:
    """Returns status and messages of a run, which has to end soon after the failure."""
    path, begun = folder / "script.py", folder / "begun"
    path.write_text(START.replace("{failure}", failure) + script)
    result = device.run(path, str(begun), ranks=ranks, options=options, limit=LONGEST_RUN)
    assert begun.exists(), result.stderr
    assert time.time() - float(begun.read_text()) < LONGEST_END
    assert "the end" not in result.stdout
    return result.returncode, result.stderr


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("death", DEATHS)
def test_a_rank_that_dies_is_the_cause(death: str, ranks: int, tmp_path: Path) -> None:
    failure, expected, cause = DEATHS[death]
    status, messages = run(tmp_path, OWN_LOOP, failure, ranks)
    assert status == expected, messages
    final = messages.splitlines()[-1]
    assert final.startswith(f"tarantella: rank {ranks - 1} on host {HOST} failed: ")
    assert cause in final
    others = [line for line in messages.splitlines()[:-1] if "Traceback" not in line]
    assert len(others) <= (20 if death == "raises" else 3), messages  # no pages of TensorFlow


@pytest.mark.parametrize("fit", [FIT, COMPILED_FIT], ids=["calls", "whole"])
@pytest.mark.parametrize("death", ["exits", "is_killed"])
def test_a_rank_that_dies_in_fit_is_the_cause(death: str, fit: str, tmp_path: Path) -> None:
    failure, expected, cause = DEATHS[death]
    status, messages = run(tmp_path, fit, failure, 2)
    assert status == expected, messages
    final = messages.splitlines()[-1]
    assert final.startswith(f"tarantella: rank 1 on host {HOST} failed: ")
    assert cause in final


STALLS = {
    "sleeps": ("time.sleep(600)", "has not arrived: it is at "),
    "is_stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "it is stopped by SIGSTOP: `kill "),
}


@pytest.mark.parametrize("stall", STALLS)
def test_a_rank_that_stalls_is_named_and_the_run_ended(stall: str, tmp_path: Path) -> None:
    failure, said = STALLS[stall]
    status, messages = run(tmp_path, OWN_LOOP, failure, 2, "--stall-timeout", "1")
    assert status == 1, messages
    warning, final = messages.splitlines()
    assert warning.startswith("tarantella WARNING: Rank 0 has been waiting for ")
    assert device.WAITS_IN in warning
    assert final.startswith(f"tarantella: rank 1 on host {HOST} failed: others have waited for")
    assert said in final


def test_ranks_wait_in_a_step_that_is_compiled_with_its_sum(tmp_path: Path) -> None:
    """The data of one rank do not come. No operation waits, but the GPU does."""
    status, messages = run(tmp_path, COMPILED_FIT, STALLS["sleeps"][0], 2, "--stall-timeout", "4")
    assert status == 1, messages
    warning, final = messages.splitlines()[-2:]
    assert warning.startswith("tarantella WARNING: Rank 0 has been waiting for ")
    assert device.WAITS_IN in warning
    assert final.startswith(f"tarantella: rank 1 on host {HOST} failed: others have waited for")
    assert "has not arrived: it is in fit" in final
