"""Functions of `keras.models` whose models train on all ranks.

Every rank must call them, and gets a model with the weights of the master's. If one rank fails,
all raise its error.
"""

from __future__ import annotations

from typing import Any

import keras

from tarantella.errors import InputError
from tarantella.keras import loading, saving
from tarantella.keras.model import Model, distributed

__all__ = [
    "clone_model",
    "load_model",
    "model_from_config",
    "model_from_json",
    "model_from_yaml",
    "save_model",
]


def load_model(
    filepath: Any,
    custom_objects: Any = None,
    compile: bool = True,  # noqa: A002  # as in Keras
    safe_mode: bool = True,
) -> Model:
    """Loads a model that Keras or Tarantella has saved, as `keras.models.load_model`.

    Args:
        filepath: The file or folder, which every rank reads.
        custom_objects: Classes and functions of your own by name, if they are not registered.
        compile: Whether to compile it, if it was compiled when it was saved.
        safe_mode: False if the file may bring code with it, in `Lambda` layers.

    Returns:
        A `tnt.Model` that goes on training where the saved one stopped.

    Example:

    ```python
    import keras
    import tarantella as tnt

    model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile(optimizer="adam", loss="mse")
    model.save("model.keras")
    model = tnt.models.load_model("model.keras")
    ```
    """
    return distributed(
        lambda: loading.load_model(filepath, custom_objects, compile, safe_mode), "load_model"
    )


def save_model(
    model: keras.Model,
    filepath: Any,
    overwrite: bool = True,
    zipped: bool | None = None,
    *,
    tnt_save_all_devices: bool = False,
    **kwargs: Any,
) -> None:
    """Saves a `tnt.Model` or a `keras.Model` in the way of `tnt.Model.save`.

    Args:
        model: The model.
        filepath: Where to; with no ending, it becomes a folder.
        overwrite: Whether to overwrite what is there, or to ask.
        zipped: Whether to write one file, or a folder.
        tnt_save_all_devices: Whether every rank writes, and not the master alone.
        kwargs: Further options of Keras.
    """
    if not isinstance(model, keras.Model):
        raise InputError(
            f"save_model takes a model and a path, not {type(model).__name__} first: "
            "`tnt.models.save_model(model, 'path/to/location')`."
        )
    if isinstance(model, Model):
        model.save(filepath, overwrite, zipped, tnt_save_all_devices=tnt_save_all_devices, **kwargs)
    else:
        saving.save_model(model, filepath, overwrite, zipped, tnt_save_all_devices, **kwargs)


def model_from_config(config: Any, custom_objects: Any = None) -> Model:
    """Makes a model from what `get_config` returned, with new weights.

    Args:
        config: Of a Functional or Sequential model; or of any, with the name of its class, as
            `keras.saving.serialize_keras_object` returns it.
        custom_objects: Classes and functions of your own by name, if they are not registered.
    """
    return distributed(lambda: loading.from_config(config, custom_objects), "model_from_config")


def model_from_json(json_string: str, custom_objects: Any = None) -> Model:
    """Makes a model from what `to_json` returned, with new weights."""
    return distributed(lambda: loading.from_json(json_string, custom_objects), "model_from_json")


def model_from_yaml(yaml_string: str, custom_objects: Any = None) -> Model:
    """Makes a model from what `to_yaml` returned, with new weights.

    Tags that would make YAML run code are refused.
    """
    return distributed(lambda: loading.from_yaml(yaml_string, custom_objects), "model_from_yaml")


def clone_model(model: keras.Model, *args: Any, **kwargs: Any) -> Model:
    """Makes a model like another, with new layers and weights, as `keras.models.clone_model`.

    Args:
        model: A `tnt.Model` or a `keras.Model`.
        args: Further arguments of Keras: `input_tensors`, `clone_function` and so on.
        kwargs: The same by name.
    """
    plain = model._plain() if isinstance(model, Model) else model
    return distributed(lambda: keras.models.clone_model(plain, *args, **kwargs), "clone_model")
