"""Keras optimizers for custom training loops on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella.comm.agreement import check_same
from tarantella.errors import InputError, MismatchError
from tarantella.internals import keras as internals
from tarantella.keras import custom_loop


class Optimizer(keras.optimizers.Optimizer):
    """Makes a Keras optimizer apply the gradients of all ranks, in a custom training loop.

    Returns an optimizer of the same class as the one passed in. The two share all their state:
    learning rate, iterations, variables. Gradients passed to `apply_gradients` or `apply` are
    first summed over the ranks, each weighted by its rank's share of the global batch that
    `tnt.distribute_dataset` handed out last. Without one, all ranks have equal shares.

    So the loss must be a mean over the samples of the micro-batch, as Keras losses are. The
    optimizer clips, or otherwise processes, the gradients of the global batch. All ranks must
    apply gradients equally often, for the same variables with the same values; this is checked
    the first time.

    Wrap the outermost optimizer: the `LossScaleOptimizer`, not the one inside it. In `fit` of a
    `tnt.Model`, which does all this itself, the wrapped optimizer works like the plain one.

    Args:
        optimizer (Keras optimizer | str): The optimizer, or the name of one.

    Example:

    ```python
    import keras
    import tensorflow as tf
    import tarantella as tnt

    dataset = tf.data.Dataset.from_tensor_slices((tf.ones((50, 4)), tf.ones((50, 1)))).batch(16)
    model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    loss_function = keras.losses.MeanSquaredError()
    optimizer = tnt.keras.optimizers.Optimizer(keras.optimizers.Adam())

    @tf.function(reduce_retracing=True)
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    for x, y in tnt.distribute_dataset(dataset):
        train_step(x, y)
    ```
    """

    _tnt_ranks_agree = False

    def __new__(cls, optimizer: Any) -> Any:
        return _distributed(optimizer)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Leaves everything as it is in the optimizer that was passed in."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Updates the variables with the sums of the ranks' gradients."""
        with custom_loop.applying(self._check_ranks_agree):
            return super().apply(grads, trainable_variables)

    def _check_ranks_agree(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Checks, the first time, that the ranks train the same variables, from the same values."""
        if self._tnt_ranks_agree:
            return
        check_same(
            {
                f"variable {i}": f"{_kind(gradient)} for shape {tuple(variable.shape)}"
                for i, (gradient, variable) in enumerate(zip(grads, variables, strict=True))
            },
            "the gradients passed to the optimizer",
        )
        with tf.init_scope():  # a function that is being traced has no values
            if tf.executing_eagerly():
                _check_same_values(variables, self.variables)
        self._tnt_ranks_agree = True


def _kind(gradient: Any) -> str:
    if gradient is None:
        return "no gradient"
    return "a sparse gradient" if isinstance(gradient, tf.IndexedSlices) else "a gradient"


def _check_same_values(variables: Sequence[Any], state: Sequence[Any]) -> None:
    check_same(_digests(state), "the state of the optimizer")
    try:
        check_same(_digests(variables), "the weights to be trained")
    except MismatchError as error:
        raise MismatchError(
            f"{error}. Build the model and wrap it in tnt.Model, which gives every rank the "
            "master's weights, or make it from the same seed on every rank: "
            "`keras.utils.set_random_seed(1)`."
        ) from None


def _digests(variables: Sequence[Any]) -> dict[str, str]:
    def digest(variable: Any) -> str:
        return hashlib.blake2b(np.array(variable).tobytes(), digest_size=6).hexdigest()

    return {f"variable {i}": f"values #{digest(v)}" for i, v in enumerate(variables)}


def _distributed(optimizer: Any) -> Any:
    if isinstance(optimizer, Optimizer):
        raise InputError(
            f"The optimizer '{optimizer.name}' is a tnt.keras.optimizers.Optimizer already: "
            "use it as it is, or pass the Keras optimizer it was made from."
        )
    if isinstance(optimizer, str):
        try:
            optimizer = keras.optimizers.get(optimizer)
        except ValueError:
            raise InputError(f"Keras has no optimizer named {optimizer!r}.") from None
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InputError(
            f"tnt.keras.optimizers.Optimizer takes a Keras optimizer, not {_named(optimizer)}. "
            "Make one first: `tnt.keras.optimizers.Optimizer(keras.optimizers.Adam(0.001))`."
        )
    distributed = object.__new__(_distributed_class(type(optimizer)))
    # Not a copy: what is set in one of them, now or when it is built, is set in both.
    object.__setattr__(distributed, "__dict__", vars(optimizer))
    return distributed


def _named(thing: Any) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__


_distributed_classes: dict[Any, Any] = {}


def _distributed_class(plain: Any) -> Any:
    """The class of optimizers that are both an `Optimizer` and a `plain` one."""
    if plain not in _distributed_classes:
        _distributed_classes[plain] = type(
            plain.__name__,
            (Optimizer, plain),
            {
                "__module__": plain.__module__,
                "__doc__": plain.__doc__,
                # Keras makes one from a config by calling the class as it would the plain one.
                "__new__": lambda cls, *args, **kwargs: _distributed(plain(*args, **kwargs)),
            },
        )
        internals.save_as(_distributed_classes[plain], plain)
    return _distributed_classes[plain]
