"""Callbacks see, decide and write on several ranks what they do in plain Keras."""

from __future__ import annotations

import csv
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import (
    CLASSIFICATION,
    WITH_METRICS,
    WITH_STATE,
    assert_close,
    batches,
    classification_data,
    computed_by_master,
    small_model,
)

import tarantella as tnt
from tarantella.keras import callback_agreement
from tarantella.keras.metrics import results_of_sums
from tarantella.runtime import configuration

pytestmark = [pytest.mark.ranks(2), pytest.mark.usefixtures("float64")]
two_and_three_ranks = pytest.mark.ranks(2, 3)

EVENTS = [
    *(f"on_{phase}_{end}" for phase in ("train", "test", "predict") for end in ("begin", "end")),
    *(
        f"on_{phase}_batch_{end}"
        for phase in ("train", "test", "predict")
        for end in ("begin", "end")
    ),
    "on_epoch_begin",
    "on_epoch_end",
]


class Recorder(keras.callbacks.Callback):
    """Notes every event, with its number and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []


def _note(event: str) -> Callable[..., None]:
    def note(self: Any, *args: Any, logs: Any = None) -> None:
        if args and isinstance(args[-1], dict):
            *args, logs = args  # type: ignore[assignment]
        logs = {name: np.array(value) for name, value in (logs or {}).items()}
        self.events.append((event, [arg for arg in args if arg is not None], logs))

    return note


for _event in EVENTS:
    setattr(Recorder, _event, _note(_event))


def data() -> dict[str, Any]:
    x, y = classification_data()
    return {"x": batches(x, y), "validation_data": batches(x[:5], y[:5])}


def train(
    wrap: Callable[[keras.Model], keras.Model],
    callbacks: Callable[[], list[Any]],
    compiled: Callable[[], dict[str, Any]] = lambda: CLASSIFICATION,
    **arguments: Any,
) -> dict[str, Any]:
    """What comes of training a small model: all that can be compared."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(42)
    model = wrap(small_model(regularized=False))
    model.compile(**compiled())
    history = model.fit(
        **{**data(), "epochs": 3, "verbose": 0, "callbacks": callbacks(), **arguments}
    )
    return {
        "epochs": history.epoch,
        "history": history.history,
        "weights": model.get_weights(),
        "rate": np.array(model.optimizer.learning_rate),
        "iterations": np.array(model.optimizer.iterations),
    }


def assert_as_in_keras(
    callbacks: Callable[[], list[Any]],
    compiled: Callable[[], dict[str, Any]] = lambda: CLASSIFICATION,
    **arguments: Any,
) -> dict[str, Any]:
    expected = computed_by_master(
        lambda: train(lambda model: model, callbacks, compiled, **arguments)
    )
    actual = train(tnt.Model, callbacks, compiled, **arguments)
    assert actual.pop("epochs") == expected.pop("epochs")
    assert_close(actual, expected)
    return actual


class Folders:
    """A folder for plain Keras and one for Tarantella."""

    def __init__(self, base: Path) -> None:
        self.plain, self.ours = base / "plain", base / "ours"
        self.writers = 0

    def both(self, make: Callable[[Path], list[Any]], **arguments: Any) -> None:
        """Trains twice, with callbacks that write to either folder."""
        expected = computed_by_master(
            lambda: train(lambda model: model, lambda: make(self.plain), **arguments)
        )
        actual = train(tnt.Model, lambda: make(self.ours), **arguments)
        assert_close(actual["history"], expected["history"])
        assert_close(actual["weights"], expected["weights"])

    def names(self) -> list[str]:
        """The files, which must be the same in both."""
        ours, plain = (
            sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
            for folder in (self.ours, self.plain)
        )
        assert ours == plain
        return ours


@pytest.fixture
def folders(shared_tmp_path: Path) -> Folders:
    if tnt.is_master_rank():
        (shared_tmp_path / "plain").mkdir()
        (shared_tmp_path / "ours").mkdir()
    tnt.barrier()
    return Folders(shared_tmp_path)


# What callbacks see


