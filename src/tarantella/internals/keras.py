"""Everything that Tarantella uses of Keras beyond its public names.

One place, so that a new version of Keras breaks one file and its test
(`tests/unit/test_internals_keras.py`) says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from tarantella.runtime import versions
from tarantella.runtime.log import LOGGER

with versions.private_names("Keras"):
    from keras.src import api_export, backend
    from keras.src.backend.common import global_state
    from keras.src.backend.common.stateless_scope import in_stateless_scope
    from keras.src.backend.common.variables import Variable as AnyVariable
    from keras.src.backend.tensorflow import nn as backend_nn
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.losses import loss as loss_module
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.random import seed_generator
    from keras.src.saving import object_registration, saving_lib
    from keras.src.trainers import data_adapters
    from keras.src.trainers.compile_utils import CompileMetrics
    from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
    from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn
    from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter
    from keras.src.utils import file_utils, io_utils
    from keras.src.utils.file_utils import is_remote_path
    from keras.src.utils.io_utils import ask_to_proceed_with_overwrite as may_overwrite
    from keras.src.utils.python_utils import is_default
    from keras.src.utils.python_utils import pythonify_logs as python_logs

    # What is used of these: names in a module or a class, not on an object.
    for _owner, _name in (
        (AnyVariable, "_initialize"),
        (keras.Model, "_aggregate_additional_loss"),  # overridden in `rank_steps`
        (keras.Model, "_should_eval"),  # too
        (keras.Model, "_symbolic_build"),
        (seed_generator, "global_seed_generator"),
        (loss_module, "apply_mask"),
        (loss_module, "reduce_weighted_values"),
        (loss_module, "squeeze_or_expand_to_same_rank"),
        (backend_nn, "_compute_moments_sync"),
        (keras.layers.BatchNormalization, "_moments"),
        (keras.layers.Layer, "_clear_losses"),
        (keras.layers.Layer, "_flatten_layers"),
        (legacy_h5_format, "h5py"),
        (legacy_h5_format, "load_optimizer_weights_from_hdf5_group"),
        (saving_lib, "h5py"),
        (data_adapters.array_data_adapter, "can_convert_arrays"),
        (data_adapter_utils, "class_weight_to_sample_weights"),
        (array_slicing, "train_validation_split"),
        (api_export, "REGISTERED_OBJS_TO_NAMES"),
        (object_registration, "GLOBAL_CUSTOM_NAMES"),
        (io_utils, "print_msg"),
        (file_utils, "get_file"),
        (file_utils, "makedirs"),
    ):
        getattr(_owner, _name)

__all__ = [
    "CALLBACK_STATE",
    "AnyVariable",
    "BaseOptimizer",
    "DataAdapter",
    "activity_losses_are_sums",
    "array_slicing",
    "arrays_of",
    "backend_nn",
    "build_metric",
    "build_training_state",
    "callback_state",
    "class_weight_map",
    "csv_size",
    "data_adapter_utils",
    "data_adapters",
    "draws_in_python",
    "file_utils",
    "flat_layers",
    "give_losses",
    "global_seed",
    "handles",
    "has_all_variables",
    "in_stateless_scope",
    "index_adapter",
    "install_hdf5_files",
    "io_utils",
    "is_array_adapter",
    "is_arrays",
    "is_default",
    "is_remote_path",
    "kept_compile_arguments",
    "keras_mask",
    "limited",
    "logits_of",
    "loss_module",
    "make_global_seed",
    "mask_epsilon",
    "may_overwrite",
    "merged_sample_weight",
    "only_keras_sees_updates",
    "python_logs",
    "reduction_axes",
    "restore_optimizer",
    "save_as",
    "set_keras_mask",
    "shorten_csv",
    "take_losses",
    "tf_variable",
    "trained_variables",
    "with_logits",
]


def tf_variable(variable: Any) -> tf.Variable:
    """TensorFlow's variable in one of Keras's, whatever scope a layer is in."""
    return variable._value


def trained_variables(optimizer: Any) -> list[Any]:
    """The variables that an optimizer was built for."""
    with versions.private_names("Keras"):
        return list(optimizer._trainable_variables)


def reduction_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    """The axes that a layer computes its statistics over."""
    with versions.private_names("Keras"):
        return list(layer._reduction_axes)


# Data


def is_arrays(x: Any) -> bool:
    """Whether Keras takes data for a structure of arrays, which it makes batches of itself."""
    return bool(data_adapters.array_data_adapter.can_convert_arrays((x,)))


def is_array_adapter(adapter: Any) -> bool:
    """Whether a data adapter is that of arrays."""
    return isinstance(adapter, ArrayDataAdapter)


def arrays_of(adapter: Any) -> Any:
    """The arrays of such an adapter: x, (x, y) or (x, y, sample_weight)."""
    with versions.private_names("Keras"):
        return adapter._inputs


def index_adapter(adapter: Any) -> Any:
    """An adapter that gives the numbers of the rows that such an adapter gives."""
    with versions.private_names("Keras"):
        rows, batch_size, shuffle = adapter._num_samples, adapter._batch_size, adapter._shuffle
    return ArrayDataAdapter(np.arange(rows), batch_size=batch_size, shuffle=shuffle)


def draws_in_python(adapter: Any) -> bool:
    """Whether the batches come from Python code, which may draw random numbers for them."""
    return isinstance(adapter, (GeneratorDataAdapter, PyDatasetAdapter, TorchDataLoaderAdapter))


def class_weight_map(class_weight: dict[int, float]) -> Callable[..., Any]:
    """The function of (x, y) with which Keras gives samples the weights of their classes."""
    return make_class_weight_map_fn(class_weight)


def merged_sample_weight(values: Any, sample_weight: Any, mask: Any, dtype: Any) -> Any:
    """Mask and sample weight as one, as Keras's `mean_with_sample_weight` sums them up."""
    if sample_weight is not None:
        sample_weight = keras.ops.convert_to_tensor(sample_weight, dtype=dtype)
    if mask is not None:
        mask = keras.ops.convert_to_tensor(mask, dtype=dtype)
    merged = loss_module.apply_mask(
        sample_weight, mask, dtype=values.dtype, reduction="mean_with_sample_weight"
    )
    if merged is not None:
        _, merged = loss_module.squeeze_or_expand_to_same_rank(values, merged)
    return merged


