"""What a tnt.Model saves is what plain Keras saves; it is there on all ranks, whole, or not."""

from __future__ import annotations

import errno
import json
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import WITH_STATE, classification_data
from saved_models import KINDS, content, fit, fresh, same_state, state, trained, variables

import tarantella as tnt

pytestmark = pytest.mark.ranks(2)

IN_PARTS = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 10)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def everyones(value: Any) -> list[Any]:
    """What each rank has; all wait for each other."""
    return tnt.allgather(value)


def failure(action: Any, *args: Any, **kwargs: Any) -> Exception:
    """The error that an action raises, after a check that it is the same on all ranks."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        action(*args, **kwargs)
    error = caught.value
    assert len(set(everyones(f"{type(error)} {getattr(error, 'errno', None)} {error}"))) == 1
    return error


# What is saved


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_content_is_that_of_plain_keras(kind: str, compiled: bool, shared_tmp_path: Path) -> None:
    model = tnt.Model(fresh(kind, compiled))
    if compiled:
        fit(model)
    ours, theirs = shared_tmp_path / "ours", shared_tmp_path / "theirs"
    if tnt.is_master_rank():
        ours.mkdir()
        theirs.mkdir()
    tnt.barrier()
    formats = [
        ("save", "model.keras", {}),
        ("save", "folder", {"zipped": False}),
        ("save_weights", "model.weights.h5", {}),
        ("save", "model.h5", {}),  # plain Keras forgets the optimizer then
        ("save", "model.hdf5", {}),
    ]
    for method, name, options in formats:
        getattr(model, method)(ours / name, **options)
    found = [content(ours / name) for _, name, _ in formats]  # on every rank: the files are there
    if tnt.is_master_rank():
        plain = fresh(kind, compiled)
        if compiled:
            plain.optimizer.build(plain.trainable_variables)
            plain.fit(*classification_data(4), verbose=0)  # builds the metrics
        for variable, value in zip(variables(plain), state(model), strict=True):
            variable.assign(value)
        for (method, name, options), ours_has in zip(formats, found, strict=True):
            getattr(plain, method)(theirs / name, **options)
            assert ours_has == content(theirs / name), name
    assert names(ours) == sorted(name for _, name, _ in formats)


def test_export_is_that_of_the_plain_model(shared_tmp_path: Path) -> None:
    model = trained()
    fit(model)  # an export is of a model that has functions for its steps, too
    model.export(shared_tmp_path / "artifact")
    model.export(shared_tmp_path / "artifact", verbose=False)  # over what is there
    x = np.float32(classification_data()[0])
    artifact = tf.saved_model.load(str(shared_tmp_path / "artifact"))
    np.testing.assert_allclose(artifact.serve(x), model(x), rtol=1e-6)
    assert names(shared_tmp_path) == ["artifact"]


def test_export_tells_the_name_it_was_given(
    shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(shared_tmp_path / "artifact")
    trained().export(path, verbose=True)
    output = capsys.readouterr().out
    assert output.count(f"Saved artifact at '{path}'") == (1 if tnt.is_master_rank() else 0)


LOADS = """
import json, sys
sys.modules["tarantella"] = None  # importing it fails
sys.path.insert(0, sys.argv[2])
import keras, numpy as np
import saved_classes

found = {}
for name in json.loads(sys.argv[1]):
    model = keras.models.load_model(f"{sys.argv[2]}/{name}")
    assert model.compiled, name
    variables = [*model.variables, *model.optimizer.variables]
    found[name] = [type(model).__module__, type(model.optimizer).__module__]
    found[name] += [np.array(v, "float64").sum() for v in variables]
