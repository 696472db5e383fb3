"""The table of rules for Keras's callbacks fits Keras, and its rows mean what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest

from tarantella.internals import keras as internals
from tarantella.keras import callback_rules
from tarantella.keras.callback_rules import RULES, Phase
from tarantella.runtime.configuration import Configuration

FIT = Phase("train", verbose=2, trains=True)


def test_each_row_is_about_a_class_of_keras_or_of_a_tracker() -> None:
    names = [rule.callback for rule in RULES]
    assert len(set(names)) == len(names)
    names = [rule.callback for rule in RULES if rule.package == "keras"]
    assert all(hasattr(keras.callbacks, name) for name in names if name != "OrbaxCheckpoint")


def test_all_state_that_is_known_of_callbacks_is_kept() -> None:
    kept = {rule.callback: rule.state for rule in RULES if rule.state}
    assert kept == internals.CALLBACK_STATE
    assert all(rule.weights in ("", *rule.state) for rule in RULES)


@pytest.mark.parametrize(
    ("make", "everywhere"),
    [
        (lambda path: keras.callbacks.CSVLogger(path), False),
        (lambda path: keras.callbacks.EarlyStopping(), True),
        (lambda path: keras.callbacks.LambdaCallback(), True),
        (lambda path: keras.callbacks.TensorBoard(path), False),
    ],
)
def test_which_ranks_run_a_callback(make: Any, everywhere: bool, tmp_path: Path) -> None:
    callback = make(str(tmp_path / "log"))
    assert callback_rules.runs_on_all_ranks(callback) == everywhere
    callback._tnt_run_on_all_ranks = not everywhere  # as `tnt.keras.callbacks.Callback` does
    assert callback_rules.runs_on_all_ranks(callback) != everywhere


@pytest.mark.parametrize(
    ("make", "reads", "changes"),
    [
        (lambda path: keras.callbacks.ModelCheckpoint(path), False, False),
        (lambda path: keras.callbacks.ModelCheckpoint(path, save_freq=2), True, False),
        (lambda path: keras.callbacks.ProgbarLogger(), False, False),
        (lambda path: keras.callbacks.LambdaCallback(on_train_batch_end=print), True, True),
        (lambda path: keras.callbacks.LambdaCallback(), False, False),
    ],
)
def test_what_a_callback_does_at_batches(
    make: Any, reads: bool, changes: bool, tmp_path: Path
) -> None:
    callback = make(str(tmp_path / "model.keras"))
    assert callback_rules.reads_batch_logs(callback, FIT) == reads
    assert callback_rules.may_change_model(callback, "train_batch_end") == changes


def test_callbacks_of_trackers_run_on_the_master_and_leave_the_model_alone() -> None:
    pytest.importorskip("wandb").init(mode="disabled")
    logger = pytest.importorskip("wandb.integration.keras").WandbMetricsLogger
    callback = pytest.importorskip("mlflow.keras").MlflowCallback
    reads = {
        logger(): False,
        logger(log_freq=5): True,
        callback(): False,
        callback(log_every_epoch=False, log_every_n_steps=5): True,
    }
    for each, reads_batches in reads.items():
        assert not callback_rules.runs_on_all_ranks(each)
        assert callback_rules.reads_batch_logs(each, FIT) == reads_batches
        assert not callback_rules.may_change_model(each, "train_batch_end")


def test_callbacks_of_trackers_run_on_all_ranks_that_have_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    callback = pytest.importorskip("mlflow.keras").MlflowCallback()
    settings = Configuration(trackers_on_all_devices=True)
    monkeypatch.setattr(callback_rules, "configuration", lambda: settings)
    assert callback_rules.runs_on_all_ranks(callback)
    csv = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    assert not callback_rules.runs_on_all_ranks(csv)


def test_a_callback_of_the_user_is_not_taken_for_one_of_a_tracker() -> None:
    class MlflowCallback(keras.callbacks.Callback):
        def on_batch_end(self, batch: int, logs: Any = None) -> None: ...

    assert callback_rules.runs_on_all_ranks(MlflowCallback())
    assert callback_rules.may_change_model(MlflowCallback(), "train_batch_end")


def test_an_override_of_a_batch_method_by_its_old_name_may_change_the_model(
    tmp_path: Path,
) -> None:
    class Checkpoint(keras.callbacks.ModelCheckpoint):
        def on_batch_end(self, batch: int, logs: Any = None) -> None: ...

    callback = Checkpoint(str(tmp_path / "model.keras"))
    assert callback_rules.may_change_model(callback, "train_batch_end")
