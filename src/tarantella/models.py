"""The functions of `keras.models`, for models that train on all ranks.

Every rank must call them, and gets a model with the master's weights. If one rank fails, all ranks
raise its error.
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
    """Loads a model that Keras or Tarantella saved, as `keras.models.load_model` does.

    Args:
        filepath (str, pathlib.Path): The file or folder, which every rank reads.
        custom_objects (dict[str, object]): Custom classes and functions by name, if they are not
            registered.
        compile: Whether to compile the model, if it was compiled when it was saved.
        safe_mode: If False, allow code in the file, in `Lambda` layers.

    Returns:
        A `tnt.Model` that resumes training where the saved one stopped.

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
    """Saves a `tnt.Model` or a `keras.Model`, as `tnt.Model.save` does.

    Args:
        model: The model.
        filepath (str, pathlib.Path): The path. If it has no extension, the model is saved as a
            folder.
        overwrite: If False, ask before overwriting a file.
        zipped: If False, write a folder instead of one file.
        tnt_save_all_devices: Whether every rank writes, rather than the master alone.
        kwargs: Further arguments for Keras.

    Example:

    ```python
    import keras
    import tarantella as tnt

    model = tnt.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    tnt.models.save_model(model, "untrained.keras")
    ```
    """
    if not isinstance(model, keras.Model):
        raise InputError(
            f"The first argument of save_model must be a model, not {type(model).__name__}: "
            "`tnt.models.save_model(model, 'path/to/location')`."
        )
    if isinstance(model, Model):
        model.save(filepath, overwrite, zipped, tnt_save_all_devices=tnt_save_all_devices, **kwargs)
    else:
        saving.save_model(model, filepath, overwrite, zipped, tnt_save_all_devices, **kwargs)


def model_from_config(config: Any, custom_objects: Any = None) -> Model:
    """Makes a model from what `get_config` returned, with new weights.

    Args:
        config (dict): The configuration of a Functional or Sequential model; or of any model, with
            the name of its class, as `keras.saving.serialize_keras_object` returns it.
        custom_objects (dict[str, object]): Custom classes and functions by name, if they are not
            registered.

    Returns:
        A `tnt.Model` that is not compiled.

    Example:

    ```python
    import keras
    import tarantella as tnt

    model = tnt.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    from_config = tnt.models.model_from_config(model.get_config())
    from_json = tnt.models.model_from_json(model.to_json())
    from_yaml = tnt.models.model_from_yaml(model.to_yaml())
    copy = tnt.models.clone_model(model)
    ```
    """
    return distributed(lambda: loading.from_config(config, custom_objects), "model_from_config")


def model_from_json(json_string: str, custom_objects: Any = None) -> Model:
    """Makes a model from what `to_json` returned, with new weights.

    Args:
        json_string: The text.
        custom_objects (dict[str, object]): As in `model_from_config`.
    """
    return distributed(lambda: loading.from_json(json_string, custom_objects), "model_from_json")


def model_from_yaml(yaml_string: str, custom_objects: Any = None) -> Model:
    """Makes a model from what `to_yaml` returned, with new weights.

    YAML tags that would run code are refused.

    Args:
        yaml_string: The text.
        custom_objects (dict[str, object]): As in `model_from_config`.
    """
    return distributed(lambda: loading.from_yaml(yaml_string, custom_objects), "model_from_yaml")


def clone_model(model: keras.Model, *args: Any, **kwargs: Any) -> Model:
    """Clones a model with new layers and weights, as `keras.models.clone_model` does.

    Args:
        model: A `tnt.Model` or a `keras.Model`.
        args: Further arguments for Keras: `input_tensors`, `clone_function` and so on.
        kwargs: The same by keyword.
    """
    plain = model._plain() if isinstance(model, Model) else model
    return distributed(lambda: keras.models.clone_model(plain, *args, **kwargs), "clone_model")