@two_and_three_ranks
def test_all_events_with_the_logs_of_the_global_batch() -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        keras.utils.set_random_seed(42)
        recorder = Recorder()
        model = wrap(small_model(regularized=False))
        model.compile(**WITH_METRICS)
        model.fit(**data(), epochs=2, verbose=0, callbacks=[recorder])
        x, y = classification_data()
        model.evaluate(batches(x, y), verbose=0, callbacks=[recorder])
        model.predict(batches(x), verbose=0, callbacks=[recorder])
        return recorder.events

    expected = computed_by_master(lambda: run(lambda model: model))
    actual = run(tnt.Model)
    assert [event[:2] for event in actual] == [event[:2] for event in expected]
    assert_close([event[2] for event in actual], [event[2] for event in expected])


def test_parameters_and_model() -> None:
    seen: list[Any] = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            seen.append((dict(self.params), self.model))

    model = tnt.Model(small_model())
    model.compile(**CLASSIFICATION)
    x, y = classification_data()
    for steps, arguments in [(4, {}), (2, {"steps_per_epoch": 2})]:
        dataset = batches(x, y)
        model.fit(dataset, epochs=5, initial_epoch=4, verbose=0, callbacks=Look(), **arguments)
        params, trained = seen.pop()
        assert params == {"verbose": 0, "epochs": 5, "steps": steps}
        assert trained is model


def test_several_steps_in_one_execution() -> None:
    def compiled() -> dict[str, Any]:
        return {**WITH_METRICS, "steps_per_execution": 3}

    recorders = [Recorder(), Recorder()]
    expected = computed_by_master(
        lambda: train(lambda model: model, lambda: [recorders[0]], compiled)
    )
    events = computed_by_master(lambda: recorders[0].events)
    actual = train(tnt.Model, lambda: [recorders[1]], compiled)
    assert_close(actual["history"], expected["history"])
    assert [event[:2] for event in recorders[1].events] == [event[:2] for event in events]
    assert_close([event[2] for event in recorders[1].events], [event[2] for event in events])


def test_history_is_the_same_object_for_all() -> None:
    model = tnt.Model(small_model())
    model.compile(**CLASSIFICATION)
    own = keras.callbacks.History()
    assert model.fit(**data(), verbose=0, callbacks=[own]) is own
    assert model.history is own
    ready = keras.callbacks.CallbackList([Recorder()], add_history=True, model=model)
    history = model.fit(**data(), verbose=0, callbacks=ready)
    assert list(history.history) == list(own.history)
    assert ready.callbacks[0].events[0][0] == "on_train_begin"


def test_without_readers_the_logs_of_batches_are_not_exchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that steps exchange; at the end of an epoch, logs are computed outside of steps."""
    exchanges: list[Any] = []

    def counted(*args: Any) -> Any:
        if not tf.executing_eagerly():
            exchanges.append(args)
        return results_of_sums(*args)

    monkeypatch.setattr("tarantella.keras.metrics.results_of_sums", counted)
    model = tnt.Model(small_model())
    model.compile(**WITH_METRICS)
    for callbacks, exchanged in ([], 0), ([Recorder()], 2), ([], 0), ([Recorder()], 0):
        # Functions that were traced before are taken up again.
        exchanges.clear()
        history = model.fit(**data(), verbose=0, callbacks=callbacks).history
        assert len(exchanges) == exchanged
        assert_close(history["loss"], tnt.broadcast(history["loss"]), 0, 0)


class NamedCheckpoint(keras.callbacks.ModelCheckpoint):
    """Does at batches what Keras's does."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)


