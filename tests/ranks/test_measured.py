"""What ranks measure of themselves while they train, and what the command shows of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tarantella as tnt
from tarantella.cli.mpi import find_mpiexec
from tarantella.runtime import run_report
from tarantella.runtime.meter import COMPUTE, EVALUATION, METER, PARTS

LIMIT = 120
COMMAND = (sys.executable, "-m", "tarantella.cli")
ALOUD = {**os.environ, "TNT_QUIET": "false"}
SAMPLES = 21  # in batches of 4: the last one has a single sample, which rank 0 gets

x, y = np.ones((SAMPLES, 3), "float32"), np.zeros((SAMPLES, 1), "float32")


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks measure as if the command listened."""
    monkeypatch.setattr(run_report, "_descriptor", 2)


def made(**options: Any) -> Any:
    model = tnt.Model(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse", **options)
    return model


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)


def fit(model: Any) -> None:
    model.fit(x, y, batch_size=4, verbose=0, validation_data=(x, y))


def fit_dataset(model: Any) -> None:
    model.fit(dataset().filter(lambda *_: True), epochs=1, verbose=0)  # of unknown length


def train_on_batches(model: Any) -> None:
    for batch in dataset():
        model.train_on_batch(*batch)


def own_loop(model: Any) -> None:
    optimizer = tnt.keras.optimizers.Optimizer(keras.optimizers.SGD())
    for inputs, targets in tnt.distribute_dataset(dataset()):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - targets) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("train", "options"),
    [
        (fit, {}),
        (fit_dataset, {}),
        (fit, {"run_eagerly": True}),
        (fit, {"steps_per_execution": 4}),
        (train_on_batches, {}),
        (own_loop, {}),
    ],
)
def test_steps_and_own_samples_are_counted(train: Any, options: dict[str, Any]) -> None:
    model, began, before = made(**options), time.monotonic(), METER.totals()
    train(model)
    after, seconds = METER.totals(), time.monotonic() - began
    assert after.steps - before.steps == 6
    assert after.samples - before.samples == (11 if tnt.is_master_rank() else 10)
    spent = {part: after.parts[part] - before.parts[part] for part in PARTS}
    assert min(spent.values()) >= 0
    assert spent[COMPUTE] > 0
    assert (spent[EVALUATION] > 0) == (train is fit)
    assert sum(spent.values()) <= seconds


@pytest.mark.ranks(2)
def test_every_rank_reports_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(run_report, "_tell", lambda kind, data: told.append((kind, data)))
    model = made(metrics=["mae"])
    for _ in range(2):
        model.fit(x, y, batch_size=4, epochs=3, initial_epoch=1, verbose=0)
    totals = [data for kind, data in told if kind == "measured" and "epoch" in data]
    assert len(totals) == 4
    assert np.diff([data["epoch"] for data in totals]).tolist() == [1, 1, 1]
    assert np.diff([data["steps"] for data in totals]).tolist() == [6, 6, 6]
    epochs = [data for kind, data in told if kind == "epoch"]
    if not tnt.is_master_rank():
        assert epochs == []
        return
    assert [(data["number"], data["epochs"], data["steps"]) for data in epochs] == [
        (2, 3, 6),
        (3, 3, 6),
    ] * 2
    assert epochs[0]["fit"] == epochs[1]["fit"] < epochs[2]["fit"]
    assert epochs[-1]["logs"].keys() == {"loss", "mae"}
    assert epochs[-1]["logs"]["loss"] == pytest.approx(model.history.history["loss"][-1])


def test_one_rank_knows_the_size_of_its_steps() -> None:
    model, before = made(), METER.totals()
    model.fit(x[:20], y[:20], batch_size=4, verbose=0)
    model.fit(dataset().take(5), verbose=0)
    after = METER.totals()
    assert after.steps - before.steps == 10
    assert after.samples - before.samples == 40


SLOW = """
import time
import keras, numpy as np
import tarantella as tnt

class Slow(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        time.sleep(4 * tnt.get_rank())

model = tnt.Model(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
x, y = np.ones((32, 3)), np.ones((32, 1))
model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[Slow()])
print("done")
"""


def test_a_run_shows_itself_and_names_the_slow_rank(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    command = (
        *COMMAND,
        "-n",
        "2",
        "--no-gpu",
        "--output-dir",
        str(tmp_path / "kept"),
        "--progress",
    )
    result = subprocess.run(
        [*command, "--", str(script)], env=ALOUD, capture_output=True, text=True, timeout=LIMIT
    )
    assert result.returncode == 0
    assert result.stdout == "done\n"
    banner, *between, headline, titles, first, second, slowest, written = result.stderr.splitlines()
    assert re.fullmatch(
        r"tarantella: 2 ranks on 1 host, \d+ cores? a rank; sums by MPI and shared memory", banner
    )
    assert re.fullmatch(r"tarantella: the run took .*: 16 steps in .* on 2 ranks\.", headline)
    (warning,) = (line for line in between if "is slow" in line)
    assert warning.startswith("tarantella WARNING: Rank 1 on host")
    assert warning.endswith("mostly in callbacks.")
    (progress,) = (line for line in between if "left" in line)
    assert progress.startswith("tarantella: epoch 1 of 2 done, about ")
    columns = titles.split()
    shares = [
        {title: float(number.rstrip("%")) for title, number in zip(columns, row, strict=True)}
        for row in ([*line.rpartition("%")[0].split(), "0"] for line in (first, second))
    ]
    assert shares[1]["callbacks"] > shares[0]["callbacks"]
    assert shares[0]["sums"] > shares[1]["sums"]
    assert slowest.startswith("  slowest: rank 1 on host ")
    assert written == f"  written: {tmp_path / 'kept'} (--output-dir)"


@pytest.mark.parametrize("quiet", [False, True])
def test_the_line_at_the_start_and_the_message_at_the_end(tmp_path: Path, quiet: bool) -> None:
    script = tmp_path / "fails.py"
    script.write_text("from tarantella.runtime import world\nraise SystemExit(3)\n")
    options = ["--quiet"] if quiet else []
    result = subprocess.run(
        [*COMMAND, "-n", "1", "--no-gpu", *options, "--", str(script)],
        env=ALOUD, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert result.returncode == 3
    lines = result.stderr.splitlines()
    assert lines[0].startswith("tarantella: 1 rank on 1 host, ") is not quiet
    assert lines[-1].startswith("tarantella: rank 0 on host ")


def test_the_master_rank_shows_the_line_without_the_command() -> None:
    mpiexec = str(find_mpiexec(os.environ).path)
    result = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, "-c", "from tarantella.runtime import world"],
        env=ALOUD, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert result.returncode == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("tarantella: 2 ranks on 1 host, ")
