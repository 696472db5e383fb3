"""Models to save, and what is in the files they are saved to."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
from oracle import WITH_STATE, classification_data, small_model

import tarantella as tnt


@keras.saving.register_keras_serializable("tests")
class Stack(keras.Model):
    """A subclassed model that can be saved."""

    def __init__(self, units: int = 4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.hidden = keras.layers.Dense(units, activation="tanh")
        self.out = keras.layers.Dense(3, activation="softmax")

    def call(self, inputs: Any) -> Any:
        return self.out(self.hidden(inputs))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


def functional() -> keras.Model:
    return small_model(regularized=False)


def sequential() -> keras.Model:
    dense = keras.layers.Dense
    return keras.Sequential(
        [keras.Input((5,)), dense(4, activation="tanh"), dense(3, activation="softmax")]
    )


def subclassed() -> keras.Model:
    model = Stack()
    model(np.zeros((1, 5)))
    return model


KINDS = {"functional": functional, "sequential": sequential, "subclassed": subclassed}


def fresh(kind: str, compiled: bool = True) -> keras.Model:
    """A plain model whose layers have the names that those of another of its kind have."""
    keras.utils.clear_session()
    model = KINDS[kind]()
    if compiled:
        model.compile(**WITH_STATE)
    return model


_after_training: dict[tuple[str, int, str], list[np.ndarray]] = {}


def trained(kind: str = "functional", epochs: int = 1) -> tnt.Model:
    """A model after training: it is trained once, and the next one gets the state of then."""
    model = tnt.Model(fresh(kind))
    key = kind, epochs, keras.config.floatx()
    if key in _after_training:
        model.optimizer.build(model.trainable_variables)
        for variable, value in zip(variables(model), _after_training[key], strict=True):
            variable.assign(value)
    else:
        fit(model, epochs)
        _after_training[key] = state(model)
    return model


def fit(model: keras.Model, epochs: int = 1) -> None:
    model.fit(*classification_data(), batch_size=4, epochs=epochs, shuffle=False, verbose=0)


def state(model: keras.Model) -> list[np.ndarray]:
    """The values of all variables, those of the optimizer included."""
    return [np.array(variable) for variable in variables(model)]


def variables(model: keras.Model) -> list[Any]:
    """The variables of a model and, if it is compiled, of its optimizer."""
    return [*model.variables, *(model.optimizer.variables if model.compiled else [])]


def same_state(one: keras.Model, other: keras.Model) -> bool:
    pairs = zip(state(one), state(other), strict=True)
    return all(np.array_equal(mine, yours) for mine, yours in pairs)


def content(path: Path) -> dict[str, Any]:
    """All that a saved model consists of, for comparison."""
    if path.is_dir():
        files = {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
    else:
        files = {"model.h5": path.read_bytes()}
    return {name: _parsed(name, data) for name, data in files.items()}


def _parsed(name: str, data: bytes) -> Any:
    if name == "metadata.json":
        return {**json.loads(data), "date_saved": None}
    if name.endswith(".json"):
        return json.loads(without_addresses(data.decode()))
    found: dict[str, Any] = {}
    with h5py.File(io.BytesIO(data), "r") as file:
        file.visititems(lambda path, item: found.update({path: _described(item)}))
        found["/"] = _described(file)
    return found


def without_addresses(text: str) -> str:
    """Keras tells objects that layers share by where they lie in memory."""
    return re.sub(r'"shared_object_id": \d+', '"shared_object_id": 0', text)


def _described(item: Any) -> Any:
    attributes = {key: without_addresses(str(value)) for key, value in item.attrs.items()}
    if isinstance(item, h5py.Dataset):
        return attributes, item.dtype.str, np.array(item).tolist()
    return attributes