class WatchingCheckpoint(keras.callbacks.ModelCheckpoint):
    """Might do anything at batches."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)


def test_callbacks_that_only_look_on_do_so_when_wrapped_or_subclassed(tmp_path: Path) -> None:
    def exchanged(callback: Any) -> tuple[set[str], set[str]]:
        common = callback_agreement.agree([callback], 0, trains=True)
        return set(common.reads), set(common.acts)

    path = str(tmp_path / "model.keras")
    wrap = tnt.keras.callbacks.Callback
    for onlooker in (
        wrap(keras.callbacks.ModelCheckpoint(path)),
        wrap(keras.callbacks.TensorBoard(str(tmp_path)), run_on_all_ranks=False),
        NamedCheckpoint(path),
        wrap(NamedCheckpoint(path)),
    ):
        assert exchanged(onlooker) == (set(), set())
    assert exchanged(wrap(NamedCheckpoint(path, save_freq=2))) == ({"train"}, set())
    for checkpoint in (WatchingCheckpoint(path), wrap(WatchingCheckpoint(path))):
        assert exchanged(checkpoint) == ({"train"}, {"train_batch_end"})
    checkpoint = keras.callbacks.ModelCheckpoint(path)
    checkpoint.on_train_batch_end = lambda batch, logs=None: None
    assert exchanged(checkpoint) == ({"train"}, {"train_batch_end"})


# Keras's own callbacks


def test_csv_logger(folders: Folders) -> None:
    def logger(folder: Path, **options: Any) -> list[Any]:
        return [keras.callbacks.CSVLogger(str(folder / "log.csv"), **options)]

    def rows(folder: Path) -> Any:
        with (folder / "log.csv").open() as file:
            names, *numbers = list(csv.reader(file, delimiter=";"))
        return names, [[float(number) for number in row] for row in numbers]

    folders.both(lambda folder: logger(folder, separator=";"))
    folders.both(lambda folder: logger(folder, separator=";", append=True))
    assert folders.names() == ["log.csv"]
    ours, plain = rows(folders.ours), rows(folders.plain)
    assert ours[0] == plain[0]
    assert len(ours[1]) == 6
    assert_close(ours[1], plain[1])


def test_what_the_master_writes_is_there_for_the_callbacks_of_all_ranks(folders: Folders) -> None:
    lines: list[int] = []

    class Read(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            lines.append(len((folders.ours / "log.csv").read_text().splitlines()))

    train(tnt.Model, lambda: [keras.callbacks.CSVLogger(folders.ours / "log.csv"), Read()])
    assert lines == [2, 3, 4]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("{epoch}-{val_loss:.6f}.keras", {}),
        ("best.keras", {"save_best_only": True, "monitor": "val_accuracy", "mode": "max"}),
        ("{epoch}.weights.h5", {"save_weights_only": True, "save_best_only": True}),
        ("{epoch}-{batch}-{loss:.6f}.weights.h5", {"save_weights_only": True, "save_freq": 3}),
        ("new/folder/model.h5", {"save_freq": "epoch"}),
    ],
)
def test_model_checkpoint(folders: Folders, name: str, options: dict[str, Any]) -> None:
    found: list[bool] = []

    class Find(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            found.append(any(path.is_file() for path in folders.ours.rglob("*")))

    def checkpoint(folder: Path) -> list[Any]:
        return [keras.callbacks.ModelCheckpoint(folder / name, **options), Find()]

    folders.both(checkpoint, compiled=lambda: WITH_STATE)
    assert all(found[-3:])
    for written in computed_by_master(folders.names):
        if "weights" in written:
            ours, plain = small_model(), small_model()
            for model, folder in ((ours, folders.ours), (plain, folders.plain)):
                model.compile(**WITH_STATE)
                model.load_weights(folder / written)
        else:
            ours, plain = (
                keras.models.load_model(folder / written)
                for folder in (folders.ours, folders.plain)
            )
        assert not isinstance(ours, tnt.Model)
        assert_close(ours.get_weights(), plain.get_weights())
        assert_close(
            [np.array(v) for v in ours.optimizer.variables],
            [np.array(v) for v in plain.optimizer.variables],
        )


class EndOfJobError(Exception):
    """What a run ends with that is to be taken up again."""


class Interrupt(keras.callbacks.Callback):
    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.epoch:
            raise EndOfJobError


@pytest.mark.parametrize(
    "options",
    [{}, {"save_freq": 3}, {"double_checkpoint": True, "delete_checkpoint": False}],
)
def test_backup_and_restore(folders: Folders, options: dict[str, Any]) -> None:
    """It ends as plain Keras does that is not interrupted."""
    folder = folders.ours / "backup"

    def backup() -> list[Any]:
        return [keras.callbacks.BackupAndRestore(str(folder), **options)]

    compiled = {**CLASSIFICATION, "optimizer": "adam"}
    arguments: dict[str, Any] = {"compiled": lambda: compiled, "epochs": 4}
    expected = computed_by_master(lambda: train(lambda model: model, list, **arguments))
    with pytest.raises(EndOfJobError):
        train(tnt.Model, lambda: [*backup(), Interrupt(2)], **arguments)
    assert set(json.loads((folder / "training_metadata.json").read_text())) == {"epoch", "batch"}
    tnt.barrier()  # all ranks have read it
    assert_close(train(tnt.Model, backup, **arguments), expected)
    tnt.barrier()
    kept = options.get("delete_checkpoint") is False
    assert (folder / "latest.weights.h5").exists() == kept


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All scalars in TensorBoard's files below a folder, by part and name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.rglob("events*.v2")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    number = float(tf.make_ndarray(value.tensor))
                    key = f"{file.parent.relative_to(folder)}/{value.tag}"
                    found.setdefault(key, []).append((event.step, number))
    return found


def other_tags(folder: Path) -> set[str]:
    return {
        f"{file.parent.relative_to(folder)}/{value.tag}"
        for file in folder.rglob("events*.v2")
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name != "scalars"
    }


@pytest.mark.parametrize("update_freq", ["epoch", 2])
def test_tensorboard(folders: Folders, update_freq: Any) -> None:
    def board(folder: Path) -> list[Any]:
        return [
            keras.callbacks.TensorBoard(
                str(folder),
                histogram_freq=1,
                write_graph=True,
                write_images=True,
                update_freq=update_freq,
                profile_batch=(2, 3) if folder == folders.ours else 0,
            )
        ]

    folders.both(board, compiled=lambda: WITH_METRICS)
    if not tnt.is_master_rank():
        return
    ours, plain = scalars(folders.ours), scalars(folders.plain)
    assert len(ours) > 5
    # TensorBoard keeps float32, in which sums of another order may differ in the last place.
    assert_close(
        {name: [list(pair) for pair in ours[name]] for name in sorted(ours)},
        {name: [list(pair) for pair in plain[name]] for name in sorted(plain)},
        rtol=3e-7,
    )
    assert other_tags(folders.ours) >= other_tags(folders.plain)
    assert "train/keras" in other_tags(folders.ours)
    assert any("histogram" in tag for tag in other_tags(folders.ours))
    writers = {file.parent for file in folders.ours.rglob("events*.v2")}
    assert writers == {folders.ours / "train", folders.ours / "validation"}
    assert list((folders.ours / "train" / "plugins" / "profile").rglob("*.xplane.pb"))


def test_tensorboard_on_all_ranks(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TNT_TENSORBOARD_ON_ALL_DEVICES", "true")
    configuration.configuration.cache_clear()
    try:
        board = keras.callbacks.TensorBoard(str(folders.ours))
        train(tnt.Model, lambda: [board])
        train(tnt.Model, lambda: [board])
        assert board.log_dir == str(folders.ours)
        # What the user says of one callback comes before what the variable says of all.
        on_master = keras.callbacks.TensorBoard(str(folders.plain))
        on_master = tnt.keras.callbacks.Callback(on_master, run_on_all_ranks=False)
        train(tnt.Model, lambda: [on_master])
    finally:
        monkeypatch.undo()
        configuration.configuration.cache_clear()
    tnt.barrier()
    assert sorted(path.name for path in folders.ours.iterdir()) == [
        f"rank_{rank}" for rank in range(tnt.get_size())
    ]
    own = [scalars(folders.ours / f"rank_{rank}") for rank in range(tnt.get_size())]
    assert own[0]["train/epoch_loss"]
    assert all(each == own[0] for each in own)
    writers = {file.parent for file in folders.plain.rglob("events*.v2")}
    assert writers == {folders.plain / "train", folders.plain / "validation"}


@pytest.mark.parametrize("restore", [False, True])
def test_early_stopping(restore: bool) -> None:
    outcome = assert_as_in_keras(
        lambda: [
            keras.callbacks.EarlyStopping(
                "val_loss", patience=1, min_delta=0.02, restore_best_weights=restore
            )
        ],
        epochs=12,
    )
    assert 1 < len(outcome["history"]["loss"]) < 12


def test_reduce_learning_rate_on_plateau() -> None:
    outcome = assert_as_in_keras(
        lambda: [keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1)],
        epochs=4,
    )
    assert outcome["rate"] < 0.01


def test_learning_rate_scheduler() -> None:
    def schedule(epoch: int, rate: float) -> float:
        return rate * (0.5 + epoch)

    outcome = assert_as_in_keras(lambda: [keras.callbacks.LearningRateScheduler(schedule)])
    assert outcome["history"]["learning_rate"][1] != outcome["history"]["learning_rate"][2]


def test_a_schedule_that_draws_is_drawn_once_for_all() -> None:
    def schedule(epoch: int, rate: float) -> float:
        return float(np.random.default_rng().uniform(0.1, 0.2))

    outcome = train(tnt.Model, lambda: [keras.callbacks.LearningRateScheduler(schedule)])
    everyones = tnt.allgather(outcome["weights"])
    assert_close(everyones[-1], everyones[0], 0, 0)


def test_a_schedule_in_the_optimizer() -> None:
    def compiled() -> dict[str, Any]:
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        return {**CLASSIFICATION, "optimizer": keras.optimizers.SGD(schedule)}

    assert_as_in_keras(lambda: [Recorder()], compiled)


def test_terminate_on_nan_of_one_rank() -> None:
    x, y = classification_data()
    x[4] = np.nan  # the first sample of the second batch: of one rank's micro-batch only
    outcome = assert_as_in_keras(
        lambda: [keras.callbacks.TerminateOnNaN()], x=batches(x, y), validation_data=None
    )
    assert len(outcome["history"]["loss"]) == 1
    assert outcome["iterations"] == 2


@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_swap_ema_weights(swap_on_epoch: bool, folders: Folders) -> None:
    def compiled() -> dict[str, Any]:
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
        return {**CLASSIFICATION, "optimizer": optimizer}

    folders.both(
        lambda folder: [
            keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch),
            keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
        ],
        compiled=compiled,
    )
    for name in computed_by_master(folders.names):
        ours, plain = small_model(), small_model()
        ours.load_weights(folders.ours / name)
        plain.load_weights(folders.plain / name)
        assert_close(ours.get_weights(), plain.get_weights())


def test_lambda_callback() -> None:
    losses: list[float] = []

    def callbacks() -> list[Any]:
        losses.clear()
        return [
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
            )
        ]

    train(tnt.Model, callbacks)
    ours = list(losses)
    plain = computed_by_master(lambda: [train(lambda model: model, callbacks), losses][1])
    assert_close(ours, plain)


@two_and_three_ranks
def test_remote_monitor_sends_once() -> None:
    pytest.importorskip("requests")
    received: list[Any] = []

    class Receive(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            received.append(json.loads(self.rfile.read(length)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receive) if tnt.is_master_rank() else None
    if server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    port = tnt.broadcast(server.server_port if server else 0)
    monitor = keras.callbacks.RemoteMonitor(f"http://127.0.0.1:{port}", send_as_json=True)
    outcome = train(tnt.Model, lambda: [monitor])
    if server:
        server.shutdown()
        server.server_close()
        assert [sent["epoch"] for sent in received] == [0, 1, 2]
        assert_close([sent["loss"] for sent in received], outcome["history"]["loss"])


# A user's own callbacks


class Own(keras.callbacks.Callback):
    """Reads and sets what callbacks read and set, and keeps state."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.norms.append(float(np.linalg.norm(self.model.get_weights()[0])))
        self.model.optimizer.learning_rate = 0.01 / (1 + len(self.norms))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        weights = self.model.get_weights()
        self.model.set_weights([0.9 * weight for weight in weights])
        if sum(self.norms) > 1 and epoch == 1:
            self.model.stop_training = True


