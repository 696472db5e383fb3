"""Training that was interrupted resumes where it stopped, and ends as if it never had been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import assert_close

import tarantella as tnt
from tarantella.errors import InputError

pytestmark = pytest.mark.ranks(2)

SAMPLES, BATCH, STEPS, EPOCHS = 22, 5, 5, 3
X = np.random.default_rng(0).normal(size=(SAMPLES, 6))
Y = (X.sum(1) > 0).astype("int64")


class InterruptError(Exception):
    """The end of a run, for a reason of its own."""


class Interruption(keras.callbacks.Callback):
    """Ends training after a step of an epoch, or at its end."""

    def __init__(self, epoch: int, step: int | None) -> None:
        super().__init__()
        self._at = epoch, step
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self._epoch, batch) == self._at:
            raise InterruptError

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if (epoch, None) == self._at:
            raise InterruptError


def arrays() -> dict[str, Any]:
    return {"x": X, "y": Y, "batch_size": BATCH, "shuffle": True}


def arrays_that_continue() -> dict[str, Any]:
    return {**arrays(), "batch_size": 2, "steps_per_epoch": 4}


def dataset() -> dict[str, Any]:
    return {"x": tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(SAMPLES).batch(BATCH)}


def repeated() -> dict[str, Any]:
    shuffled = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(9).repeat()
    return {"x": shuffled.batch(BATCH), "steps_per_epoch": 4}


def filtered() -> dict[str, Any]:
    some = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(9).filter(lambda x, y: x[0] < 1.5)
    return {"x": some.batch(BATCH)}


def noisy() -> dict[str, Any]:
    noise = keras.layers.GaussianNoise(0.5, seed=3)
    some = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    return {"x": some.map(lambda x, y: (noise(x, training=True), y))}


def shuffled_twice_in_an_epoch() -> dict[str, Any]:
    once = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(SAMPLES)
    return {"x": once.repeat(2).batch(2 * BATCH)}


def cached_in_an_order() -> dict[str, Any]:
    return {"x": tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(9).cache().batch(BATCH)}


def one_after_the_other() -> dict[str, Any]:
    first = tf.data.Dataset.from_tensor_slices((X[:9], Y[:9])).shuffle(9)
    return {"x": first.concatenate(first.shuffle(5)).batch(BATCH)}


def generator() -> dict[str, Any]:
    def batches() -> Iterator[Any]:
        numbers = np.random.default_rng(1)
        while True:
            rows = numbers.integers(0, SAMPLES, BATCH)
            yield X[rows], Y[rows]

    return {"x": batches(), "steps_per_epoch": 4}


class Batches(keras.utils.PyDataset):
    """Draws an order for each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = np.random.default_rng(2)
        self._order = np.arange(SAMPLES)

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        rows = self._order[index * BATCH : (index + 1) * BATCH]
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        self._order = self._numbers.permutation(SAMPLES)


def py_dataset() -> dict[str, Any]:
    return {"x": Batches()}


# On three ranks, `dataset` is tried below; most other tests here are of it, too.
KINDS = [
    arrays,
    cached_in_an_order,
    generator,
    py_dataset,
    *(
        pytest.param(kind, marks=pytest.mark.long)
        for kind in (
            arrays_that_continue,
            dataset,
            filtered,
            noisy,
            one_after_the_other,
            repeated,
            shuffled_twice_in_an_epoch,
        )
    ),
]


def make_model(wrap: Any = tnt.Model, dropout: float = 0.3, **options: Any) -> Any:
    layers = keras.layers
    model = wrap(
        keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, activation="relu"),
                layers.BatchNormalization(synchronized=True),
                layers.Dropout(dropout, seed=5),
                layers.Dense(2, activation="softmax"),
            ]
        )
    )
    model.compile(
        **{
            "optimizer": keras.optimizers.Adam(0.01),
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy"],
            **options,
        }
    )
    return model


def small_model() -> Any:
    """For tests of data, callbacks and files: it has little state, and is quickly traced."""
    model = tnt.Model(
        keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, activation="softmax")])
    )
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    return model


def train(
    data: Callable[[], dict[str, Any]],
    callbacks: Callable[[], list[Any]] = list,
    make: Callable[[], Any] = make_model,
    **options: Any,
) -> tuple[Any, list[Any]]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(42)
    model = make()
    history = model.fit(
        **{"epochs": EPOCHS, "verbose": 0, **data(), **options}, callbacks=callbacks()
    )
    return history.history, [np.array(weight) for weight in model.weights]