def build_metric(metric: keras.metrics.Metric, args: Any, kwargs: dict[str, Any]) -> None:
    """Creates the variables that a metric makes when it first sees data; records nothing."""
    backend.compute_output_spec(metric.update_state, *args, **kwargs)


def has_all_variables(metric: keras.metrics.Metric) -> bool:
    """Whether a metric certainly has all its variables.

    Keras's own tell; a user's may make one in any update.
    """
    if isinstance(metric, CompileMetrics):
        return metric.built and all(has_all_variables(one) for one in metric.metrics)
    if not is_of_keras(type(metric)) or "update_state" in vars(metric):
        return False
    return getattr(metric, "_built", True)


def build_training_state(model: keras.Model, spec: Any) -> None:
    """Creates the variables of a model's optimizer, losses and metrics; records nothing.

    Args:
        model: A compiled model, all layers of which are built.
        spec: The structure of a batch, of `tf.TensorSpec`s.
    """
    # In a graph that is never run, as when a step is traced: what an optimizer's `build` assigns
    # there, Keras drops.
    build = tf.function(lambda: model._symbolic_build(data_batch=spec), autograph=False)
    build.get_concrete_function()


def flat_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The model and all layers in it, at any depth."""
    return list(model._flatten_layers())


def take_losses(model: keras.Model) -> list[Any]:
    """Takes away what layers added with `add_loss` in the call that just ended."""
    with versions.private_names("Keras"):
        own = [layer._losses for layer in flat_layers(model)]
    losses = [loss for each in own for loss in each]
    for each in own:
        each.clear()
    return losses


def give_losses(model: keras.Model, losses: list[Any]) -> None:
    """Makes `losses` those of the call that just ended."""
    model._clear_losses()
    model._losses.extend(losses)


@cache
def mask_epsilon() -> float:
    """What this Keras adds to the number of valid entries of a mask, to avoid division by 0."""
    with tf.init_scope():
        weight = loss_module.apply_mask(None, tf.ones(1, tf.float64), "float64", "mean")
        return 1.0 / float(weight[0]) - 1.0


@cache
def activity_losses_are_sums() -> bool:
    """Whether this Keras leaves an activity regularizer's sum over the batch as it is.

    Later versions divide it by the size of the batch.
    """
    with tf.init_scope():  # it may be asked for while a step is traced
        layer = keras.layers.Activation("linear", activity_regularizer=keras.ops.sum)
        layer(np.ones((2, 1)))
        return bool(layer.losses[0] == 2.0)


def has_training_state(model: keras.Model) -> bool:
    """Whether all variables exist that a step of training needs."""
    parts = [*flat_layers(model), model.optimizer, model._compile_metrics, model._compile_loss]
    return all(part.built for part in parts if part is not None)


def only_keras_sees_updates(model: keras.Model) -> bool:
    """Whether no code of the user's might look at the weights between their update and the end.

    In a step of Keras, that could be what the user has made of the optimizer, or a metric that
    the model is compiled with.
    """
    compiled = model._compile_metrics
    return _method_is_of_keras(model.optimizer, "apply_gradients") and all(
        map(_is_metric_of_keras, [] if compiled is None else compiled.metrics)
    )


def _method_is_of_keras(instance: Any, name: str) -> bool:
    """Whether a method is Keras's, in the class and all its bases, and not replaced."""
    bases = type(instance).__mro__
    is_replaced = name in vars(instance)
    return not is_replaced and all(is_of_keras(base) for base in bases if name in vars(base))


def _is_metric_of_keras(metric: keras.metrics.Metric) -> bool:
    function = getattr(metric, "_fn", None)
    return (
        is_of_keras(type(metric))
        and all(_method_is_of_keras(metric, name) for name in ("update_state", "result"))
        and (function is None or _is_function_of_keras(function))
    )


def _is_function_of_keras(function: Any) -> bool:
    """Whether Keras has this very function; one of the user's may go by its name."""
    if not isinstance(function, FunctionType) or not is_of_keras(function):
        return False
    return getattr(sys.modules.get(function.__module__), function.__name__, None) is function


def is_of_keras(definition: Any) -> bool:
    """Whether a class or function says that it is one of Keras."""
    return definition.__module__.startswith("keras.src.")


def keras_mask(tensor: Any) -> Any:
    """The mask that a layer attached to its output, or None."""
    return getattr(tensor, "_keras_mask", None)


def set_keras_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask to a layer's output."""
    if mask is not None:
        tensor._keras_mask = mask


# What computes probabilities. Losses are computed from its argument, which keeps what it rounds.
_ACTIVATIONS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.nn.sigmoid}


@dataclass(frozen=True)
class Logits:
    """What probabilities were computed from.

    Attributes:
        values: The argument of the activation.
        activation: The operation, if only that shows it, and not an attribute of the result.
    """

    values: Any
    activation: str | None


def logits_of(tensor: Any) -> Logits | None:
    """Where Keras finds what a loss of these probabilities is computed from, if they are any."""
    if hasattr(tensor, "_keras_logits"):
        return Logits(tensor._keras_logits, None)
    if isinstance(tensor, tf.Tensor) and tf.is_symbolic_tensor(tensor):
        operation = tensor.op
        if operation.type in _ACTIVATIONS:
            return Logits(operation.inputs[0], operation.type)
    return None


def with_logits(tensor: Any, logits: Logits) -> Any:
    """The probabilities, with logits where Keras finds them."""
    if logits.activation is not None:
        return _ACTIVATIONS[logits.activation](logits.values)
    tensor._keras_logits = logits.values
    return tensor


# Callbacks

# What Keras's callbacks remember from epoch to epoch, by class. They do not document it.
CALLBACK_STATE: dict[str, tuple[str, ...]] = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    "History": ("epoch", "history"),
    "ModelCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
}


def callback_state(callback: Any, class_name: str) -> dict[str, Any] | None:
    """What a callback remembers, or None, with a warning, if some of it is not where it was.

    Args:
        callback: A callback in training.
        class_name: The class of Keras that it derives from.
    """
    names = CALLBACK_STATE[class_name]
    missing = [name for name in names if not hasattr(callback, name)]
    if missing:
        _warn_of_missing_state(class_name, ", ".join(f"`{name}`" for name in missing))
        return None
    return {name: getattr(callback, name) for name in names}