print(json.dumps(found))
"""


def test_files_load_where_tarantella_is_not_installed(shared_tmp_path: Path) -> None:
    files = {}
    for kind in KINDS:
        model = trained(kind)
        endings = (".keras", "") if kind == "subclassed" else (".keras", ".h5", "")
        for ending in endings:  # Keras does not find registered classes for HDF5
            model.save(shared_tmp_path / f"{kind}{ending}")
            files[f"{kind}{ending}"] = model
    own_optimizer = fresh("functional", compiled=False)
    own_optimizer = tnt.Model(own_optimizer)
    optimizer = tnt.keras.optimizers.Optimizer(keras.optimizers.Adam(0.01))
    own_optimizer.compile(**{**WITH_STATE, "optimizer": optimizer})
    fit(own_optimizer)
    own_optimizer.save(shared_tmp_path / "own_optimizer.keras")
    files["own_optimizer.keras"] = own_optimizer
    inner = tnt.Model(fresh("functional", compiled=False))
    outer = keras.Sequential([keras.Input((5,)), inner, keras.layers.Dense(3)])
    outer.compile(**WITH_STATE)
    outer.optimizer.build(outer.trainable_variables)
    tnt.models.save_model(outer, shared_tmp_path / "outer.keras")
    files["outer.keras"] = outer
    if tnt.is_master_rank():
        classes = Path(__file__).with_name("saved_models.py").read_text()
        classes = classes[: classes.index("def functional")]
        classes = re.sub(r"(?m)^(from oracle|import tarantella).*", "", classes)
        (shared_tmp_path / "saved_classes.py").write_text(classes)
        result = subprocess.run(
            [sys.executable, "-c", LOADS, json.dumps([*files]), str(shared_tmp_path)],
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        for name, (module, optimizers, *sums) in json.loads(result.stdout.splitlines()[-1]).items():
            assert not (module + optimizers).startswith("tarantella"), name
            expected = [np.array(v, "float64").sum() for v in state(files[name])]
            if name.endswith(".h5"):  # Keras does not restore all of the optimizer from there
                expected = expected[: len(sums)]
            np.testing.assert_allclose(sums, expected, err_msg=name)


# Names


@pytest.mark.parametrize("name", ["location", "location/", "deeper/location", "run.1/location"])
def test_a_path_with_no_ending_is_a_folder_that_loads(name: str, shared_tmp_path: Path) -> None:
    model = trained()
    model.save(f"{shared_tmp_path}/{name}")
    assert same_state(keras.models.load_model(f"{shared_tmp_path}/{name}"), model)
    loaded = tnt.models.load_model(f"{shared_tmp_path}/{name}")
    assert isinstance(loaded, tnt.Model)
    assert same_state(loaded, model)
    assert names(shared_tmp_path) == [name.split("/")[0]]


def test_weights_with_no_ending_are_found_again(shared_tmp_path: Path) -> None:
    model, other = trained(), trained(epochs=3)
    model.save_weights(shared_tmp_path / "checkpoint")
    assert names(shared_tmp_path) == ["checkpoint.weights.h5"]
    other.load_weights(shared_tmp_path / "checkpoint")
    assert same_state(other, model)
    with pytest.raises(Exception, match="nothing.weights.h5"):
        other.load_weights(shared_tmp_path / "nothing")


def test_weights_come_from_the_folder_of_a_model_too(shared_tmp_path: Path) -> None:
    model, other = trained(), trained(epochs=3)
    model.save(shared_tmp_path / "location")
    other.load_weights(shared_tmp_path / "location")
    assert same_state(other, model)


@pytest.mark.skipif(not IN_PARTS, reason="this Keras cannot")
@pytest.mark.parametrize("name", ["model.weights.json", "model"])
def test_weights_in_parts(name: str, shared_tmp_path: Path) -> None:
    model, other = trained(), trained(epochs=3)
    for _ in range(2):  # the second time over the first
        model.save_weights(shared_tmp_path / name, max_shard_size=1e-7)
    files = names(shared_tmp_path)
    assert files[0] == "model.weights.json"
    assert len(files) > 2
    assert all(file.startswith("model_000") for file in files[1:])
    other.load_weights(shared_tmp_path / name)
    assert same_state(other, model)


@pytest.mark.parametrize(
    ("method", "name", "options"),
    [
        ("save", "model.foo", {}),
        ("save", "model.keras", {"zipped": False}),
        ("save", "model", {"zipped": True}),
        ("save", "model", {"save_format": "tf"}),
        ("save", "model.keras", {"no_such_option": 1}),
        ("save", "", {}),
        ("save", ".", {}),
        ("save_weights", "model.h5", {}),
        ("save_weights", "model.foo", {}),
        ("export", "model", {"format": "no such format"}),
    ],
)
def test_what_keras_refuses_is_refused_with_its_words(
    method: str, name: str, options: dict[str, Any], shared_tmp_path: Path
) -> None:
    model = trained()
    path = str(shared_tmp_path / name) if name.strip(".") else name
    error = failure(getattr(model, method), path, **options)
    with pytest.raises(type(error)) as plain:
        getattr(fresh("functional"), method)(path, **options)
    assert str(error) == str(plain.value)
    assert names(shared_tmp_path) == []


def test_what_links_point_to_is_replaced(shared_tmp_path: Path) -> None:
    model = trained()
    if tnt.is_master_rank():
        (shared_tmp_path / "disk").mkdir()
        (shared_tmp_path / "model.keras").symlink_to("disk/real.keras")
    tnt.barrier()
    model.save(shared_tmp_path / "model.keras")
    assert (shared_tmp_path / "model.keras").is_symlink()
    assert same_state(tnt.models.load_model(shared_tmp_path / "disk" / "real.keras"), model)


def test_plain_models_are_saved_by_the_master_too(shared_tmp_path: Path) -> None:
    plain = fresh("functional")
    tnt.models.save_model(plain, shared_tmp_path / "model.keras")
    assert keras.models.load_model(shared_tmp_path / "model.keras").compiled
    assert names(shared_tmp_path) == ["model.keras"]
    with pytest.raises(ValueError, match="first argument of save_model must be a model, not str"):
        tnt.models.save_model(str(shared_tmp_path / "other.keras"), plain)


def test_overwriting_is_asked_for_on_the_master_only(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, questions = trained(), []
    answers = iter(["n", "y"])

    def answer(question: str) -> str:
        questions.append(question)
        return next(answers)

    monkeypatch.setattr("builtins.input", answer)
    path = shared_tmp_path / "model.keras"
    model.save(path, overwrite=False)
    before = content(path)
    fit(model)
    model.save(path, overwrite=False)
    assert content(path) == before
    tnt.barrier()
    model.save(path, overwrite=False)
    assert content(path) != before
    assert len(questions) == (2 if tnt.is_master_rank() else 0)
    assert all(str(path) in question for question in questions)


# Failures


@contextmanager
def almost_full_disk(free: int = 4096) -> Iterator[None]:
    """On the master, no file can become larger than so many bytes."""
    if not tnt.is_master_rank():
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("name", ["model.keras", "model.h5", "model.weights.h5", "model"])
def test_a_full_disk_is_the_same_error_everywhere_and_harms_nothing(
    name: str, shared_tmp_path: Path
) -> None:
    model = trained()
    path = shared_tmp_path / name
    save = model.save_weights if "weights" in name else model.save
    save(path)
    before = content(path)
    fit(model)
    with almost_full_disk():
        error = failure(save, path)
    assert isinstance(error, OSError)
    assert error.errno == errno.EFBIG
    assert ".saving" not in str(error)
    assert content(path) == before
    assert names(shared_tmp_path) == [name]
    tnt.barrier()
    save(path)  # and it works again
    assert content(path) != before
    if "weights" not in name:
        assert same_state(tnt.models.load_model(path), model) or name.endswith(".h5")


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_a_missing_folder_is_the_error_of_keras(name: str, shared_tmp_path: Path) -> None:
    model, path = trained(), shared_tmp_path / "missing" / name
    method = "save_weights" if "weights" in name else "save"
    error = failure(getattr(model, method), path)
    assert isinstance(error, FileNotFoundError)
    with pytest.raises(FileNotFoundError) as plain:
        getattr(fresh("functional"), method)(path)
    assert str(error) == str(plain.value)
    assert names(shared_tmp_path) == []


@pytest.mark.parametrize("name", ["model.h5", "model"])
def test_a_missing_folder_is_made_where_keras_makes_it(name: str, shared_tmp_path: Path) -> None:
    trained().save(shared_tmp_path / "new" / "newer" / name)
    assert names(shared_tmp_path / "new" / "newer") == [name]


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5", "model.h5", "model"])
def test_a_file_in_place_of_a_folder_is_the_same_error_everywhere(
    name: str, shared_tmp_path: Path
) -> None:
    model = trained()
    if tnt.is_master_rank():
        (shared_tmp_path / "file").write_text("here")
    tnt.barrier()
    save = model.save_weights if "weights" in name else model.save
    assert isinstance(failure(save, shared_tmp_path / "file" / name), OSError)
    assert (shared_tmp_path / "file").read_text() == "here"


def test_a_folder_in_place_of_a_file_stays(shared_tmp_path: Path) -> None:
    model = trained()
    if tnt.is_master_rank():
        (shared_tmp_path / "model.keras").mkdir()
        (shared_tmp_path / "model.keras" / "notes.txt").write_text("mine")
    tnt.barrier()
    error = failure(model.save, shared_tmp_path / "model.keras")
    assert (type(error), error.errno) == (IsADirectoryError, errno.EISDIR)  # type: ignore[attr-defined]
    assert names(shared_tmp_path) == ["model.keras"]
    assert names(shared_tmp_path / "model.keras") == ["notes.txt"]


class Unfriendly(Exception):  # noqa: N818
    """An error that cannot be sent."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Failing(keras.layers.Layer):
    def get_config(self) -> dict[str, Any]:
        raise Unfriendly("this", "that")


