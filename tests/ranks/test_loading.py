"""Loading gives a tnt.Model, the same on all ranks, that resumes where the saved one stopped."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import assert_close, classification_data, small_model
from saved_models import (
    KINDS,
    Stack,
    fit,
    fresh,
    same_state,
    state,
    trained,
    without_addresses,
)

import tarantella as tnt

pytestmark = pytest.mark.ranks(2)


def same_on_all_ranks(model: keras.Model) -> bool:
    return all(
        np.array_equal(first, other)
        for first, *others in zip(*tnt.allgather(state(model)), strict=True)
        for other in others
    )


def failure(action: Any, *args: Any, **kwargs: Any) -> Exception:
    """The error that an action raises, after a check that it is the same on all ranks."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        action(*args, **kwargs)
    assert len(set(tnt.allgather(f"{type(caught.value)} {caught.value}"))) == 1
    return caught.value


# Files


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("functional", "model.keras"),
        ("functional", "model.h5"),
        ("sequential", "model"),
        ("subclassed", "model.keras"),
    ],
)
def test_training_resumes_where_it_stopped(
    kind: str, name: str, shared_tmp_path: Path, float64: None
) -> None:
    keras.utils.set_random_seed(1)
    model = trained(kind, epochs=2)
    model.save(shared_tmp_path / name)
    loaded = tnt.models.load_model(shared_tmp_path / name)
    assert isinstance(loaded, tnt.Model)
    assert isinstance(loaded, type(fresh(kind)))
    assert loaded.compiled
    assert int(loaded.optimizer.iterations) == 8
    fit(loaded, epochs=2)
    fit(model, epochs=2)
    assert_close(state(loaded), state(model), 1e-12, 1e-14)
    assert same_on_all_ranks(loaded)
    assert set(loaded.evaluate(*classification_data(), return_dict=True, verbose=0)) == {
        "loss",
        "accuracy",
    }


RESUME = """
import sys
sys.path.insert(0, {tests!r})
import keras
import tarantella as tnt
from saved_models import fit, fresh

keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
start, end = sys.argv[1:]
if start == "nothing":
    keras.utils.set_random_seed(4)
    model = tnt.Model(fresh("functional"))
else:
    model = tnt.models.load_model(start)
fit(model, epochs=2)
if tnt.is_master_rank():  # and nobody ever asks how that went
    model.save(end)
"""


@pytest.mark.ranks(1, timeout=300)
def test_other_numbers_of_ranks_resume(shared_tmp_path: Path, float64: None) -> None:
    script = shared_tmp_path / "resume.py"
    script.write_text(RESUME.format(tests=str(Path(__file__).parent)))
    keras.utils.set_random_seed(4)
    expected, before = fresh("functional"), "nothing"
    for ranks in (2, 3):
        fit(expected, epochs=2)
        path = str(shared_tmp_path / f"{ranks}.keras")
        command = [sys.executable, "-m", "tarantella.cli", "-n", str(ranks), "--no-gpu"]
        result = subprocess.run(
            [*command, "--", str(script), before, path], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        assert "Abort" not in result.stderr
        assert_close(state(keras.models.load_model(path)), state(expected), 1e-9, 1e-12)
        before = path
    alone = tnt.models.load_model(before)
    for model in (alone, expected):
        fit(model, epochs=2)
    assert_close(state(alone), state(expected), 1e-9, 1e-12)


def test_what_plain_keras_has_saved(shared_tmp_path: Path) -> None:
    plain = fresh("sequential")
    if tnt.is_master_rank():
        fit(plain)
        plain.save(shared_tmp_path / "model.keras")
    tnt.barrier()
    loaded = tnt.models.load_model(shared_tmp_path / "model.keras")
    assert isinstance(loaded, tnt.Sequential)
    assert same_on_all_ranks(loaded)
    if tnt.is_master_rank():
        assert same_state(loaded, plain)


def test_every_rank_has_the_master_s_weights(shared_tmp_path: Path) -> None:
    keras.utils.set_random_seed(tnt.get_rank())
    mine = shared_tmp_path / f"{tnt.get_rank()}.keras"
    plain = fresh("functional")
    plain.save(mine)
    loaded = tnt.models.load_model(mine)
    assert same_on_all_ranks(loaded)
    mine_are_loaded = np.array_equal(loaded.get_weights()[0], plain.get_weights()[0])
    assert mine_are_loaded == tnt.is_master_rank()


def test_without_compiling(shared_tmp_path: Path) -> None:
    trained().save(shared_tmp_path / "model.keras")
    loaded = tnt.models.load_model(shared_tmp_path / "model.keras", compile=False)
    assert not loaded.compiled
    tnt.Model(fresh("functional", compiled=False)).save(shared_tmp_path / "uncompiled.keras")
    assert not tnt.models.load_model(shared_tmp_path / "uncompiled.keras").compiled


class Scale(keras.layers.Layer):
    def __init__(self, factor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, inputs: Any) -> Any:
        return self.factor * inputs

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor}


