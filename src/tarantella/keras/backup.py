"""Training that was interrupted goes on where it stopped, and ends as if it never had.

Keras's `BackupAndRestore` keeps weights, optimizer and the number of the epoch. That is not
enough: data that are shuffled would come in another order, an epoch that was interrupted would
begin again with weights from its middle, callbacks that wait for something would have forgotten
for how long. So the rest is kept beside it: the step, the metrics of the epoch and the state of
random layers on each rank, and what Keras's own callbacks know.

The data are brought to their place by reading them again, from the beginning, without training on
them. Of an epoch before the last one, the first step is enough for those that Keras begins to read
anew, in an order that depends on nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tarantella.comm import agreement, buffers
from tarantella.errors import InputError
from tarantella.internals import keras as internals
from tarantella.keras import saving, state
from tarantella.keras.stop_requests import NAMES
from tarantella.runtime import atomic_write, messages, world
from tarantella.runtime.failure import Terminated
from tarantella.runtime.log import LOGGER

_WEIGHTS = "latest.weights.h5"
_METADATA = "training_metadata.json"
_MORE = "tarantella.npz"
_FILES = (_WEIGHTS, _METADATA, _MORE)
_PREVIOUS = ".bkp"

# By name: arrays of this rank.
Own = dict[str, list[Any]]

# What Keras's own callbacks know of the epochs before.
_KNOWN: list[tuple[Any, tuple[str, ...]]] = [
    (keras.callbacks.EarlyStopping, ("wait", "stopped_epoch", "best", "best_epoch")),
    (keras.callbacks.ReduceLROnPlateau, ("wait", "best", "cooldown_counter")),
    (
        keras.callbacks.ModelCheckpoint,
        ("best", "_batches_seen_since_last_saving", "_last_batch_seen", "_current_epoch"),
    ),
    (keras.callbacks.SwapEMAWeights, ("_ema_weights_in_model",)),
    (keras.callbacks.History, ("epoch", "history")),
]


@dataclass
class Position:
    """How far training has come, and what is not a weight.

    Attributes:
        epoch: The epoch that it is in.
        step: How many steps of that epoch are done.
        unsaved: How many steps were done since the last backup.
        stopped: Whether it was to stop there.
        logs: What the last step has said.
        callbacks: By the name of a callback: what it knows.
        arrays: Those of callbacks and ranks, by their names and numbers.
        ranks: How many ranks trained.
    """

    epoch: int = 0
    step: int = 0
    unsaved: int = 0
    stopped: bool = False
    logs: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)
    ranks: int = 0

    def numbered(self, name: str) -> list[Any]:
        """The arrays of something, in their order."""
        count = sum(1 for key in self.arrays if key.rpartition("-")[0] == name)
        return [self.arrays[f"{name}-{number}"] for number in range(count)]

    def add(self, name: str, arrays: Sequence[Any]) -> None:
        """Adds arrays of something."""
        self.arrays.update((f"{name}-{number}", array) for number, array in enumerate(arrays))


def backup_of(callbacks: Sequence[Any]) -> Any | None:
    """The callback that backs the training up, if there is one."""
    found = [each for each in callbacks if isinstance(each, keras.callbacks.BackupAndRestore)]
    if not found:
        return None
    if saving.local_path(found[0].backup_dir) is None:
        raise InputError(
            f"BackupAndRestore has the folder {found[0].backup_dir!r}, which is none of a file "
            "system: name one that is."
        )
    return found[0]


def tidying(callbacks: Sequence[Any]) -> list[Any]:
    """The callbacks, of which those that back up do no more than to tidy up."""
    return [
        OnlyAtEnd(each) if isinstance(each, keras.callbacks.BackupAndRestore) else each
        for each in callbacks
    ]


class OnlyAtEnd(keras.callbacks.Callback):
    """Stands for a `BackupAndRestore` among other callbacks: it removes what is needed no more."""

    def __init__(self, callback: Any) -> None:
        super().__init__()
        self._callback = callback

    def set_model(self, model: Any) -> None:
        self._callback.set_model(model)

    def on_train_end(self, logs: Any = None) -> None:
        self._callback.on_train_end(logs)


@contextmanager
def kept(
    model: Any,
    inner: keras.callbacks.CallbackList,
    callback: Any | None,
    save_freq: Any,
    begins_anew: Callable[[], bool],
    initial_epoch: int,
    build: Callable[[], None],
) -> Iterator[keras.callbacks.CallbackList]:
    """The callbacks of a `fit` that is backed up, and goes on where another one has stopped.

    Args:
        model: The model that is trained.
        inner: The callbacks as they are.
        callback: The `BackupAndRestore` of this rank.
        save_freq: That of the master rank's; None: nothing is backed up.
        begins_anew: Finds out whether an epoch of data depends on nothing but how often they were
            begun; only asked if something is backed up, as it looks at every operation.
        initial_epoch: The number of the first epoch.
        build: Makes the variables of a model that has not seen data yet.
    """
    if save_freq is None:
        yield inner
        return
    backup = _Backup(callback if world.is_master_rank() else None, model, build)
    container = KeptCallbacks(model, inner, backup, save_freq, begins_anew(), initial_epoch)
    try:
        with _heard_signal(model):
            yield container
    finally:
        container.let_go()


@contextmanager
def _heard_signal(model: Any) -> Iterator[None]:
    """Has SIGTERM ask for the end of training, if nobody else has a use for it."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def hear(*_: object) -> None:
        model._tnt_stops.want("leave", True)

    signal.signal(signal.SIGTERM, hear)
    came = False
    try:
        yield
        came = model._tnt_stops.wants("leave")
    finally:
        model._tnt_stops.want("leave", False)
        if signal.getsignal(signal.SIGTERM) is hear:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if came:  # when all was done
        signal.raise_signal(signal.SIGTERM)


