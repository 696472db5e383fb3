"""Files and folders are replaced whole, or stay as they are."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tarantella.runtime import atomic_write as atomic_write_module
from tarantella.runtime.atomic_write import atomic_write


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_folder(place: Path, **files: str) -> None:
    place.mkdir()
    for name, text in files.items():
        (place / name).write_text(text)


def _fail_while_writing(target: Path) -> None:
    with atomic_write(target) as place:
        write_folder(place, config="new")
        raise ValueError(f"cannot write {place}")


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "model.keras"
    target.write_text("old")
    with atomic_write(target) as place:
        assert place.name == "model.keras"
        place.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert names(tmp_path) == ["model.keras"]


def test_an_error_leaves_everything_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "model"
    write_folder(target, config="old")
    with pytest.raises(ValueError, match="^cannot write .*/model$"):
        _fail_while_writing(target)
    assert (target / "config").read_text() == "old"
    assert names(tmp_path) == ["model"]


def test_errors_speak_of_the_name_that_was_given(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(FileNotFoundError) as caught, atomic_write(target) as place:
        (place / "deep" / "file").write_text("")
    assert caught.value.filename == str(target)
    with pytest.raises(FileNotFoundError) as caught, atomic_write(target) as place:
        Path("/no/such/file").read_text()
    assert caught.value.filename == "/no/such/file"


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for text in ("one", "two"):
        with atomic_write(target) as place:
            write_folder(place, config=text, weights=text)
        assert {path.read_text() for path in target.iterdir()} == {text}
    assert names(tmp_path) == ["model"]


def test_a_folder_is_there_at_all_times(tmp_path: Path) -> None:
    target = tmp_path / "model"
    write_folder(target, config="old")
    missing = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            missing.append(not target.exists())

    looks = threading.Thread(target=look)
    looks.start()
    for number in range(300):
        with atomic_write(target) as place:
            write_folder(place, config=str(number))
    done.set()
    looks.join()
    assert len(missing) > 300
    assert not any(missing)


def test_a_folder_where_names_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_write_module, "_exchange", lambda *_: False)
    test_a_folder_takes_the_place_of_another(tmp_path)


def test_files_of_others_in_a_folder_stay(tmp_path: Path) -> None:
    target = tmp_path / "model"
    write_folder(target, config="old", notes="mine")
    with atomic_write(target) as place:
        write_folder(place, config="new")
    assert (target / "config").read_text() == "new"
    assert (target / "notes").read_text() == "mine"


def test_parts_come_before_the_file_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (order.append(self.name), replace(self, to))[1]
    )
    with atomic_write(tmp_path / "a.weights.json") as place:
        for name in ("a.weights.json", "a_00000.weights.h5", "a_00001.weights.h5"):
            place.with_name(name).write_text("x")
    assert order == ["a_00000.weights.h5", "a_00001.weights.h5", "a.weights.json"]


def test_leftovers_are_removed_and_the_last_copy_is_kept(tmp_path: Path) -> None:
    leftover = tmp_path / ".model.saving-3"
    write_folder(leftover, half="x")
    write_folder(leftover / "replaced", config="old")  # killed between the two renames
    with pytest.raises(RuntimeError), atomic_write(tmp_path / "model"):
        raise RuntimeError
    assert names(tmp_path) == ["model"]
    assert (tmp_path / "model" / "config").read_text() == "old"


def test_one_of_several_writers_leaves_the_others_alone(tmp_path: Path) -> None:
    write_folder(tmp_path / ".model.saving-1", half="x")
    write_folder(tmp_path / ".model.saving-2", half="x")
    with atomic_write(tmp_path / "model", writer=2, alone=False) as place:
        place.write_text("new")
    assert names(tmp_path) == [".model.saving-1", "model"]


def test_permissions_stay(tmp_path: Path) -> None:
    target = tmp_path / "model.keras"
    target.write_text("old")
    target.chmod(0o640)
    with atomic_write(target) as place:
        place.write_text("new")
    assert target.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["model.keras"]  # noqa: PTH208