def test_any_error_of_the_master_reaches_the_others(shared_tmp_path: Path) -> None:
    model = tnt.Model(keras.Sequential([keras.Input((5,)), Failing()]))
    kind = Unfriendly if tnt.is_master_rank() else RuntimeError
    with pytest.raises(kind, match="^this and that$"):
        model.save(shared_tmp_path / "model.keras")
    assert names(shared_tmp_path) == []


def test_weights_of_a_model_that_is_not_built(shared_tmp_path: Path) -> None:
    model = tnt.Model(keras.Sequential([keras.layers.Dense(1)]))
    error = failure(model.save_weights, shared_tmp_path / "model.weights.h5")
    assert "not yet been built" in str(error)


def test_what_a_killed_run_left_is_removed(shared_tmp_path: Path) -> None:
    model = trained()
    if tnt.is_master_rank():
        for leftover in (".model.keras.saving-0", ".model.keras.saving-7", ".other.keras.saving-0"):
            (shared_tmp_path / leftover).mkdir()
            (shared_tmp_path / leftover / "model.keras").write_text("half")
    tnt.barrier()
    model.save(shared_tmp_path / "model.keras")
    assert names(shared_tmp_path) == [".other.keras.saving-0", "model.keras"]


def test_other_files_in_a_folder_stay(shared_tmp_path: Path) -> None:
    model = trained()
    folder = shared_tmp_path / "location"
    if tnt.is_master_rank():
        folder.mkdir()
        (folder / "tokens.txt").write_text("mine")
    tnt.barrier()
    for _ in range(2):
        fit(model)
        model.save(folder)
        assert (folder / "tokens.txt").read_text() == "mine"
        assert np.array_equal(
            tnt.models.load_model(folder).get_weights()[0], model.get_weights()[0]
        )