def test_a_callback_that_changes_the_model() -> None:
    outcome = assert_as_in_keras(lambda: [Own()], epochs=4)
    assert len(outcome["history"]["loss"]) == 2


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("everywhere", "level"),
    [
        (False, "batch"),
        (False, "epoch"),
        (False, "validation"),
        (True, "epoch"),
        pytest.param(True, "batch", marks=pytest.mark.long),
        pytest.param(True, "validation", marks=pytest.mark.long),
    ],
)
def test_a_stop_on_one_rank_stops_all_at_the_same_step(level: str, everywhere: bool) -> None:
    last = tnt.get_size() - 1

    class Clock(keras.callbacks.Callback):
        def stop(self) -> None:
            if everywhere or tnt.get_rank() == last:
                self.model.stop_training = True
                assert self.model.stop_training

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if level == "batch" and self.model.optimizer.iterations == 6:
                self.stop()

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            if level == "validation" and self.model.optimizer.iterations == 8:
                self.stop()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if level == "epoch" and epoch == 1:
                self.stop()

    outcome = train(tnt.Model, lambda: [Clock()], epochs=4)
    assert outcome["iterations"] == (6 if level == "batch" else 8)
    assert outcome["epochs"] == [0, 1]
    plain = computed_by_master(
        lambda: train(lambda model: model, lambda: [StopAt(outcome["iterations"])], epochs=4)
    )
    assert_close(outcome["weights"], plain["weights"])