class KeptCallbacks(keras.callbacks.CallbackList):
    """Callbacks that do not hear of what was trained before, and are followed by a backup.

    Args:
        model: The model that is trained.
        inner: The callbacks.
        backup: What is kept, and where.
        save_freq: "epoch", or how many steps are between two backups.
        begins_anew: Whether the first step of an epoch's data is enough to pass it over.
        initial_epoch: The number of the first epoch.
    """

    def __init__(
        self,
        model: Any,
        inner: keras.callbacks.CallbackList,
        backup: _Backup,
        save_freq: Any,
        begins_anew: bool,
        initial_epoch: int,
    ) -> None:
        super().__init__([], model=model)
        self._inner = inner
        self._backup = backup
        self._save_freq = save_freq
        self._begins_anew = begins_anew
        self._initial_epoch = initial_epoch
        self._epoch = 0
        self._done = 0  # steps of this epoch
        self._unsaved = 0  # steps since the last backup
        self._train: Any = None
        self._found: Position | None = None  # where it was, until training has come there again
        self._knows = True  # whether callbacks have been told what they knew
        self._has_trained = False  # whether there are all variables that training makes
        self._logs: Any = None  # of the last step
        self._own: Own | None = None  # what validation is about to overwrite

    def let_go(self) -> None:
        """The model is the user's own again."""
        self._train_again()
        self.model._tnt_stops.let_go()

    # Events

    def on_train_begin(self, logs: Any = None) -> None:
        found = self._backup.read()
        if found is not None and self._backup.callback is not None:
            _append_to_logs(self._inner.callbacks)
        self._inner.on_train_begin(logs)
        if found is None:
            return
        if (found.epoch, found.step) <= (self._initial_epoch, 0):
            self._backup.build_optimizer()
            self._backup.restore(found)
        self._found, self._knows = found, False
        self._unsaved = found.unsaved
        self._train = self.model.train_function

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._done = epoch, 0
        if self._found is not None and epoch < self._found.epoch:
            self._read_with(self._pass_over)
            return
        self._remind()
        if self._found is not None and epoch == self._found.epoch and self._found.step:
            self._read_with(self._catch_up)
        else:
            self._go_on()
        self._inner.on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._found is None:
            self._inner.on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before, self._done = self._done, batch + 1
        if self._found is not None:
            self._leave_as_it_is()
            if (self._epoch, self._done) == (self._found.epoch, self._found.step):
                self._backup.restore_own(self._found)
                if self._found.stopped:
                    self._stop()
                self._go_on()
            return
        self._inner.on_train_batch_end(batch, logs)
        self._logs = logs
        self._unsaved += self._done - before
        self._leave_if_asked(self._epoch, self._done)
        if self._save_freq != "epoch" and self._unsaved >= self._save_freq:
            self._unsaved = 0
            self._save(self._epoch, self._done)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._found is not None:
            self._end_of_passed_epoch(epoch, self._found)
            return
        self._inner.on_epoch_end(epoch, logs)
        self._leave_if_asked(epoch + 1, 0)
        if self._save_freq == "epoch":
            self._save(epoch + 1, 0)

    def on_train_end(self, logs: Any = None) -> None:
        self._remind()
        self._go_on()
        self._inner.on_train_end(logs)

    def on_test_begin(self, logs: Any = None) -> None:
        self._inner.on_test_begin(logs)
        self._leave_if_asked(self._epoch, self._done)
        self._own = self._backup.own()

    def on_test_end(self, logs: Any = None) -> None:
        self._own = None
        self._inner.on_test_end(logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._inner.on_test_batch_begin(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._inner.on_test_batch_end(batch, logs)
        self._leave_if_asked(self._epoch, self._done)

    # Backups

    def _save(self, epoch: int, step: int) -> None:
        position = Position(
            epoch,
            step,
            self._unsaved,
            stopped=bool(self.model.stop_training),
            logs=dict(internals.python_logs(self._logs or {})) if step else {},
        )
        if self._backup.callback is not None:
            _learn(self._inner.callbacks, position)
        self._backup.save(position, self._own or self._backup.own())

    def _leave_if_asked(self, epoch: int, step: int) -> None:
        if not self.model._tnt_stops.get("leave"):
            return
        self._save(epoch, step)
        done = f"step {step} of epoch {epoch + 1}" if step else f"epoch {epoch}"
        folder = getattr(self._backup.callback, "backup_dir", "")
        LOGGER.warning("Asked to end by SIGTERM: the training is saved in %s, after %s.",
                       folder, done)  # fmt: skip
        raise Terminated("it was asked to end by SIGTERM, and has saved the training")

    def _leave_as_it_is(self) -> None:
        """Leaves before anything was trained that is not in the backup; no other rank is asked."""
        if self.model._tnt_stops.wants("leave"):
            raise Terminated("it was asked to end by SIGTERM, before it went on with a backup")

    def _stop(self) -> None:
        self.model._tnt_stops.decide([name == "stop_training" for name in NAMES])

    # What was trained before

    def _remind(self) -> None:
        """Tells callbacks what they knew, once."""
        if self._found is not None and not self._knows:
            _remind(self._inner.callbacks, self._found)
            self._knows = True

    def _pass_over(self, iterator: Any) -> dict[str, Any]:
        """Reads the data of steps of an epoch that was trained to its end."""
        if self._done == 0 or not self._begins_anew:
            self._read(iterator)
        return {}

    def _catch_up(self, iterator: Any) -> dict[str, Any]:
        """Reads the data of steps that were trained on."""
        assert self._found is not None
        self._read(iterator)
        return self._found.logs

    def _read(self, iterator: Any) -> None:
        """Reads the data of a step.

        On the first of them the model is trained: that makes all variables that there were, in
        optimizers and metrics. Then they are restored.
        """
        assert self._found is not None
        if self._has_trained:
            _read(iterator, self.model.steps_per_execution)
            return
        self.model._tnt_passes_over = False
        self._train(iterator)
        self.model._tnt_passes_over = True
        self._has_trained = True
        self._backup.restore(self._found)

    def _end_of_passed_epoch(self, epoch: int, found: Position) -> None:
        self._leave_as_it_is()
        if epoch == found.epoch:
            raise InputError(
                f"There are {self._done} steps of data in an epoch, but a backup was made after "
                f"step {found.step} of it: go on with the same data, or remove the backup."
            )
        if epoch == found.epoch - 1 and found.stopped and not found.step:
            self._stop()

    def _read_with(self, function: Any) -> None:
        """Has Keras call a function that does not train."""
        self.model.train_function = function
        self.model._tnt_passes_over = True

    def _go_on(self) -> None:
        self._found = None
        self._train_again()

    def _train_again(self) -> None:
        if self._train is not None:
            self.model.train_function, self._train = self._train, None
        self.model._tnt_passes_over = False


def _read(iterator: Any, steps: int) -> None:
    for step in range(steps):
        if not iterator.get_next_as_optional().has_value():
            if step == 0:
                raise StopIteration
            return


class _Backup:
    """The files of a `BackupAndRestore`.

    Args:
        callback: It, on the master rank; None on the others.
        model: The model that is trained.
        build: Makes the model's variables, for a backup to be loaded into.
    """

    def __init__(self, callback: Any | None, model: Any, build: Callable[[], None]) -> None:
        self.callback = callback
        self._model = model
        self._build = build
        self._previous = ""  # how the names of files end that can be read
        self._folder = Path(saving.local_path(callback.backup_dir) or "") if callback else Path()

    def own(self) -> Own:
        """What differs between the ranks."""
        return {
            name: [np.array(variable) for variable in variables]
            for name, variables in self._own_variables().items()
        }

    def save(self, position: Position, own: Own) -> None:
        """Writes everything, or nothing; every rank must call it."""
        position.ranks = world.get_size()
        for rank, of_rank in enumerate(_gathered(own)):
            for name, arrays in of_rank.items():
                position.add(f"rank{rank}-{name}", arrays)
        saving.on_all_ranks("BackupAndRestore", lambda: self._write(position))

    def read(self) -> Position | None:
        """What was kept, if there is something; every rank must call it."""
        there = saving.on_all_ranks("BackupAndRestore", self._is_there)
        if agreement.all_ranks(not there):
            return None
        self._build()
        found = saving.on_all_ranks("BackupAndRestore", self._read)
        if world.get_size() == 1:
            return found
        communicator = world.communicator("callbacks")
        arrays = [] if found is None else list(found.arrays.items())
        about = None if found is None else [
            {**vars(found), "arrays": {}},
            [[name, array.dtype.str, array.shape] for name, array in arrays],
        ]  # fmt: skip
        root = world.get_master_rank()
        about = messages.bcast(about, communicator, root)
        if not world.is_master_rank():
            found = Position(**about[0])
            for name, dtype, shape in about[1]:
                found.arrays[name] = np.empty(shape, dtype)
        buffers.broadcast_arrays(list(found.arrays.values()), communicator, root)
        return found

    def build_optimizer(self) -> None:
        """Makes the variables of the optimizer, as Keras does, if no step will make them."""
        optimizer = self._model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self._model.trainable_variables)

    def restore(self, position: Position) -> None:
        """Gives the model the state that was kept; every rank must call it."""
        saving.on_all_ranks("BackupAndRestore", self._load_weights)
        if world.get_size() > 1:
            self._model._take_from_master()
        self.restore_own(position)

    def restore_own(self, position: Position) -> None:
        """Gives this rank what differs between the ranks."""
        if position.ranks != world.get_size():
            return  # of another number of ranks, nothing is of use
        kept = f"rank{world.get_rank()}"
        if position.numbered(f"{kept}-seed"):
            internals.make_global_seed()
        for name, variables in self._own_variables().items():
            values = position.numbered(f"{kept}-{name}")
            if len(values) == len(variables):  # some variables are made by training
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(_typed(value, variable))

    def _own_variables(self) -> dict[str, list[Any]]:
        """Variables that differ between the ranks."""
        layers = internals.flat_layers(self._model)
        metrics = self._model.metrics if self._model.compiled else []
        seed = internals.global_seed()
        return {
            "seeds": [variable for variable in self._model.variables if state.is_seed(variable)],
            "seed": [] if seed is None else [seed],
            "states": keras.tree.flatten([getattr(each, "states", None) or [] for each in layers
                                          if getattr(each, "stateful", False)]),
            "metrics": [variable for metric in metrics for variable in metric.variables],
        }  # fmt: skip

    # On the master rank

    def _write(self, position: Position) -> None:
        if self.callback is None:
            return
        atomic_write.recover(self._folder)
        keeps_previous = self.callback.double_checkpoint

        def write(place: str) -> None:
            folder = Path(place)
            folder.mkdir()
            _keep_others(self._folder, folder)
            if keeps_previous:
                for name in _FILES:
                    if (self._folder / name).exists():
                        shutil.copyfile(self._folder / name, folder / f"{name}{_PREVIOUS}")
            keras.Model.save_weights(self._model._plain(), str(folder / _WEIGHTS))
            metadata = {"epoch": position.epoch, "batch": max(position.step - 1, 0)}
            (folder / _METADATA).write_text(json.dumps(metadata))
            about = json.dumps({**vars(position), "arrays": {}}, default=_plain)
            with (folder / _MORE).open("wb") as file:
                np.savez(file, about=np.frombuffer(about.encode(), np.uint8), **position.arrays)

        saving.write_aside(write, saving.Target(str(self._folder), True, {}), alone=True)

    def _is_there(self) -> bool:
        if self.callback is None:
            return False
        there = self._folder.exists()
        if there and (self._folder.is_mount() or not os.access(self._folder.parent, os.W_OK)):
            raise InputError(
                f"BackupAndRestore has the folder {self._folder}, which cannot be replaced as a "
                f"whole: name a folder in it, such as {self._folder / 'backup'}."
            )
        atomic_write.recover(self._folder)
        return (self._folder / _WEIGHTS).exists()

    def _read(self) -> Position | None:
        if self.callback is None:
            return None
        for ending in ("", _PREVIOUS) if self.callback.double_checkpoint else ("",):
            self._previous = ending
            try:
                position = self._read_position(ending)
                with warnings.catch_warnings():
                    # Before a step was trained, there is no optimizer to take anything.
                    warnings.simplefilter("ignore", UserWarning)
                    self._load_weights()
            except (InputError, OSError) as error:
                problem = error
            else:
                return position
        raise problem

    def _read_position(self, ending: str) -> Position:
        try:
            if not (self._folder / f"{_MORE}{ending}").exists():  # written by Keras alone
                text = (self._folder / f"{_METADATA}{ending}").read_text()
                return Position(epoch=int(json.loads(text)["epoch"]))
            with np.load(self._folder / f"{_MORE}{ending}", allow_pickle=False) as arrays:
                kept = dict(arrays)
            return Position(**{**json.loads(bytes(kept.pop("about"))), "arrays": kept})
        except Exception as error:  # a file that was cut short raises many kinds
            raise self._unreadable(error) from error

    def _load_weights(self) -> None:
        if self.callback is None:
            return
        name = f"{_WEIGHTS}{self._previous}"
        try:
            with _with_ending(self._folder / name) as path:
                keras.Model.load_weights(self._model._plain(), str(path))
        except Exception as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> InputError:
        first = str(error).strip().partition("\n")[0]
        return InputError(
            f"The backup in {self._folder} cannot be restored: {first or type(error).__name__} "
            "Go on with the model that it was made of, or remove it to begin anew."
        )


@contextmanager
def _with_ending(path: Path) -> Iterator[Path]:
    """A file by a name that Keras takes for one of weights."""
    if path.name.endswith(saving.WEIGHTS):
        yield path
        return
    link = path.with_name(f"previous{saving.WEIGHTS}")
    link.unlink(missing_ok=True)
    os.link(path, link)
    try:
        yield link
    finally:
        link.unlink()


def _keep_others(old: Path, new: Path) -> None:
    """Has files of others in a folder be in the one that takes its place."""
    ours = {f"{name}{ending}" for name in _FILES for ending in ("", _PREVIOUS)}
    for entry in old.iterdir() if old.is_dir() else []:
        if entry.is_dir():
            shutil.copytree(entry, new / entry.name, symlinks=True)
        elif entry.name not in ours:
            shutil.copy2(entry, new / entry.name, follow_symlinks=False)


def _plain(value: Any) -> Any:
    """Numbers and arrays of NumPy's, as Python has them."""
    return value.tolist() if hasattr(value, "tolist") else float(value)


def _gathered(own: Own) -> list[Own]:
    """What each rank has of its own, by rank; one may have what another has not."""
    if world.get_size() == 1:
        return [own]
    kinds = {name: [[a.dtype.str, a.shape] for a in arrays] for name, arrays in own.items()}
    data = b"".join(array.tobytes() for arrays in own.values() for array in arrays)
    with agreement.turn() as communicator:
        agreement.agree("BackupAndRestore", [], communicator)
        everyones_kinds = messages.allgather(kinds, communicator)
        everyones_data = buffers.allgather_bytes(data, communicator)
    return [_unpacked(*each) for each in zip(everyones_kinds, everyones_data, strict=True)]


def _unpacked(kinds: dict[str, list[Any]], data: bytes) -> Own:
    own: Own = {}
    start = 0
    for name, of_arrays in kinds.items():
        own[name] = [np.empty(shape, dtype) for dtype, shape in of_arrays]
        for array in own[name]:
            array.flat = np.frombuffer(data, array.dtype, array.size, start)
            start += array.nbytes
    return own


def _typed(value: Any, variable: Any) -> Any:
    """An array as it was: files do not know the types that NumPy does not have."""
    return value.view(np.array(variable).dtype) if value.dtype.kind == "V" else value


# What callbacks know


def _named(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Keras's own callbacks that know something, by a name, and its attributes."""
    counts: dict[str, int] = {}
    for callback in callbacks:
        for kind, attributes in _KNOWN:
            if isinstance(callback, kind):
                name = kind.__name__
                counts[name] = counts.get(name, 0) + 1
                yield f"{name}{counts[name]}", callback, attributes


def _learn(callbacks: Sequence[Any], position: Position) -> None:
    for name, callback, attributes in _named(callbacks):
        position.callbacks[name] = {each: getattr(callback, each, None) for each in attributes}
        position.add(name, getattr(callback, "best_weights", None) or [])
    for number, logger in enumerate(_csv_loggers(callbacks)):
        logger.csv_file.flush()
        position.callbacks[f"CSVLogger{number}"] = {"size": logger.csv_file.tell()}


def _remind(callbacks: Sequence[Any], position: Position) -> None:
    for name, callback, _ in _named(callbacks):
        for attribute, value in position.callbacks.get(name, {}).items():
            setattr(callback, attribute, value)
        if getattr(callback, "restore_best_weights", False) and (best := position.numbered(name)):
            weights = callback.model.weights
            callback.best_weights = [
                _typed(value, weight) for value, weight in zip(best, weights, strict=True)
            ]
    if world.is_master_rank():
        for number, logger in enumerate(_csv_loggers(callbacks)):
            size = position.callbacks.get(f"CSVLogger{number}", {}).get("size")
            if size is not None and size <= logger.csv_file.tell():
                logger.csv_file.truncate(size)
                logger.append_header = size == 0


def _append_to_logs(callbacks: Sequence[Any]) -> None:
    """Has logs of the epochs before go on."""
    for logger in _csv_loggers(callbacks):
        logger.append = True


def _csv_loggers(callbacks: Sequence[Any]) -> list[Any]:
    return [each for each in callbacks if isinstance(each, keras.callbacks.CSVLogger)]
