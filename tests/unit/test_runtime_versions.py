"""Which versions are refused, with which message; and what other files say about versions."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import keras
import pytest
from keras.src.losses import loss
from keras.src.utils import python_utils

from tarantella.errors import VersionError
from tarantella.internals import keras as internals
from tarantella.runtime import versions

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "versions"))

from pairs import PAIRS  # noqa: E402

PYTHONS = {python for pair in PAIRS for python in pair.pythons}


def short(version: str) -> str:
    return ".".join(version.split(".")[:2])


def by_number(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


@pytest.fixture
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Keras and TensorFlow had not been loaded yet; what is asked of them later is not."""
    for name in ("keras", "tensorflow"):
        monkeypatch.delitem(sys.modules, name)
    for name in ("before_import", "when_imported"):
        monkeypatch.setattr(versions, name, lambda *_: None)


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, package: str, version: str) -> None:
    metadata = folder / f"{package.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)


@pytest.mark.usefixtures("not_loaded")
@pytest.mark.parametrize(
    ("package", "version", "words"),
    [
        ("keras", "3.7.0", "needs Keras 3.8 or later .*this is Keras 3.7.0"),
        ("keras", "2.15.0", "this is Keras 2.15.0"),
        ("tensorflow-cpu", "2.17.1", "needs TensorFlow 2.18 or later .*this is TensorFlow 2.17.1"),
    ],
)
def test_old_versions_are_refused(
    package: str, version: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, package, version)
    with pytest.raises(VersionError, match=words):
        versions.check()


@pytest.mark.usefixtures("not_loaded")
@pytest.mark.parametrize(
    ("package", "version"),
    [("keras", "3.99.0"), ("keras", "4.0.0.dev2"), ("tensorflow-cpu", "2.100.0rc1")],
)
def test_versions_that_nobody_knows_yet_are_not(
    package: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, package, version)
    versions.check()


@pytest.mark.usefixtures("not_loaded")
def test_no_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        VersionError, match="TensorFlow is not installed: .*pip install tensorflow-cpu"
    ):
        versions.check()


def test_an_old_version_that_only_its_module_knows_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras, "__version__", "3.7.0")
    with pytest.raises(VersionError, match="this is Keras 3.7.0"):
        versions.check()


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    with pytest.raises(VersionError, match="needs Python 3.10 or later .*this is Python 3.9.18"):
        versions.check_python()


@pytest.mark.usefixtures("not_loaded")
@pytest.mark.parametrize("place", ["variable", "file"])
def test_another_backend(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    if place == "variable":
        monkeypatch.setenv("KERAS_BACKEND", "jax")
        words = "the environment variable KERAS_BACKEND is 'jax': set it to tensorflow, or unset"
    else:
        (tmp_path / "keras.json").write_text(json.dumps({"backend": "jax"}))
        words = "keras.json names 'jax': set the environment variable KERAS_BACKEND=tensorflow"
    with pytest.raises(VersionError, match=words):
        versions.check()
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    versions.check()


def test_another_backend_that_only_keras_knows_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "torch")
    with pytest.raises(VersionError, match="it is loaded with 'torch': set the environment"):
        versions.check()


# A newer version without a private name


def loaded_again() -> ModuleType:
    spec = importlib.util.spec_from_file_location("internals_again", internals.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("owner", "name"), [(python_utils, "is_default"), (loss, "reduce_weighted_values")]
)
def test_a_private_name_that_is_gone(
    owner: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    oldest, newest = versions.VERSIONS["Keras"]
    words = rf"Keras {keras.__version__} \(.*{name}.*\): .*{oldest} to {newest}"
    with pytest.raises(VersionError, match=words):
        loaded_again()


def test_a_private_attribute_that_is_gone() -> None:
    with pytest.raises(VersionError, match=f"Keras {keras.__version__} .*_inputs"):
        internals.arrays_of(object())


# What other files say


def test_the_table_of_pairs_begins_and_ends_with_the_versions_that_are_named() -> None:
    first, last = PAIRS[0], PAIRS[-1]
    assert {
        "Python": (min(PYTHONS, key=by_number), max(PYTHONS, key=by_number)),
        "TensorFlow": (short(first.tensorflow), short(last.tensorflow)),
        "Keras": (short(first.keras), short(last.keras)),
    } == versions.VERSIONS
    newest = [f"tensorflow=={last.tensorflow}", f'keras=={last.keras}; python_version >= "3.11"']
    assert set(newest) <= set((ROOT / "constraints.txt").read_text().splitlines())


def test_what_the_package_asks_for() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'"keras>={versions.VERSIONS["Keras"][0]}"' in text
    needed = re.findall(r'"tensorflow[^">]*>=([\d.]+)', text)
    assert set(needed) == {versions.VERSIONS["TensorFlow"][0]}
    assert f'requires-python = ">={versions.VERSIONS["Python"][0]},' in text
    assert set(re.findall(r"Python :: (3\.\d+)", text)) == PYTHONS


@pytest.mark.parametrize("page", ["README.md", "docs/installation.md", "Makefile"])
def test_the_documents_name_the_pythons(page: str) -> None:
    oldest, newest = versions.VERSIONS["Python"]
    assert f"Python {oldest} to {newest}" in (ROOT / page).read_text()