# Who saves


@pytest.mark.ranks(3)
def test_the_master_may_save_alone(shared_tmp_path: Path) -> None:
    model, path = trained(), shared_tmp_path / "model.keras"
    for _ in range(3):
        if tnt.is_master_rank():
            model.save(path)
            model.save_weights(shared_tmp_path / "model.weights.h5")
        fit(model)
        if tnt.is_master_rank():
            time.sleep(0.2)
        model.save(path)  # nobody takes the notice of the save before for this one's
        assert same_state(keras.models.load_model(path), model)
        tnt.barrier()  # before it is overwritten


@pytest.mark.ranks(3)
def test_every_save_is_waited_for(shared_tmp_path: Path) -> None:
    model = trained()
    for number in range(20):
        model.set_weights([np.full_like(w, number) for w in model.get_weights()])
        if tnt.is_master_rank() and number % 7 == 0:
            time.sleep(0.1)
        model.save_weights(shared_tmp_path / "model.weights.h5")
        weights = content(shared_tmp_path / "model.weights.h5")
        # The master does not wait, and may be at one of the next already.
        values = {np.max(part[2]) for part in weights["model.h5"].values() if len(part) == 3}
        assert values & set(range(number, 20))


def test_a_callback_on_the_master_alone_may_save(shared_tmp_path: Path) -> None:
    model = tnt.Model(fresh("functional"))
    path = shared_tmp_path / "model.keras"
    mine = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.save(path))
    callbacks = [tnt.keras.callbacks.Callback(mine, run_on_all_ranks=False)]
    x, y = classification_data()
    model.fit(x, y, batch_size=4, epochs=3, callbacks=callbacks, verbose=0)
    assert same_state(keras.models.load_model(path), model)
    fit(model)
    model.save(path)
    assert same_state(keras.models.load_model(path), model)