def assert_resumes(
    folder: Path,
    data: Callable[[], dict[str, Any]],
    interruptions: list[tuple[int, int | None]],
    save_freq: Any = 2,
    callbacks: Callable[[Path], list[Any]] = lambda folder: [],
    **options: Any,
) -> Any:
    """Compares a run that is interrupted with one that is not; returns the latter's history."""
    (folder / "whole").mkdir(exist_ok=True)
    (folder / "parts").mkdir(exist_ok=True)
    expected = train(data, lambda: callbacks(folder / "whole"), **options)

    def with_backup(*interruption: Any) -> list[Any]:
        backup = keras.callbacks.BackupAndRestore(folder / "backup", save_freq=save_freq)
        return [backup, *callbacks(folder / "parts"), *interruption]

    for interruption in interruptions:
        with pytest.raises(InterruptError):
            train(data, lambda at=interruption: with_backup(Interruption(*at)), **options)
    actual = train(data, with_backup, **options)
    assert_close(actual[0], expected[0], 0.0, 0.0)
    assert_close(actual[1], expected[1], 0.0, 0.0)
    tnt.barrier()
    assert not (folder / "backup").exists()
    return expected[0]


@pytest.mark.parametrize("data", KINDS)
def test_kinds_of_data(data: Callable[[], dict[str, Any]], shared_tmp_path: Path) -> None:
    assert_resumes(shared_tmp_path, data, [(1, 3)], make=small_model, validation_data=(X, Y))


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("data", [pytest.param(arrays, marks=pytest.mark.long), dataset])
def test_kinds_of_data_on_other_numbers_of_ranks(
    data: Callable[[], dict[str, Any]], shared_tmp_path: Path
) -> None:
    assert_resumes(shared_tmp_path, data, [(1, 3)], validation_data=(X, Y))


def test_between_epochs(shared_tmp_path: Path) -> None:
    assert_resumes(shared_tmp_path, dataset, [(0, None), (1, 3)], save_freq="epoch")


