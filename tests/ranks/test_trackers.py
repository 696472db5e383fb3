"""Trackers of experiments get one run, with the metrics of the global batch: the real packages.

They work offline, each in a folder of its own. One script uses all of them, as it takes seconds to
load TensorFlow. The tests themselves do not import Comet and MLflow, which change Keras.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import tarantella as tnt

MISSING = [name for name in ("comet_ml", "mlflow", "wandb") if find_spec(name) is None]
COMMAND = (sys.executable, "-m", "tarantella.cli", "-n", "2", "--no-gpu", "--")
LIMIT = 120  # seconds, for a machine that is busy with other things

# As in one process, but for two lines; the last batch has a sample for one rank only. What one
# process logs is the last thing that is printed.
SCRIPT = """
import comet_ml, mlflow, wandb

experiment = comet_ml.OfflineExperiment(project_name="digits", offline_directory="comet")

import json, os
import keras, numpy as np
import tarantella as tnt
from wandb.integration.keras import WandbEvalCallback, WandbMetricsLogger, WandbModelCheckpoint

draw = np.random.default_rng(1).normal
x, y = draw(size=(25, 4)), draw(size=(25, 1))

def train(wrap, **options):
    keras.utils.set_random_seed(1)
    model = wrap(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse", metrics=["mae"])
    history = model.fit(
        x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(x[:5], y[:5]),
        **options,
    )
    return history.history

class Predictions(WandbEvalCallback):
    def add_ground_truth(self, logs=None):
        self.data_table.add_data(0)

    def add_model_predictions(self, epoch, logs=None):
        self.pred_table.add_data(*self.model.predict(x[:2], verbose=0)[:, 0])

    def log_data_table(self):  # would need a server
        pass

    def log_pred_table(self):
        wandb.log({"predictions": len(self.pred_table.data)})

# Callbacks
mlflow.set_tracking_uri(f"file:{os.getcwd()}/callback")
with wandb.init(project="digits", config={"rate": 0.01}):
    train(
        tnt.Model,
        callbacks=[
            WandbMetricsLogger(log_freq=2),
            WandbModelCheckpoint("model-{epoch}.keras"),
            Predictions(["n"], ["first", "second"]),
            mlflow.keras.MlflowCallback(log_every_epoch=False, log_every_n_steps=2),
            experiment.get_callback("keras"),
            keras.callbacks.CSVLogger("log.csv"),
        ],
    )
    wandb.log({"done": wandb.config.rate})
mlflow.end_run()
experiment.end()

# MLflow and Comet add their callbacks to those of `fit` themselves.
experiment = comet_ml.OfflineExperiment(project_name="digits", offline_directory="comet-by-itself")
mlflow.set_tracking_uri(f"file:{os.getcwd()}/autolog")
mlflow.keras.autolog(log_models=False, log_datasets=False)
train(tnt.Model, callbacks=[keras.callbacks.BackupAndRestore("backup")])
experiment.end()

# Every rank opens a run.
mlflow.set_tracking_uri(f"file:{os.getcwd()}/run-of-each-rank")
with mlflow.start_run():
    train(tnt.Model)
mlflow.keras.autolog(disable=True)
if tnt.is_master_rank():
    print(json.dumps(train(lambda model: model)))
"""


@dataclass(frozen=True)
class Finished:
    """A run of the script: its folder, its errors, and what one process logs at each epoch."""

    folder: Path
    errors: str
    expected: dict[str, list[float]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}")
    folder = tmp_path_factory.mktemp("trackers")
    (folder / "script.py").write_text(SCRIPT)
    run = subprocess.run(
        [*COMMAND, "script.py"],
        cwd=folder,
        env={**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return Finished(folder, run.stderr, json.loads(run.stdout.splitlines()[-1]))


# What the trackers have recorded


def mlflow_runs(folder: Path) -> list[dict[str, list[float]]]:
    """The values of each metric, in each run."""
    return [
        {
            metric.name: [float(line.split()[1]) for line in metric.read_text().splitlines()]
            for metric in run.iterdir()
        }
        for run in folder.glob("*/*/metrics")
    ]


def comet_runs(folder: Path) -> list[dict[str, list[float]]]:
    """The values of each metric, in each experiment."""
    found = []
    for archive in folder.glob("*.zip"):
        values: dict[str, list[float]] = {}
        with zipfile.ZipFile(archive) as opened:
            messages = map(json.loads, opened.read("messages.json").splitlines())
            for metric in [m["payload"]["metric"] for m in messages if m["type"] == "metric_msg"]:
                values.setdefault(metric["metricName"], []).append(float(metric["metricValue"]))
        found.append(values)
    return found


def wandb_runs(folder: Path) -> list[dict[str, list[float]]]:
    """The values of each metric, in each run: records of its log, in blocks of 32 kB."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for log in folder.glob("wandb/offline-run-*/*.wandb"):
        data, place, piece = log.read_bytes(), 7, b""
        values: dict[str, list[float]] = {}
        while place + 7 <= len(data):
            if (left := -place % 32768) and left < 7:
                place += left
            _, length, kind = struct.unpack_from("<IHB", data, place)
            piece += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # the whole of a record, or its end
                record: Any = Record.FromString(piece)
                piece = b""
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    values.setdefault(name, []).append(json.loads(item.value_json))
        found.append(values)
    return found


def assert_has(recorded: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    """Comet also records what MLflow logs, so it may have a value more than once."""
    assert set(expected) == {"loss", "mae", "val_loss", "val_mae"}
    for name, values in expected.items():
        for value in values:
            assert pytest.approx(value, rel=1e-5) in recorded[name]


@pytest.mark.ranks(2)
def test_trackers_are_disabled_on_other_ranks_without_the_command_too() -> None:
    disabled = os.environ.get("WANDB_MODE") == "disabled"
    assert disabled == (not tnt.is_master_rank())
    assert ("COMET_AUTO_LOG_DISABLE" in os.environ) == disabled


def test_callbacks_of_wandb_log_to_one_run(finished: Finished) -> None:
    [run] = wandb_runs(finished.folder)
    assert_has({name.removeprefix("epoch/"): run[name] for name in run}, finished.expected)
    assert len(run["batch/loss"]) == 4
    assert run["predictions"] == [1, 1]
    assert run["done"] == [0.01]
    assert (finished.folder / "model-2.keras").exists()


def test_a_callback_of_mlflow_logs_to_one_run(finished: Finished) -> None:
    [run] = mlflow_runs(finished.folder / "callback")
    assert len(run["loss"]) == 4
    assert run["loss"][1::2] == pytest.approx(finished.expected["loss"], rel=1e-5)  # last batches
    assert run["validation_mae"] == pytest.approx(finished.expected["val_mae"], rel=1e-5)


def test_a_callback_of_comet_logs_to_one_experiment(finished: Finished) -> None:
    [run] = comet_runs(finished.folder / "comet")
    assert_has(run, finished.expected)
    assert run["batch_loss"]


def test_trackers_that_add_callbacks_themselves_log_to_one_run(finished: Finished) -> None:
    [of_mlflow] = mlflow_runs(finished.folder / "autolog")
    for name, values in finished.expected.items():
        assert of_mlflow[name] == pytest.approx(values, rel=1e-5)
    [of_comet] = comet_runs(finished.folder / "comet-by-itself")
    assert_has(of_comet, finished.expected)
    assert of_comet["batch_loss"]


def test_a_run_on_every_rank_is_warned_of(finished: Finished) -> None:
    of_rank_1, of_master = sorted(mlflow_runs(finished.folder / "run-of-each-rank"), key=len)
    assert of_rank_1 == {}
    assert_has(of_master, finished.expected)
    lines = finished.errors.splitlines()
    [warning] = [line for line in lines if "2 ranks have opened a run of MLflow each" in line]
    assert warning.startswith("tarantella WARNING: ")
    assert "`if tnt.is_master_rank(): mlflow.start_run()`" in warning
