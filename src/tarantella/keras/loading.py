"""From files and descriptions back to plain Keras models."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import yaml

from tarantella.errors import InputError
from tarantella.keras import internals
from tarantella.keras.saving import WEIGHTS, WEIGHTS_IN_PARTS, local_path


def load_model(filepath: Any, custom_objects: Any, compile_it: bool, safe_mode: bool) -> Any:
    """What `keras.models.load_model` returns."""
    path = local_path(filepath)
    if path is not None and not Path(path).suffix and not Path(path).exists():
        # Keras would say that it does not know the format.
        raise InputError(f"There is no model to load: '{path}' does not exist.")
    model = keras.models.load_model(filepath, custom_objects, compile_it, safe_mode)
    if path is not None and path.endswith((".h5", ".hdf5")) and model.compiled:
        internals.restore_optimizer(model, path)
    return model


def find_weights(filepath: Any) -> Any:
    """The file that holds the weights for a path; with no ending, the one that was saved for it."""
    path = local_path(filepath)
    if path is None or Path(path).suffix or Path(path).is_file():
        return filepath
    in_folder = Path(path) / f"model{WEIGHTS}"  # of a whole model, saved with no ending
    files = [f"{path}{WEIGHTS}", f"{path}{WEIGHTS_IN_PARTS}", str(in_folder)]
    return next((file for file in files if Path(file).is_file()), files[0])


def from_config(config: Any, custom_objects: Any = None) -> Any:
    """A model from the result of a `get_config`, or of `keras.saving.serialize_keras_object`."""
    if not isinstance(config, Mapping):
        raise InputError(
            "A model is made from the dictionary that `get_config` of another one returns, "
            f"not from {type(config).__name__}."
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
        "This is not the configuration of a Functional or Sequential model. For one of a class of "
        "your own, use `from_config` of that class: `tnt.Model(MyModel.from_config(config))`."
    )


def from_json(text: Any, custom_objects: Any = None) -> Any:
    """A model from what `to_json` has written."""
    try:
        description = json.loads(text)
    except (TypeError, ValueError) as error:
        raise InputError(f"This is not the text of a `to_json`, but no JSON: {error}") from None
    return _described(description, custom_objects, "to_json")


def from_yaml(text: Any, custom_objects: Any = None) -> Any:
    """A model from what `to_yaml` has written; nothing in it is executed."""
    try:
        description = yaml.safe_load(text)
    except (AttributeError, yaml.YAMLError) as error:
        raise InputError(f"This is not the text of a `to_yaml`, but no YAML: {error}") from None
    return _described(description, custom_objects, "to_yaml")


def as_yaml(text: str, **options: Any) -> str:
    """What is written in JSON, in YAML."""
    return str(yaml.safe_dump(json.loads(text), **{"sort_keys": False, **options}))


def _described(description: Any, custom_objects: Any, origin: str) -> Any:
    if not isinstance(description, dict) or not {"class_name", "config"} <= set(description):
        raise InputError(f"This is not the text of a model that `{origin}` has written.")
    return keras.saving.deserialize_keras_object(description, custom_objects)