@cache  # once, not at each backup
def _warn_of_missing_state(class_name: str, missing: str) -> None:
    LOGGER.warning(
        "The state of %s is not restored from a backup: with Keras %s it has no %s. Use a version "
        "of Keras that Tarantella was tested with to restore it.",
        class_name,
        keras.__version__,
        missing,
    )


def csv_size(logger: keras.callbacks.CSVLogger) -> int:
    """How many bytes a `CSVLogger` has written to its file."""
    with versions.private_names("Keras"):
        logger.csv_file.flush()
        return int(logger.csv_file.tell())


def shorten_csv(logger: keras.callbacks.CSVLogger, size: int) -> None:
    """Removes the last lines of a `CSVLogger`'s file, if it has more than this many bytes."""
    with versions.private_names("Keras"):
        if size <= logger.csv_file.tell():
            logger.csv_file.truncate(size)
            logger.append_header = size == 0


def handles(callback: Any, event: str) -> bool:
    """Whether a callback does anything at an event, such as "train_batch_end"."""
    return not all(is_default(getattr(callback, f"on_{name}")) for name in names_of(event))


def names_of(event: str) -> tuple[str, ...]:
    """The names of an event: Keras calls "train_batch_end" by its old name as well."""
    old_name = event.replace("train_", "") if event.startswith("train_batch") else event
    return (event, old_name)


def global_seed() -> Any | None:
    """The state of the random numbers that are drawn without a seed, if some have been."""
    # Up to Keras 3.12 the name is not a constant, but the same.
    name = getattr(seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator")
    generator = global_state.get_global_attribute(name)
    return None if generator is None else generator.state


def make_global_seed() -> None:
    """Creates the state of the random numbers that are drawn without a seed, if it is missing."""
    seed_generator.global_seed_generator()


def limited(epochs: int, steps: int | None) -> tuple[int, int | None]:
    """How many epochs and steps Keras runs of those asked for; it has a limit for debugging."""
    most_epochs = getattr(keras.config, "max_epochs", lambda: None)()
    most_steps = getattr(keras.config, "max_steps_per_epoch", lambda: None)()
    if most_steps:
        steps = min(steps or most_steps, most_steps)
    return min(epochs, most_epochs or epochs), steps


# Saving


class _Hdf5:
    """The module `h5py` as Keras sees it when it saves, with a `File` that a function chooses."""

    def __init__(self, file_class: Callable[[], type[h5py.File]]) -> None:
        self._file_class = file_class

    def __getattr__(self, name: str) -> Any:
        return self._file_class() if name == "File" else getattr(h5py, name)


@cache
def install_hdf5_files(file_class: Callable[[], type[h5py.File]]) -> None:
    """Makes Keras save to HDF5 files of the class that a function returns each time."""
    saving_lib.h5py = legacy_h5_format.h5py = _Hdf5(file_class)


@contextmanager
def kept_compile_arguments(model: keras.Model) -> Iterator[None]:
    """Keeps what a model was compiled with: Keras removes the optimizer when it saves to HDF5."""
    arguments = getattr(getattr(model, "_compile_config", None), "config", {})
    before = dict(arguments)
    try:
        yield
    finally:
        arguments.update(before)


def restore_optimizer(model: keras.Model, path: str) -> None:
    """Gives a model the state of the optimizer that is in an HDF5 file.

    Keras builds the optimizer without the variables of the layers, so it loses the state, and the
    optimizer cannot train the model.
    """
    with h5py.File(path, "r") as file:
        if "optimizer_weights" not in file:
            return
        values = legacy_h5_format.load_optimizer_weights_from_hdf5_group(file)
        values = [np.array(value) for value in values]
    optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
    optimizer.build(model.trainable_variables)
    if [value.shape for value in values] != [tuple(v.shape) for v in optimizer.variables]:
        return
    for variable, value in zip(optimizer.variables, values, strict=True):
        variable.assign(value)
    model.optimizer = optimizer


def save_as(cls: type, plain: type) -> None:
    """Makes Keras save objects of one of our classes as objects of the user's class."""
    for names in (api_export.REGISTERED_OBJS_TO_NAMES, object_registration.GLOBAL_CUSTOM_NAMES):
        if plain in names:
            names[cls] = names[plain]