class StopAt(keras.callbacks.Callback):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.optimizer.iterations >= self.step:
            self.model.stop_training = True


def test_a_signal_to_one_rank_stops_all() -> None:
    """With no callback at batches, the others hear of it in the middle of an epoch, too."""
    x, y = classification_data(4)
    endless = batches(x, y).repeat()
    model = tnt.Model(small_model())
    model.compile(**CLASSIFICATION)
    before = signal.signal(signal.SIGUSR1, lambda *_: setattr(model, "stop_training", True))

    def send_signal() -> None:
        while int(model.optimizer.iterations) < 3:  # `fit` forgets what was asked for before
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    if tnt.get_rank() == tnt.get_size() - 1:
        threading.Thread(target=send_signal).start()
    try:
        history = model.fit(endless, steps_per_epoch=1_000_000, epochs=2, verbose=0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert history.epoch == [0]
    steps = tnt.allgather(int(model.optimizer.iterations))
    assert steps == [steps[0]] * tnt.get_size()


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_stopping_an_evaluation_or_a_prediction(method: str) -> None:
    class Stop(keras.callbacks.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1 and tnt.get_rank() == tnt.get_size() - 1:
                self.model.stop_evaluating = True

        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1 and tnt.get_rank() == tnt.get_size() - 1:
                self.model.stop_predicting = True

    x, y = classification_data()
    model = tnt.Model(small_model())
    model.compile(**CLASSIFICATION)
    if method == "evaluate":
        stopped = model.evaluate(batches(x, y), verbose=0, callbacks=[Stop()])
        assert_close(stopped, model.evaluate(batches(x[:8], y[:8]), verbose=0))
    else:
        stopped = model.predict(batches(x), verbose=0, callbacks=[Stop()])
        assert_close(stopped, model.predict(batches(x[:8]), verbose=0))


@pytest.mark.parametrize("where", ["master", "others"])
def test_callbacks_of_some_ranks_only(where: str, shared_tmp_path: Path) -> None:
    """As in `callbacks=[...] if tnt.is_master_rank() else []`."""

    class Decide(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert np.isfinite(logs["loss"])
            if self.model.optimizer.iterations == 3:
                self.model.optimizer.learning_rate = 0.5

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                self.model.set_weights([0 * weight for weight in self.model.get_weights()])
                self.model.stop_training = True

    def callbacks() -> list[Any]:
        if tnt.is_master_rank() != (where == "master"):
            return []
        path = shared_tmp_path / "model.keras"
        return [Decide(), *([keras.callbacks.ModelCheckpoint(path)] if where == "master" else [])]

    outcome = train(tnt.Model, callbacks, epochs=4)
    everyones = tnt.allgather([outcome["weights"], outcome["rate"], outcome["iterations"]])
    assert_close(everyones[-1], everyones[0], 0, 0)
    assert outcome["epochs"] == [0, 1]
    if where == "master":  # whose word counts
        assert outcome["rate"] == 0.5
        assert not np.any(outcome["weights"][0])
        tnt.barrier()
        assert (shared_tmp_path / "model.keras").exists()
    else:
        assert outcome["rate"] == 0.01
        assert np.any(outcome["weights"][0])


@pytest.mark.parametrize(
    "event", ["on_train_begin", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end"]
)
def test_an_error_on_one_rank_is_an_error_on_all(event: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        if tnt.get_rank() == tnt.get_size() - 1:
            raise KeyError("nothing there")

    broken = keras.callbacks.LambdaCallback(**{event: fail})
    with pytest.raises(KeyError, match="nothing there"):
        train(tnt.Model, lambda: [broken])
    train(tnt.Model, lambda: [Recorder()])  # all ranks can go on


@pytest.mark.parametrize("kind", ["logger", "own"])
def test_an_error_in_a_callback_of_the_master_is_an_error_on_all(
    kind: str, shared_tmp_path: Path
) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("nothing there")

    def callback() -> Any:
        if kind == "logger":
            return keras.callbacks.CSVLogger(shared_tmp_path / "no folder" / "log.csv")
        own = keras.callbacks.LambdaCallback(on_epoch_end=fail)
        return tnt.keras.callbacks.Callback(own, run_on_all_ranks=False)

    with pytest.raises(FileNotFoundError if kind == "logger" else KeyError):
        train(tnt.Model, lambda: [callback()])
    train(tnt.Model, list)  # all ranks can go on


def test_an_evaluation_by_the_master_alone_is_an_error() -> None:
    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.evaluate(data()["x"], verbose=0)

    alone = tnt.keras.callbacks.Callback(Evaluate(), run_on_all_ranks=False)
    with pytest.raises(tnt.errors.MismatchError, match="not at the same point"):
        train(tnt.Model, lambda: [alone])


def test_an_error_of_the_master_on_its_way_to_a_checkpoint(shared_tmp_path: Path) -> None:
    """The other ranks, which wait for the file, hear of it."""

    class Broken(keras.callbacks.ModelCheckpoint):
        def _should_save_model(self, *args: Any) -> bool:
            if tnt.is_master_rank():
                raise OSError("no space left on device")
            return True

    with pytest.raises(OSError, match="no space left on device"):
        train(tnt.Model, lambda: [Broken(shared_tmp_path / "model.keras")])
    train(tnt.Model, list)


# Settings for one callback


def test_a_callback_for_the_master_only() -> None:
    recorder = Recorder()
    train(tnt.Model, lambda: [tnt.keras.callbacks.Callback(recorder, run_on_all_ranks=False)])
    assert bool(recorder.events) == tnt.is_master_rank()


@pytest.mark.parametrize("validated", [False, True])
def test_own_logs(validated: bool) -> None:
    """A rank's own logs are those of plain Keras on its micro-batches, if nothing is learned."""
    x, y = classification_data(12)
    arguments = {"epochs": 2, "verbose": 0, "shuffle": False}

    def compiled() -> dict[str, Any]:
        return {**CLASSIFICATION, "optimizer": keras.optimizers.SGD(0.0)}

    def own(array: Any) -> Any:
        parts = [np.array_split(array[i : i + 6], tnt.get_size()) for i in (0, 6)]
        return np.concatenate([part[tnt.get_rank()] for part in parts])

    model = tnt.Model(small_model())
    recorder, usual = Recorder(), Recorder()
    marked = tnt.keras.callbacks.Callback(recorder, aggregate_logs=False)
    assert isinstance(marked, Recorder)
    assert isinstance(marked, tnt.keras.callbacks.Callback)
    model.compile(**compiled())
    validation = {"validation_data": (x, y), "validation_batch_size": 6} if validated else {}
    model.fit(x, y, batch_size=6, callbacks=[marked, usual], **arguments, **validation)

    alone, expected = small_model(), Recorder()
    alone.set_weights(model.get_weights())
    alone.compile(**compiled())
    size = 6 // tnt.get_size()
    if validated:
        validation["validation_data"] = (own(x), own(y))
        validation["validation_batch_size"] = size
    alone.fit(own(x), own(y), batch_size=size, callbacks=[expected], **arguments, **validation)
    assert [event[:2] for event in recorder.events] == [event[:2] for event in expected.events]
    assert_close([event[2] for event in recorder.events], [event[2] for event in expected.events])
    assert recorder.events[-1][2]["loss"] != usual.events[-1][2]["loss"]


def test_a_file_for_each_rank(shared_tmp_path: Path) -> None:
    path = shared_tmp_path / f"log-{tnt.get_rank()}.csv"
    logger = keras.callbacks.CSVLogger(path)
    train(tnt.Model, lambda: [tnt.keras.callbacks.Callback(logger, aggregate_logs=False)])
    assert len(path.read_text().splitlines()) == 4
    common = keras.callbacks.CSVLogger(shared_tmp_path / "log.csv")
    train(tnt.Model, lambda: [tnt.keras.callbacks.Callback(common)])
    assert len((shared_tmp_path / "log.csv").read_text().splitlines()) == 4
    with pytest.raises(ValueError, match="give each rank a file of its own"):
        train(tnt.Model, lambda: [tnt.keras.callbacks.Callback(common, aggregate_logs=False)])


def test_a_checkpoint_by_own_logs_is_the_masters(shared_tmp_path: Path) -> None:
    checkpoint = keras.callbacks.ModelCheckpoint(
        shared_tmp_path / "{epoch}.keras", monitor="loss", mode="max", save_best_only=True
    )
    train(
        tnt.Model,
        lambda: [tnt.keras.callbacks.Callback(checkpoint, aggregate_logs=False)],
        epochs=2,
    )
    assert (shared_tmp_path / "1.keras").exists()


def test_a_marked_callback_works_in_plain_keras() -> None:
    marked = tnt.keras.callbacks.Callback(
        keras.callbacks.EarlyStopping("loss", patience=0, mode="max"), run_on_all_ranks=False
    )
    outcome = train(lambda model: model, lambda: [marked], epochs=5)
    assert len(outcome["epochs"]) == 2
    assert marked.stopped_epoch == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tnt.keras.callbacks.Callback(print), "takes a Keras callback, not"),
        (lambda: tnt.keras.callbacks.Callback(Recorder), "not Recorder. Make one first"),
        (lambda: tnt.keras.callbacks.Callback(Recorder(), aggregate_logs=1), "aggregate_logs is 1"),
        (lambda: train(tnt.Model, lambda: ["csv"]), "contains 'csv', which is not a callback"),
        (lambda: train(tnt.Model, lambda: [Recorder]), "which is not a callback"),
        (
            lambda: tnt.keras.callbacks.Callback(keras.callbacks.CallbackList([])),
            "one by one",
        ),
    ],
)
def test_bad_settings(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_every_callback_of_keras_is_tested_here() -> None:
    """A new one in another version of Keras has to be looked at."""
    known = {
        "BackupAndRestore",
        "CSVLogger",
        "Callback",
        "CallbackList",
        "EarlyStopping",
        "History",
        "LambdaCallback",
        "LearningRateScheduler",
        "ModelCheckpoint",
        "OrbaxCheckpoint",  # needs a package of its own; runs on the master like CSVLogger
        "ProgbarLogger",
        "ReduceLROnPlateau",
        "RemoteMonitor",
        "SwapEMAWeights",
        "TensorBoard",
        "TerminateOnNaN",
    }
    assert {name for name in vars(keras.callbacks) if not name.startswith("_")} <= known
