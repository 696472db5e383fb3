"""The class of a wrapped model: the user's, with our steps before it and our API after it."""

from __future__ import annotations

from typing import Any

import keras

from tarantella.internals import keras as internals
from tarantella.keras import hooks, master_weights
from tarantella.keras.advice import Advice
from tarantella.keras.compared_steps import ComparedSteps
from tarantella.keras.rank_steps import RankSteps
from tarantella.keras.stop_requests import StopRequests
from tarantella.runtime import world
from tarantella.runtime.configuration import configuration

# Keras makes these when it needs them, for the object that they are called on.
_NO_FUNCTIONS = dict.fromkeys(("train_function", "test_function", "predict_function"))


def wrapped(model: keras.Model, api: type[keras.Model]) -> Any:
    """A tnt.Model whose weights may still differ between the ranks.

    Args:
        model: The user's model.
        api: The class that has `fit` and the like: `tnt.Model` or `tnt.Sequential`.
    """
    if world.get_size() > 1:
        hooks.install([hooks.APPLY_GRADIENTS])  # before a user replaces it in an optimizer
    made = view(model, _distributed_class(type(model), api))
    vars(made).update(
        **_NO_FUNCTIONS,
        _tnt_batch_logs=frozenset(),
        _tnt_advice=Advice(),
        _tnt_steps={phase: ComparedSteps() for phase in ("train", "test", "predict")},
        _tnt_batch_size=0,
        _tnt_step_kinds={},
        _tnt_called=set(),
        _tnt_seen_optimizer=0,
        _tnt_traces_alike=False,
        _tnt_compiles_calls=False,
        _tnt_takes_gradients=False,
        _tnt_gradient_type=configuration().gradient_type,
        _tnt_new_variables=master_weights.NewVariables(),
        _tnt_passes_over=False,
        _tnt_has_master_weights=False,
        _tnt_stop_requests=StopRequests(),
    )
    return made


def plain(model: Any) -> Any:
    """A wrapped model, settings and all, as an object of the class it was made from."""
    made = view(model, model._tnt_plain_class)
    for name in [name for name in vars(made) if name.startswith("_tnt_")]:
        del vars(made)[name]
    vars(made).update(_NO_FUNCTIONS)
    return made


_distributed_classes: dict[Any, Any] = {}


def _distributed_class(plain: Any, api: type[keras.Model]) -> Any:
    """The class of models that are both a tnt.Model and a `plain` one."""
    if plain not in _distributed_classes:
        _distributed_classes[plain] = _make_distributed_class(plain, api)
        # In a model that is not ours, Keras saves a layer of this class like a plain one.
        internals.save_as(_distributed_classes[plain], plain)
    return _distributed_classes[plain]


def _make_distributed_class(plain: Any, api: type[keras.Model]) -> Any:
    return type(
        plain.__name__,
        (RankSteps, plain, api),
        {
            "__module__": plain.__module__,
            "__doc__": plain.__doc__,
            # Keras makes clones by calling the class with the arguments of the plain one.
            "__new__": lambda cls, *args, **kwargs: cls._tnt_wrap(plain(*args, **kwargs)),
            # The instance takes over the attributes of one that was initialised.
            "__init__": lambda self, *args, **kwargs: None,
            "_tnt_plain_class": plain,
        },
    )


def view(model: keras.Model, cls: type[Any]) -> Any:
    """Another object of class `cls` with the layers, weights and settings of `model`."""
    blank = keras.Model.__new__(cls)
    # Keras binds these to the object they are made with.
    bound = {name: vars(blank)[name] for name in ("build", "quantize") if name in vars(blank)}
    vars(blank).update(vars(model))
    vars(blank).update(bound)
    return blank