@pytest.mark.ranks(3)
def test_paths_may_differ_between_the_ranks(shared_tmp_path: Path) -> None:
    model = trained()
    for number in range(2):  # as the time of day in them does
        model.save(shared_tmp_path / f"{number}-{tnt.get_rank()}.keras")
    tnt.barrier()
    assert names(shared_tmp_path) == ["0-0.keras", "1-0.keras"]


def test_a_save_that_the_master_does_not_make_is_an_error(shared_tmp_path: Path) -> None:
    model = trained()
    if tnt.is_master_rank():
        model.save_weights(shared_tmp_path / "model.weights.h5")
    else:
        with pytest.raises(tnt.errors.MismatchError, match="not on the master rank"):
            model.save(shared_tmp_path / "model.keras")
    tnt.barrier()


@pytest.mark.ranks(3)
def test_all_ranks_save_if_told_so(shared_tmp_path: Path) -> None:
    model = trained()
    mine = shared_tmp_path / f"rank-{tnt.get_rank()}"
    mine.mkdir()
    everywhere = {"tnt_save_all_devices": True}
    model.save(mine / "model.keras", **everywhere)
    model.save_weights(mine / "model.weights.h5", **everywhere)
    model.export(mine / "artifact", verbose=False, **everywhere)
    tnt.models.save_model(model, mine / "other.keras", **everywhere)
    tnt.models.save_model(fresh("functional"), mine / "plain.keras", **everywhere)
    expected = ["artifact", "model.keras", "model.weights.h5", "other.keras", "plain.keras"]
    assert names(mine) == expected
    assert same_state(keras.models.load_model(mine / "model.keras"), model)


def test_all_ranks_may_save_to_one_path(shared_tmp_path: Path) -> None:
    model = trained()
    for name in ("model.keras", "model"):
        for _ in range(3):
            model.save(shared_tmp_path / name, tnt_save_all_devices=True)
            assert same_state(keras.models.load_model(shared_tmp_path / name), model)
            tnt.barrier()
    assert names(shared_tmp_path) == ["model", "model.keras"]


@pytest.mark.ranks(3)
def test_if_one_of_all_fails_all_do(shared_tmp_path: Path) -> None:
    model = trained()
    folder = "missing" if tnt.get_rank() == 1 else "."
    error = failure(model.save, shared_tmp_path / folder / "model.keras", tnt_save_all_devices=True)
    assert isinstance(error, FileNotFoundError)
    assert "missing" in str(error)


@pytest.mark.parametrize("first", [0, 1])
def test_collectives_of_a_thread_do_not_get_into_the_way_of_saves(
    first: int, shared_tmp_path: Path
) -> None:
    model = tnt.Model(fresh("functional"))
    model.save_weights(shared_tmp_path / "before.weights.h5")
    thread = threading.Thread(target=tnt.barrier)
    if tnt.get_rank() == first:
        thread.start()
        time.sleep(0.3)  # it has come to the barrier now
    model.save_weights(shared_tmp_path / "meanwhile.weights.h5")
    if tnt.get_rank() != first:
        thread.start()
    thread.join()
    tnt.barrier()
    assert names(shared_tmp_path) == ["before.weights.h5", "meanwhile.weights.h5"]
