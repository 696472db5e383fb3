"""HDF5 files are checked where Tarantella has Keras save them, and nowhere else."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest

from tarantella.internals import keras as internals
from tarantella.keras.hdf5 import checked_writes


def _class_of_files() -> type:
    return internals.saving_lib.h5py.File


def test_only_the_thread_that_saves_gets_checked_files() -> None:
    plain = h5py.File
    elsewhere = []
    with checked_writes():
        assert _class_of_files() is not plain
        thread = threading.Thread(target=lambda: elsewhere.append(_class_of_files()))
        thread.start()
        thread.join()
        assert h5py.File is plain
    assert elsewhere == [plain]
    assert _class_of_files() is plain


def test_checked_files_hold_what_was_saved(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with checked_writes():
        model.save_weights(tmp_path / "model.weights.h5")
        model.save(tmp_path / "model.h5")
    loaded = keras.models.load_model(tmp_path / "model.h5")
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
    model.set_weights([0 * weight for weight in model.get_weights()])
    model.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])


def test_what_could_not_be_written_is_raised_in_the_end(tmp_path: Path) -> None:
    ended = []

    def save() -> None:
        with checked_writes():
            with internals.saving_lib.h5py.File(tmp_path / "data.h5", "w") as file:
                file["data"] = [1.0] * 5000
            ended.append(True)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended
