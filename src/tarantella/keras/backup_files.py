"""The files of a `BackupAndRestore`: Keras's own, and one with what Keras does not keep.

The master rank writes and reads them. What differs between the ranks is in there by rank.
"""

from __future__ import annotations

import json
import os
import shutil
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
from tarantella.keras import rank_state, saving
from tarantella.keras.rank_state import RankState
from tarantella.runtime import atomic_write, messages, world

_WEIGHTS = "latest.weights.h5"
_METADATA = "training_metadata.json"
_POSITION = "tarantella.npz"
_FILES = (_WEIGHTS, _METADATA, _POSITION)
_PREVIOUS = ".bkp"


@dataclass
class Position:
    """How far training has come, with all state that is not a weight.

    Attributes:
        epoch: The epoch that it is in.
        step: How many steps of that epoch are done.
        unsaved: How many steps were done since the last backup.
        stopped: Whether training was about to stop there.
        logs: The logs of the last step.
        callbacks: The state of callbacks, by their names.
        arrays: The arrays of callbacks and ranks, by names with a number.
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
        """The arrays that were added under a name, in their order."""
        count = sum(1 for key in self.arrays if key.rpartition("-")[0] == name)
        return [self.arrays[f"{name}-{number}"] for number in range(count)]

    def add(self, name: str, arrays: Sequence[Any]) -> None:
        """Adds arrays under a name."""
        self.arrays.update((f"{name}-{number}", array) for number, array in enumerate(arrays))


def backup_callback(callbacks: Sequence[Any]) -> Any | None:
    """The `BackupAndRestore` among callbacks, if there is one."""
    found = [each for each in callbacks if isinstance(each, keras.callbacks.BackupAndRestore)]
    if not found:
        return None
    if saving.local_path(found[0].backup_dir) is None:
        raise InputError(
            f"BackupAndRestore cannot use {found[0].backup_dir!r}: name a folder in a file system."
        )
    return found[0]


class BackupRemoval(keras.callbacks.Callback):
    """Replaces a `BackupAndRestore` among callbacks: removes the backup when training ends."""

    def __init__(self, callback: Any) -> None:
        super().__init__()
        self._callback = callback

    def set_model(self, model: Any) -> None:
        self._callback.set_model(model)

    def on_train_end(self, logs: Any = None) -> None:
        self._callback.on_train_end(logs)


class Backup:
    """The backup of a model.

    Args:
        callback: The `BackupAndRestore`, on the master rank; None on the others.
        model: The model that is trained.
        build: Makes the model's variables, so that a backup can be loaded into them.
    """

    def __init__(self, callback: Any | None, model: Any, build: Callable[[], None]) -> None:
        self.callback = callback
        self._model = model
        self._build = build
        self._ending = ""  # of the names of the files that can be read
        self._folder = Path(saving.local_path(callback.backup_dir) or "") if callback else Path()

    def save(self, position: Position, own: RankState) -> None:
        """Writes everything, or nothing; every rank must call it.

        Args:
            position: How far training has come.
            own: The state of this rank.
        """
        position.ranks = world.get_size()
        for rank, of_rank in enumerate(rank_state.gathered(own)):
            for name, arrays in of_rank.items():
                position.add(f"rank{rank}-{name}", arrays)
        saving.on_all_ranks("BackupAndRestore", lambda: self._write(position))

    def read(self) -> Position | None:
        """How far training had come, if there is a backup; every rank must call it."""
        exists = saving.on_all_ranks("BackupAndRestore", self._exists)
        if agreement.all_ranks(not exists):
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
        """Restores the state of the model; every rank must call it."""
        saving.on_all_ranks("BackupAndRestore", self._load_weights)
        if world.get_size() > 1:
            self._model._take_from_master()
        self.restore_own(position)

    def restore_own(self, position: Position) -> None:
        """Restores the state of this rank, unless another number of ranks made the backup."""
        if position.ranks == world.get_size():
            own = {
                name: position.numbered(f"rank{world.get_rank()}-{name}")
                for name in rank_state.NAMES
            }
            rank_state.restore(self._model, own)

    # On the master rank

    def _write(self, position: Position) -> None:
        if self.callback is None:
            return
        atomic_write.recover(self._folder)
        keeps_previous = self.callback.double_checkpoint

        def write(path: str) -> None:
            folder = Path(path)
            folder.mkdir()
            _keep_other_files(self._folder, folder)
            if keeps_previous:
                for name in _FILES:
                    if (self._folder / name).exists():
                        shutil.copyfile(self._folder / name, folder / f"{name}{_PREVIOUS}")
            keras.Model.save_weights(self._model._plain(), str(folder / _WEIGHTS))
            metadata = {"epoch": position.epoch, "batch": max(position.step - 1, 0)}
            (folder / _METADATA).write_text(json.dumps(metadata))
            about = json.dumps({**vars(position), "arrays": {}}, default=_as_python)
            with (folder / _POSITION).open("wb") as file:
                np.savez(file, about=np.frombuffer(about.encode(), np.uint8), **position.arrays)

        saving.write_atomically(write, saving.Target(str(self._folder), True, {}), alone=True)

    def _exists(self) -> bool:
        if self.callback is None:
            return False
        exists = self._folder.exists()
        if exists and (self._folder.is_mount() or not os.access(self._folder.parent, os.W_OK)):
            raise InputError(
                f"BackupAndRestore uses the folder {self._folder}, which cannot be replaced as a "
                f"whole: use a folder inside it, such as {self._folder / 'backup'}."
            )
        atomic_write.recover(self._folder)
        return (self._folder / _WEIGHTS).exists()

    def _read(self) -> Position | None:
        if self.callback is None:
            return None
        for ending in ("", _PREVIOUS) if self.callback.double_checkpoint else ("",):
            self._ending = ending
            try:
                position = self._read_position(ending)
                with warnings.catch_warnings():
                    # Before the first step, the optimizer has no variables to load into.
                    warnings.simplefilter("ignore", UserWarning)
                    self._load_weights()
            except (InputError, OSError) as error:
                problem = error
            else:
                return position
        raise problem

    def _read_position(self, ending: str) -> Position:
        try:
            if not (self._folder / f"{_POSITION}{ending}").exists():  # written by plain Keras
                text = (self._folder / f"{_METADATA}{ending}").read_text()
                return Position(epoch=int(json.loads(text)["epoch"]))
            with np.load(self._folder / f"{_POSITION}{ending}", allow_pickle=False) as arrays:
                kept = dict(arrays)
            return Position(**{**json.loads(bytes(kept.pop("about"))), "arrays": kept})
        except Exception as error:  # a truncated file raises many kinds
            raise self._unreadable(error) from error

    def _load_weights(self) -> None:
        if self.callback is None:
            return
        name = f"{_WEIGHTS}{self._ending}"
        try:
            with _named_as_weights(self._folder / name) as path:
                keras.Model.load_weights(self._model._plain(), str(path))
        except Exception as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> InputError:
        first = str(error).strip().partition("\n")[0]
        return InputError(
            f"The backup in {self._folder} cannot be restored: {first or type(error).__name__} "
            "Resume with the model that it was made from, or remove the backup to start again."
        )


@contextmanager
def _named_as_weights(path: Path) -> Iterator[Path]:
    """A file under a name that Keras accepts for weights."""
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


def _keep_other_files(old: Path, new: Path) -> None:
    """Copies the files in a folder that are not part of a backup to the one that replaces it."""
    ours = {f"{name}{ending}" for name in _FILES for ending in ("", _PREVIOUS)}
    for entry in old.iterdir() if old.is_dir() else []:
        if entry.is_dir():
            shutil.copytree(entry, new / entry.name, symlinks=True)
        elif entry.name not in ours:
            shutil.copy2(entry, new / entry.name, follow_symlinks=False)


def _as_python(value: Any) -> Any:
    """A NumPy number or array as a Python value."""
    return value.tolist() if hasattr(value, "tolist") else float(value)