class OwnStep(Stack):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"own": loss}


def test_custom_objects(shared_tmp_path: Path) -> None:
    inputs = keras.Input((5,))
    model = tnt.Model(keras.Model(inputs, Scale(2.5)(inputs)))
    model.save(shared_tmp_path / "model.keras")
    error = failure(tnt.models.load_model, shared_tmp_path / "model.keras")
    assert "Scale" in str(error)
    loaded = tnt.models.load_model(shared_tmp_path / "model.keras", {"Scale": Scale})
    assert loaded.layers[-1].factor == 2.5
    with keras.saving.custom_object_scope({"Scale": Scale}):
        assert tnt.models.load_model(shared_tmp_path / "model.keras").layers[-1].factor == 2.5


def test_a_class_with_a_train_step_of_its_own(shared_tmp_path: Path) -> None:
    plain = OwnStep(units=6)
    plain(np.zeros((1, 5)))
    model = tnt.Model(plain)
    model.compile("adam", "sparse_categorical_crossentropy")
    fit(model)
    model.save(shared_tmp_path / "model.keras")
    loaded = tnt.models.load_model(shared_tmp_path / "model.keras", {"OwnStep": OwnStep})
    assert isinstance(loaded, OwnStep)
    assert loaded.units == 6
    assert same_state(loaded, model)
    x, y = classification_data()
    assert set(loaded.fit(x, y, batch_size=4, verbose=0).history) == {"own"}


def test_code_in_a_file_is_refused_unless_allowed(shared_tmp_path: Path) -> None:
    inputs = keras.Input((5,))
    model = tnt.Model(keras.Model(inputs, keras.layers.Lambda(lambda x: 3 * x)(inputs)))
    model.save(shared_tmp_path / "model.keras")
    assert "safe_mode" in str(failure(tnt.models.load_model, shared_tmp_path / "model.keras"))
    loaded = tnt.models.load_model(shared_tmp_path / "model.keras", safe_mode=False)
    np.testing.assert_array_equal(loaded(np.ones((1, 5))), np.full((1, 5), 3))


@pytest.mark.parametrize("name", ["nothing.keras", "nothing.h5", "nothing", "text.keras", "folder"])
def test_what_is_not_a_saved_model(name: str, shared_tmp_path: Path) -> None:
    if tnt.is_master_rank():
        (shared_tmp_path / "text.keras").write_text("not a model")
        (shared_tmp_path / "folder").mkdir()
    tnt.barrier()
    error = failure(tnt.models.load_model, shared_tmp_path / name)
    assert isinstance(error, (ValueError, OSError))
    assert name in str(error)
    if name == "nothing":
        assert "does not exist" in str(error)


def test_a_file_that_one_rank_does_not_have(shared_tmp_path: Path) -> None:
    trained().save(shared_tmp_path / "0.keras")
    error = failure(tnt.models.load_model, shared_tmp_path / f"{tnt.get_rank()}.keras")
    assert "1.keras" in str(error)


# Weights


def test_weights_that_fit_are_loaded_and_others_skipped(shared_tmp_path: Path) -> None:
    model = trained()
    for name in ("model.weights.h5", "model.h5"):
        save = model.save_weights if "weights" in name else model.save
        save(shared_tmp_path / name)
        keras.utils.clear_session()
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(4, activation="tanh")(inputs)
        other = tnt.Model(keras.Model(inputs, keras.layers.Dense(7)(hidden)))
        assert isinstance(failure(other.load_weights, shared_tmp_path / name), ValueError)
        with pytest.warns(UserWarning, match="(?i)skipping|could not be loaded"):
            other.load_weights(shared_tmp_path / name, skip_mismatch=True)
        assert_close(other.get_weights()[:2], model.get_weights()[:2], 0, 0)
        tnt.barrier()


def test_weights_by_name(shared_tmp_path: Path) -> None:
    model = trained()
    model.save(shared_tmp_path / "model.h5")
    same_name = model.layers[1].name
    other = tnt.Sequential([keras.Input((5,)), keras.layers.Dense(4, name=same_name)])
    other.add(keras.layers.Dense(2, name="head"))
    other.load_weights(shared_tmp_path / "model.h5", by_name=True)
    assert_close(other.get_weights()[:2], model.get_weights()[:2], 0, 0)


def test_weights_that_the_master_alone_loads_are_everyones(shared_tmp_path: Path) -> None:
    model = trained(epochs=2)
    model.save_weights(shared_tmp_path / "model.weights.h5")
    fit(model)
    expected = state(model)
    fit(model)
    if tnt.is_master_rank():
        model.load_weights(shared_tmp_path / "model.weights.h5")
    fit(model)
    assert_close(state(model), expected, 0, 0)


