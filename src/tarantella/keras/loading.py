"""Makes plain Keras models from files and configurations."""

from __future__ import annotations

import copy
import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import yaml

from tarantella.errors import InputError
from tarantella.internals import keras as internals
from tarantella.keras.saving import SHARDED_WEIGHTS, WEIGHTS, local_path
from tarantella.runtime.log import LOGGER

_HDF5 = (".h5", ".hdf5")


def load_model(filepath: Any, custom_objects: Any, compile_it: bool, safe_mode: bool) -> Any:
    """Loads a model, as `keras.models.load_model`."""
    path = local_path(filepath)
    if path is not None and not Path(path).suffix and not Path(path).exists():
        # Keras would blame the format.
        raise InputError(f"There is no model to load: '{path}' does not exist.")
    with whole(filepath):
        model = keras.models.load_model(filepath, custom_objects, compile_it, safe_mode)
        if path is not None and path.endswith(_HDF5) and model.compiled:
            internals.restore_optimizer(model, path)
    warn_of_useless_weights(model, filepath)
    return model


@contextmanager
def whole(filepath: Any) -> Iterator[None]:
    """Says that a file is damaged, instead of Keras's error about what it found in there."""
    try:
        yield
    except Exception:
        path = local_path(filepath)
        damage = _damage(Path(path)) if path is not None else ""
        if not damage:
            raise
        raise InputError(
            f"The file '{path}' cannot be loaded: {damage}. It may be truncated, or in another "
            "format: load another copy of it, or save the model again."
        ) from None


def _damage(path: Path) -> str:
    """What is wrong with a file that Keras could not load; empty if the file is fine."""
    if path.name.endswith((".keras", *_HDF5)) and path.is_dir():
        return "it is a folder"
    if not path.is_file():
        return ""
    try:
        if path.suffix == ".keras":
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip()
                json.loads(archive.read("config.json"))
                names = archive.namelist()
            if broken is not None:
                return f"'{broken}' in it is damaged"
            return "" if any(map(_holds_weights, names)) else "there are no weights in it"
        if path.suffix in _HDF5:
            h5py.File(path, "r").close()
    except Exception as error:
        return str(error.args[0] if error.args else error)
    return ""


def _holds_weights(name: str) -> bool:
    return name.startswith("model.weights.")


def warn_of_useless_weights(model: keras.Model, filepath: Any) -> None:
    """Warns if a weight that was loaded has a value that is NaN or infinite."""
    for weight in model.weights:
        if keras.backend.is_float_dtype(weight.dtype) and not np.isfinite(np.asarray(weight)).all():
            LOGGER.warning(
                "The weight '%s' in %s has values that are NaN or infinite, so the model's results "
                "will be as well. Load an earlier file. The callback "
                "`keras.callbacks.TerminateOnNaN()` stops training when this happens.",
                weight.path,
                filepath,
            )
            return


def find_weights(filepath: Any) -> Any:
    """The file with the weights for a path; without an extension, the one saved for it."""
    path = local_path(filepath)
    if path is None or Path(path).suffix or Path(path).is_file():
        return filepath
    in_folder = Path(path) / f"model{WEIGHTS}"  # of a whole model, saved without an extension
    files = [f"{path}{WEIGHTS}", f"{path}{SHARDED_WEIGHTS}", str(in_folder)]
    return next((file for file in files if Path(file).is_file()), files[0])


def from_config(config: Any, custom_objects: Any = None) -> Any:
    """A model from what `get_config` or `keras.saving.serialize_keras_object` returned."""
    if not isinstance(config, Mapping):
        raise InputError(
            "A model is made from the dictionary that `get_config` returns, not from "
            f"{type(config).__name__}."
        )
    config = copy.deepcopy(dict(config))  # Keras takes it apart
    if {"class_name", "config"} <= set(config):
        return keras.saving.deserialize_keras_object(config, custom_objects)
    for cls, keys in (
        (keras.Model, {"name", "layers", "input_layers", "output_layers"}),
        (keras.Sequential, {"name", "layers"}),
    ):
        if keys <= set(config):
            return cls.from_config(config, custom_objects)
    raise InputError(
        "This is not the configuration of a Functional or Sequential model. For a class of your "
        "own, use its `from_config`: `tnt.Model(MyModel.from_config(config))`."
    )


def from_json(text: Any, custom_objects: Any = None) -> Any:
    """A model from what `to_json` returned."""
    try:
        description = json.loads(text)
    except (RecursionError, TypeError, ValueError) as error:
        raise InputError(
            f"This is not the result of `to_json`, as it is not valid JSON: {error}"
        ) from None
    return _described(description, custom_objects, "to_json")


def from_yaml(text: Any, custom_objects: Any = None) -> Any:
    """A model from what `to_yaml` returned; no code in it is run."""
    try:
        description = yaml.safe_load(text)
    except (AttributeError, RecursionError, yaml.YAMLError) as error:
        raise InputError(
            f"This is not the result of `to_yaml`, as it is not valid YAML: {error}"
        ) from None
    return _described(description, custom_objects, "to_yaml")


def as_yaml(text: str, **options: Any) -> str:
    """JSON as YAML."""
    return str(yaml.safe_dump(json.loads(text), **{"sort_keys": False, **options}))


def _described(description: Any, custom_objects: Any, origin: str) -> Any:
    if not isinstance(description, dict) or not {"class_name", "config"} <= set(description):
        raise InputError(f"This is not the result of a model's `{origin}`.")
    return keras.saving.deserialize_keras_object(description, custom_objects)