class Decisions(keras.callbacks.Callback):
    """What other callbacks decide on: a metric that is best in the second epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert logs is not None
        logs["worth"] = [3.0, 1.0, 2.0, 2.5, 2.0, 3.0, 4.0, 5.0][epoch]


def test_callbacks_that_wait(shared_tmp_path: Path) -> None:
    def callbacks(folder: Path) -> list[Any]:
        return [
            Decisions(),
            keras.callbacks.ReduceLROnPlateau(monitor="worth", mode="min", patience=2),
            keras.callbacks.EarlyStopping(
                monitor="worth", mode="min", patience=4, restore_best_weights=True
            ),
            keras.callbacks.CSVLogger(folder / "log.csv"),
            keras.callbacks.ModelCheckpoint(
                folder / "{epoch}.weights.h5", monitor="worth", mode="min", save_best_only=True,
                save_weights_only=True,
            ),
        ]  # fmt: skip

    history = assert_resumes(
        shared_tmp_path,
        dataset,
        [(2, 3), (4, None)],
        save_freq=1,
        callbacks=callbacks,
        epochs=8,
        make=small_model,
    )
    assert len(history["loss"]) == 6
    assert history["learning_rate"] == pytest.approx([0.01] * 4 + [0.001] * 2)
    for name in ("log.csv", "1.weights.h5", "2.weights.h5"):
        parts, whole = (shared_tmp_path / folder / name for folder in ("parts", "whole"))
        assert parts.stat().st_size == whole.stat().st_size
    log = (shared_tmp_path / "whole" / "log.csv").read_text()
    assert (shared_tmp_path / "parts" / "log.csv").read_text() == log
    assert not (shared_tmp_path / "parts" / "3.weights.h5").exists()


def test_training_that_was_to_stop_does_so(shared_tmp_path: Path) -> None:
    """It ends between the decision and the end of `fit`."""

    def callbacks(folder: Path) -> list[Any]:
        stop = keras.callbacks.EarlyStopping(monitor="worth", mode="min", patience=1)
        at_end = {"on_train_end": lambda logs: _fail_once(folder)}
        return [Decisions(), stop, keras.callbacks.LambdaCallback(**at_end)]

    def _fail_once(folder: Path) -> None:
        tnt.barrier()
        failed = (folder / "failed").exists()
        tnt.barrier()
        (folder / "failed").touch()
        if folder.name == "parts" and not failed:
            raise InterruptError

    backup = lambda: keras.callbacks.BackupAndRestore(shared_tmp_path / "backup")  # noqa: E731
    (shared_tmp_path / "whole").mkdir(exist_ok=True)
    (shared_tmp_path / "parts").mkdir(exist_ok=True)
    expected = train(
        dataset, lambda: callbacks(shared_tmp_path / "whole"), epochs=8, make=small_model
    )
    parts = lambda: [*callbacks(shared_tmp_path / "parts"), backup()]  # noqa: E731
    with pytest.raises(InterruptError):
        train(dataset, parts, epochs=8, make=small_model)
    assert_close(train(dataset, parts, epochs=8, make=small_model), expected, 0.0, 0.0)
    assert len(expected[0]["loss"]) == 3


def test_several_steps_in_one_execution(shared_tmp_path: Path) -> None:
    assert_resumes(
        shared_tmp_path,
        dataset,
        [(1, 3)],
        make=lambda: make_model(steps_per_execution=2),
    )


def test_averaged_weights_and_accumulated_gradients(shared_tmp_path: Path) -> None:
    def make() -> Any:
        optimizer = keras.optimizers.AdamW(
            0.01, use_ema=True, ema_momentum=0.8, gradient_accumulation_steps=2
        )
        return make_model(optimizer=optimizer)

    swap = lambda folder: [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]  # noqa: E731
    assert_resumes(shared_tmp_path, dataset, [(1, None)], make=make, callbacks=swap)


@pytest.mark.usefixtures("float64")
def test_files_of_plain_keras_are_taken_up(shared_tmp_path: Path) -> None:
    """In which the state of random layers is missing."""
    make = lambda: make_model(dropout=0.0)  # noqa: E731
    expected = train(arrays, make=make, shuffle=False)
    folder = shared_tmp_path / "backup"
    if tnt.is_master_rank():
        keras.utils.set_random_seed(42)
        model = make_model(wrap=lambda plain: plain, dropout=0.0)
        backup = keras.callbacks.BackupAndRestore(folder)
        with pytest.raises(InterruptError):
            model.fit(X, Y, BATCH, 3, 0, [backup, Interruption(2, 0)], shuffle=False)
    tnt.barrier()
    backup = keras.callbacks.BackupAndRestore(folder)
    actual = train(arrays, lambda: [backup], make=make, shuffle=False)
    assert len(actual[0]["loss"]) == 1
    assert_close(actual[1], expected[1])


def test_other_numbers_of_steps(shared_tmp_path: Path) -> None:
    backup = lambda: keras.callbacks.BackupAndRestore(shared_tmp_path, save_freq=1)  # noqa: E731
    with pytest.raises(InterruptError):
        train(arrays, lambda: [backup(), Interruption(1, 4)], make=small_model)
    fewer = lambda: {"x": X[:10], "y": Y[:10], "batch_size": BATCH}  # noqa: E731
    with pytest.raises(InputError, match="The data have 2 steps in an epoch, but the backup"):
        train(fewer, lambda: [backup()], make=small_model)


@pytest.mark.parametrize("name", ["latest.weights.h5", "tarantella.npz"])
def test_backups_that_cannot_be_read(name: str, shared_tmp_path: Path) -> None:
    backup = lambda: keras.callbacks.BackupAndRestore(  # noqa: E731
        shared_tmp_path, save_freq=1, double_checkpoint=True
    )
    with pytest.raises(InterruptError):
        train(arrays, lambda: [backup(), Interruption(1, 2)], make=small_model)
    tnt.barrier()
    if tnt.is_master_rank():
        file = shared_tmp_path / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    tnt.barrier()
    # The one before it is whole: it was made one step before.
    expected = train(arrays, make=small_model)
    assert_close(train(arrays, lambda: [backup()], make=small_model), expected, 0.0, 0.0)
    alone = lambda: keras.callbacks.BackupAndRestore(shared_tmp_path, save_freq=1)  # noqa: E731
    with pytest.raises(InterruptError):
        train(arrays, lambda: [alone(), Interruption(1, 2)], make=small_model)
    tnt.barrier()
    if tnt.is_master_rank():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    tnt.barrier()
    with pytest.raises(InputError, match=f"The backup in {shared_tmp_path} cannot be restored"):
        train(arrays, lambda: [alone()], make=small_model)


def test_a_backup_of_another_model(shared_tmp_path: Path) -> None:
    backup = lambda: keras.callbacks.BackupAndRestore(shared_tmp_path, save_freq=1)  # noqa: E731
    with pytest.raises(InterruptError):
        train(arrays, lambda: [backup(), Interruption(1, 2)], make=small_model)

    def other() -> Any:
        layers = [keras.Input((6,)), keras.layers.Dense(3, activation="softmax")]
        model = tnt.Model(keras.Sequential(layers))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    with pytest.raises(InputError, match="cannot be restored: .* Resume with the model"):
        train(arrays, lambda: [backup()], make=other)


class TwoOptimizers(keras.Model):
    """Trains its two layers apart, and gives its metrics other names than Keras would."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(4, activation="tanh")
        self.second = keras.layers.Dense(2, activation="softmax")
        self.second_optimizer = keras.optimizers.RMSprop(0.01)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x) + 0.1 * keras.random.normal((4,)))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x))
        for layer, optimizer in (
            (self.first, self.optimizer),
            (self.second, self.second_optimizer),
        ):
            gradients = tape.gradient(loss, layer.trainable_variables)
            optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
        return {"own": loss}