# Descriptions


@pytest.mark.parametrize("kind", KINDS)
def test_json_and_yaml(kind: str) -> None:
    model = trained(kind)
    plain = fresh(kind)
    for text, remake in (
        (model.to_json(), tnt.models.model_from_json),
        (model.to_yaml(), tnt.models.model_from_yaml),
    ):
        made = remake(text)
        assert isinstance(made, tnt.Model)
        assert isinstance(made, type(plain))
        assert without_addresses(made.to_json()) == without_addresses(model.to_json())
        if made.built:
            assert same_on_all_ranks(made)
    assert len(keras.models.model_from_json(model.to_json()).layers) == len(plain.layers)


@pytest.mark.parametrize("kind", ["functional", "sequential"])
def test_config(kind: str) -> None:
    model = trained(kind)
    config = model.get_config()
    before = copy.deepcopy(config)
    for make in (
        tnt.models.model_from_config,
        tnt.Model.from_config,
        lambda config: type(model).from_config(copy.deepcopy(config)),
        lambda config: tnt.Model(type(fresh(kind)).from_config(copy.deepcopy(config))),
    ):
        made = make(config)
        assert isinstance(made, tnt.Model)
        assert isinstance(made, type(fresh(kind)))
        assert not made.compiled
        assert made.name == model.name
        assert config == before
        assert same_on_all_ranks(made)
        made.set_weights(model.get_weights())
        x = classification_data()[0]
        np.testing.assert_array_equal(made(x), model(x))
    assert isinstance(
        tnt.Sequential.from_config(trained("sequential").get_config()), tnt.Sequential
    )


def test_config_of_a_class_of_ones_own() -> None:
    model = trained("subclassed")
    assert type(model).from_config(model.get_config()).units == 4
    whole = keras.saving.serialize_keras_object(fresh("subclassed"))
    assert isinstance(tnt.models.model_from_config(whole), Stack)
    inputs = keras.Input((5,))
    scaled = tnt.Model(keras.Model(inputs, Scale(2.5)(inputs)))
    made = tnt.models.model_from_config(scaled.get_config(), {"Scale": Scale})
    assert made.layers[-1].factor == 2.5
    text = scaled.to_yaml()
    assert tnt.models.model_from_yaml(text, {"Scale": Scale}).layers[-1].factor == 2.5


@pytest.mark.parametrize(
    ("function", "argument", "message"),
    [
        ("model_from_json", "{", "not valid JSON"),
        ("model_from_json", None, "not valid JSON"),
        ("model_from_json", "[1]", "not the result of"),
        ("model_from_yaml", "a: [", "not valid YAML"),
        ("model_from_yaml", "just a word", "not the result of"),
        ("model_from_yaml", "!!python/object/apply:os.getcwd []", "not valid YAML"),
        ("model_from_config", "functional", "not from str"),
        ("model_from_config", {"units": 4}, "For a class of your own"),
        ("load_model", 5, ""),
    ],
)
def test_bad_descriptions(function: str, argument: Any, message: str) -> None:
    assert message in str(failure(getattr(tnt.models, function), argument))


def test_a_description_of_something_else() -> None:
    text = keras.saving.serialize_keras_object(keras.layers.Dense(3))
    error = failure(tnt.models.model_from_config, text)
    assert "takes a keras.Model, not Dense" in str(error)


# Clones


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_clones(kind: str, wrapped: bool) -> None:
    model = trained(kind) if wrapped else fresh(kind)
    clone = tnt.models.clone_model(model)
    assert isinstance(clone, tnt.Model)
    assert isinstance(clone, type(fresh(kind)))
    fit(clone) if clone.compiled else None
    assert kind == "subclassed" or clone.compiled
    assert not any(one is other for one in clone.weights for other in model.weights)
    assert same_on_all_ranks(clone)


def test_clones_with_functions_of_the_user() -> None:
    def widened(layer: Any) -> Any:
        config = layer.get_config()
        if config.get("units") == 4:
            config["units"] = 9
        return type(layer).from_config(config)

    for kind in ("functional", "sequential"):
        clone = tnt.models.clone_model(trained(kind), clone_function=widened)
        assert clone.layers[-2].units == 9

    def dropping(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return keras.layers.Dropout(0.5)(layer(*args, **kwargs))

    model = tnt.Model(small_model(regularized=False))
    clone = tnt.models.clone_model(model, clone_function=lambda x: x, call_function=dropping)
    assert isinstance(clone.layers[-1], keras.layers.Dropout)
    assert clone.weights[0] is model.weights[0]
    clone = tnt.models.clone_model(model, keras.Input((5,), batch_size=2))
    assert clone.input_shape == (2, 5)


def test_keras_clones_functional_ones_too() -> None:
    assert isinstance(keras.models.clone_model(trained()), tnt.Model)
