"""All ranks start from the master rank's weights, however they were made."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella.comm import buffers
from tarantella.comm.agreement import check_same
from tarantella.data.parts import Part
from tarantella.data.randomness import seed_of_rank
from tarantella.keras import internals
from tarantella.runtime import world


def build(model: keras.Model, spec: Any) -> None:
    """Creates the variables of a model that has not seen data yet.

    Args:
        model: A model whose layers may not all be built.
        spec: The structure of a batch, of `tf.TensorSpec`s: x, (x, y) or (x, y, sample_weight).
    """
    if all(layer.built for layer in internals.flat_layers(model)):
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(spec)
    inputs = tf.nest.map_structure(lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype.name), x)
    try:
        model(inputs)
    except NotImplementedError:  # no `call`: its own `train_step` calls the layers
        if not all(layer.built for layer in internals.flat_layers(model)[1:]):
            number = tf.TensorSpec((), tf.int64)
            step = tf.function(model.train_step, autograph=False)
            step.get_concrete_function(Part(number, number, spec))


def start_from_master(model: keras.Model) -> None:
    """Gives every rank the master rank's variables of a model and its optimizers."""
    variables = [*model.variables, *_optimizer_variables(model)]
    check_same(
        # Not their names: Keras numbers layers by how many a rank has made before.
        [f"{variable.dtype} {tuple(variable.shape)}" for variable in variables],
        "the variables of the model and its optimizer",
    )
    values = [np.array(variable) for variable in variables]
    buffers.broadcast_arrays(values, world.communicator("control"), world.get_master_rank())
    if world.is_master_rank():
        return
    for variable, value in zip(variables, values, strict=True):
        if is_seed(variable):
            value = seed_of_rank(value, world.get_rank())
        variable.assign(value)
    for layer in internals.flat_layers(model):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()  # it computes with what it once made of its variables


def _optimizer_variables(model: keras.Model) -> list[Any]:
    """Those of every optimizer that is an attribute of the model, as in a GAN's two."""
    optimizers = {
        id(value): value
        for value in vars(model).values()
        if isinstance(value, internals.BaseOptimizer)
    }
    return [variable for optimizer in optimizers.values() for variable in optimizer.variables]


def learning_rates(model: keras.Model) -> list[Any]:
    """The learning rates that can be set, of a model's optimizers."""
    return [v for v in _optimizer_variables(model) if v.name == "learning_rate"]


def is_seed(variable: Any) -> bool:
    """Whether a variable is the state of a random layer, which differs between the ranks."""
    return bool(variable.name == "seed_generator_state")