@pytest.mark.parametrize("save_freq", ["epoch", STEPS])
def test_two_optimizers_a_seed_for_all_and_logs_of_its_own(
    save_freq: Any, shared_tmp_path: Path
) -> None:
    def make() -> Any:
        model = tnt.Model(TwoOptimizers())
        model.compile("adam", "sparse_categorical_crossentropy")
        return model  # not built yet

    assert_resumes(shared_tmp_path, dataset, [(1, 0)], save_freq=save_freq, make=make)


def test_numbers_that_only_one_rank_draws(shared_tmp_path: Path) -> None:
    drawn: dict[str, list[float]] = {"whole": [], "parts": []}

    class Draw(keras.callbacks.Callback):
        def __init__(self, folder: Path) -> None:
            super().__init__()
            self._drawn = drawn[folder.name]

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if tnt.get_rank() == 1:
                self._drawn.append(float(keras.random.normal(())))

    callbacks = lambda folder: [Draw(folder)]  # noqa: E731
    assert_resumes(shared_tmp_path, arrays, [(1, 3)], callbacks=callbacks, make=small_model)
    assert drawn["parts"] == drawn["whole"]
    assert len(drawn["whole"]) == (EPOCHS if tnt.get_rank() == 1 else 0)


def test_layers_with_a_state_of_their_own(shared_tmp_path: Path) -> None:
    def make() -> Any:
        layers = [keras.layers.GRU(3, stateful=True), keras.layers.Dense(2, "softmax")]
        inputs = keras.Input((6, 1), batch_size=4 // tnt.get_size())
        model = tnt.Model(keras.Sequential([inputs, *layers]))
        model.compile("adam", "sparse_categorical_crossentropy")
        return model

    data = lambda: {"x": X[:20, :, None], "y": Y[:20], "batch_size": 4, "shuffle": False}  # noqa: E731
    assert_resumes(shared_tmp_path, data, [(1, 2)], make=make)


def test_a_stop_in_the_middle_of_an_epoch(shared_tmp_path: Path) -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations == 8:
                self.model.stop_training = True

    expected = train(dataset, lambda: [Stop()], make=small_model)
    backup = lambda: keras.callbacks.BackupAndRestore(shared_tmp_path, save_freq=1)  # noqa: E731
    with pytest.raises(InterruptError):
        train(dataset, lambda: [Stop(), backup(), Interruption(1, None)], make=small_model)
    assert_close(train(dataset, lambda: [Stop(), backup()], make=small_model), expected, 0.0, 0.0)
    assert len(expected[0]["loss"]) == 2


def test_a_log_that_had_no_line_yet_and_files_of_others(shared_tmp_path: Path) -> None:
    def callbacks(folder: Path) -> list[Any]:
        return [keras.callbacks.CSVLogger(folder / "log.csv")]

    (shared_tmp_path / "backup" / "more").mkdir(parents=True, exist_ok=True)
    (shared_tmp_path / "backup" / "notes").write_text("mine")  # in the way of renaming a folder
    assert_resumes(
        shared_tmp_path, dataset, [(0, 4)], save_freq=4, callbacks=callbacks, make=small_model
    )
    logs = [shared_tmp_path / folder / "log.csv" for folder in ("parts", "whole")]
    assert logs[0].read_text() == logs[1].read_text()


def test_metrics_that_are_arrays(shared_tmp_path: Path) -> None:
    data = lambda: {**arrays(), "y": np.eye(2)[Y]}  # noqa: E731
    metric = lambda: keras.metrics.F1Score(average=None)  # noqa: E731
    make = lambda: make_model(loss="categorical_crossentropy", metrics=[metric()])  # noqa: E731
    assert_resumes(shared_tmp_path, data, [(1, None)], save_freq="epoch", make=make)


def test_a_folder_that_cannot_be_replaced() -> None:
    backup = keras.callbacks.BackupAndRestore("/dev/shm")
    with pytest.raises(InputError, match="cannot be replaced as a whole: use a folder inside it"):
        train(arrays, lambda: [backup])
