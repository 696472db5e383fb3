"""All ranks start from the master rank's weights, whenever these are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella.comm import buffers
from tarantella.comm.agreement import check_same
from tarantella.data.micro_batch import MicroBatch
from tarantella.data.randomness import seed_of_rank
from tarantella.internals import keras as internals
from tarantella.keras import hooks
from tarantella.keras.hooks import Handler
from tarantella.runtime import world


class NewVariables:
    """Variables that a model makes in a step, which start from the master's values, too.

    A step that runs eagerly uses a variable as soon as it has it. While TensorFlow traces a step,
    a variable is given its value either at once, by Keras, or when the step has been traced; then
    it is traced again before it is run.
    """

    def __init__(self) -> None:
        self._pending: list[Any] = []

    @contextmanager
    def shared(self, model: keras.Model) -> Iterator[None]:
        """Makes the variables that a step of a model makes start from the master's values.

        All ranks must make the same ones.
        """
        self._share(model)
        eager = tf.executing_eagerly()

        def initialize_alike(initialize: Handler, variable: Any, value: Any) -> None:
            initialize(variable, value)
            self._pending.append(variable)
            if eager:
                self._share(model)

        try:
            with hooks.handling({hooks.INITIALIZE_VARIABLE: initialize_alike}):
                yield
            self._share(model)
        except BaseException:
            self._pending.clear()
            raise

    def _share(self, model: keras.Model) -> None:
        """Gives this rank the master's values of those variables that have one by now."""
        if not self._pending:
            return
        # Those of optimizers and metrics are the same on all ranks, some of which may have them
        # already: the master, if it has evaluated the plain model alone.
        of_metrics = (variable for metric in model.metrics for variable in metric.variables)
        alike = {id(variable) for variable in (*_optimizer_variables(model), *of_metrics)}
        pending = [v for v in self._pending if id(v) not in alike]
        with tf.init_scope():
            ready = [bool(internals.tf_variable(v).is_initialized()) for v in pending]
            self._pending = [v for v, is_ready in zip(pending, ready, strict=True) if not is_ready]
            made = [v for v, is_ready in zip(pending, ready, strict=True) if is_ready]
            # Some ranks may already have the generator for what has no seed.
            for variable in filter(is_seed, made):
                _set(variable, _value(variable), world.get_rank())
            if made := [variable for variable in made if not is_seed(variable)]:
                _take(made)


def build(model: keras.Model, spec: Any) -> None:
    """Creates the variables of a model that has not seen data yet, as a step of training would.

    Args:
        model: A model whose layers may not all be built.
        spec: The structure of a batch, of `tf.TensorSpec`s.
    """
    if all(layer.built for layer in internals.flat_layers(model)):
        return
    if world.get_size() > 1:
        number = tf.TensorSpec((), tf.int64)
        spec = MicroBatch(number, number, spec)
    tf.function(model.train_step, autograph=False).get_concrete_function(spec)


def build_training_state(model: keras.Model, spec: Any) -> None:
    """Creates the variables of the optimizer and the metrics before a step is traced.

    TensorFlow traces a function twice if it creates variables in the first call. Only a model of
    Keras's own classes is built so: calling it has no effects that a user could see.

    Args:
        model: A compiled model.
        spec: The structure of a batch, of `tf.TypeSpec`s.
    """
    leaves = [leaf for leaf in tf.nest.flatten(spec) if leaf is not None]
    if not all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
        return
    if all(layer.built for layer in internals.flat_layers(model)):
        with suppress(Exception):  # the step itself says what is wrong with the data
            internals.build_training_state(model, spec)


def start_from_master(model: keras.Model) -> None:
    """Gives every rank the master rank's variables of a model and its optimizers."""
    _take([*model.variables, *_optimizer_variables(model)])
    if world.is_master_rank():
        return
    for layer in internals.flat_layers(model):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()  # it computes with values once derived from its variables


def _take(variables: Sequence[Any]) -> None:
    """Gives every rank the master rank's values."""
    kinds = [(v.dtype.name, tuple(v.shape)) for v in map(internals.tf_variable, variables)]
    check_same(
        # Not their names: Keras numbers layers by how many a rank has made before.
        [f"{dtype} {shape}" for dtype, shape in kinds],
        "the variables of the model and its optimizer",
    )
    values = [_value(variable) for variable in variables]
    buffers.broadcast_arrays(values, world.communicator("control"), world.get_master_rank())
    if not world.is_master_rank():
        for variable, value in zip(variables, values, strict=True):
            _set(variable, value, world.get_rank())


def _value(variable: Any) -> np.ndarray:
    return np.array(internals.tf_variable(variable))


def _set(variable: Any, value: np.ndarray, rank: int) -> None:
    """Gives a variable the master's value; a seed, one for this rank."""
    if is_seed(variable):
        value = seed_of_rank(value, rank)
    internals.tf_variable(variable).assign(value)


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
