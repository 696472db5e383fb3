"""HDF5 files are checked where Tarantella has Keras save them, and nowhere else."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import h5py
import keras
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


@pytest.mark.parametrize("name", ["model.h5", "model.weights.h5"])
def test_checked_files_are_those_of_h5py(name: str, tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    save = model.save_weights if "weights" in name else model.save
    save(tmp_path / f"plain.{name}")
    with checked_writes():
        save(tmp_path / f"checked.{name}")
    plain, checked = ((tmp_path / f"{kind}.{name}").read_bytes() for kind in ("plain", "checked"))
    assert len(plain) == len(checked)


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
