"""Every place where Tarantella hooks into Keras, in one table.

A hook is a function or method of Keras (or of TensorFlow, where Keras calls it) that asks, each
time it is called, whether someone has a handler for it: a step of ours, say. The handler gets
the plain function and its arguments. Hooks are installed once and stay. Handlers hold for the
thread that entered `handling`, until it leaves: everywhere else, a hook looks up one context
variable and calls the plain function.

In addition, `rank_steps.RankSteps` overrides methods of `keras.Model` for models of ours, two of
them private: `_aggregate_additional_loss` and `_should_eval`.

To support a new version of Keras, check each row of the table against it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from threading import Lock
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakSet

import keras
import tensorflow as tf

from tarantella.internals import keras as internals
from tarantella.runtime import versions

Handler = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Hook:
    """A row of the table.

    Attributes:
        owner: The class or module that has the function.
        name: The name of the function there.
        does: What Tarantella does there.
        in_subclasses: Whether the definitions of subclasses are hooked, too.
        checked: The oldest and the newest version of Keras that this was checked with.
    """

    owner: Any
    name: str
    does: str
    in_subclasses: bool = False
    checked: tuple[str, str] = ("3.8", "3.15")

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


# Trackers of experiments put a `fit` of their own into `keras.Model`, in front of Keras's.
_TRAINER: Any = next(cls for cls in keras.Model.__mro__ if "train_on_batch" in vars(cls))

# Training
FIT = Hook(
    _TRAINER,
    "fit",
    "Reports a plain model that was wrapped, and should be trained by its tnt.Model.",
)
TRAIN_ON_BATCH = Hook(
    _TRAINER,
    "train_on_batch",
    "Reports a plain model that was wrapped, and should be trained by its tnt.Model.",
)
# Losses and gradients
REDUCE_LOSS = Hook(
    internals.loss_module,
    "reduce_weighted_values",
    "A loss of this rank's samples becomes its contribution to that of the global batch.",
)
REGULARIZE = Hook(
    keras.regularizers.Regularizer,
    "__call__",
    "A sum over the outputs of a layer counts as a sum over the global batch.",
    in_subclasses=True,
)
SCALE_LOSS = Hook(
    internals.BaseOptimizer,
    "scale_loss",
    "The loss is multiplied by this rank's share of the global batch.",
    in_subclasses=True,
)
TAKE_GRADIENTS = Hook(
    tf.GradientTape,
    "gradient",
    "A loss that no optimizer scales, in a user's `train_step`, counts as a mean over samples.",
)
APPLY_GRADIENTS = Hook(
    internals.BaseOptimizer,
    "apply",
    "Gradients are summed over the ranks; also in a user's own training loop.",
    in_subclasses=True,
)
# Metrics
UPDATE_METRIC = Hook(
    keras.metrics.Metric,
    "update_state",
    "Numbers count with this rank's share, and placeholder samples do not count.",
    in_subclasses=True,
)
METRIC_RESULT = Hook(
    keras.metrics.Metric,
    "result",
    "The result is that of the state of all ranks.",
    in_subclasses=True,
)
# State of layers
ASSIGN_VARIABLE = Hook(
    internals.AnyVariable,
    "assign",
    "Notes what layers write, so that it can be combined at the end of the step.",
    in_subclasses=True,
)
INITIALIZE_VARIABLE = Hook(
    internals.AnyVariable,
    "_initialize",
    "A variable that is made in a step starts from the master's value.",
    in_subclasses=True,
)
# Batch normalization, in our steps and in a user's own training loop
SYNCHRONIZED_MOMENTS = Hook(
    internals.backend_nn,
    "_compute_moments_sync",
    "Mean and variance are those of the global batch.",
)
LAYER_MOMENTS = Hook(
    keras.layers.BatchNormalization,
    "_moments",
    "Mean and variance of what a mask does not hide are those of the global batch.",
    in_subclasses=True,
)
# Data and files
READ_GENERATOR = Hook(
    tf.data.Dataset,
    "from_generator",
    "Batches from endless Python code are read epoch by epoch.",
)
PRINT_MESSAGE = Hook(
    internals.io_utils,
    "print_msg",
    "A message names the user's file, not the temporary one that is being written.",
)
GET_FILE = Hook(
    internals.file_utils,
    "get_file",
    "One rank downloads a file; the others find it in the cache.",
)
# Keras's modules for saving also get an `h5py` of ours in place of the real one. A module cannot be
# hooked like a function: `hdf5` does it.
MAKE_FOLDERS = Hook(
    internals.file_utils,
    "makedirs",
    "A folder may be there already, made by another rank.",
)

TABLE = (
    FIT,
    TRAIN_ON_BATCH,
    REDUCE_LOSS,
    REGULARIZE,
    SCALE_LOSS,
    TAKE_GRADIENTS,
    APPLY_GRADIENTS,
    UPDATE_METRIC,
    METRIC_RESULT,
    ASSIGN_VARIABLE,
    INITIALIZE_VARIABLE,
    SYNCHRONIZED_MOMENTS,
    LAYER_MOMENTS,
    READ_GENERATOR,
    PRINT_MESSAGE,
    GET_FILE,
    MAKE_FOLDERS,
)

# What Keras calls within a call of one of these is part of that call, and is left alone.
OUTERMOST_ONLY = (SCALE_LOSS, APPLY_GRADIENTS, METRIC_RESULT)

# What applies in all threads, on several ranks.
_always: dict[Hook, Handler | None] = {}
_handlers: ContextVar[Mapping[Hook, Handler | None]] = ContextVar("handlers", default=_always)
_hooked: WeakSet[Any] = WeakSet()
_installing = Lock()


@contextmanager
def handling(handlers: Mapping[Hook, Handler | None]) -> Iterator[None]:
    """Passes calls in this thread to handlers, for a while.

    Args:
        handlers: For each hook, a function of the plain function and its arguments. It takes the
            place of the handler that holds now. With None, the plain function is called.
    """
    current = _handlers.get()
    new = [hook for hook in handlers if hook not in current]
    if new:
        install(new)
    before = _handlers.set({**current, **handlers})
    try:
        yield
    finally:
        _handlers.reset(before)


@contextmanager
def suspended(*hooks: Hook) -> Iterator[None]:
    """Calls the plain functions in this thread, for a while."""
    before = _handlers.set({**_handlers.get(), **dict.fromkeys(hooks)})
    try:
        yield
    finally:
        _handlers.reset(before)


def has_handler(hook: Hook) -> bool:
    """Whether a hook has a handler in this thread, or has one that is suspended."""
    return hook in _handlers.get()


def handle_always(handlers: Mapping[Hook, Handler]) -> None:
    """Passes calls in all threads to handlers, from now on."""
    _always.update(handlers)
    install(handlers)


def unhooked(function: Any) -> Any:
    """A function without the hook around it, if there is one."""
    return function.__wrapped__ if function in _hooked else function


# Installing


def install(hooks: Iterable[Hook] = TABLE) -> None:
    """Installs hooks; also in classes that were defined since the last time."""
    with _installing:
        for hook in hooks:
            for owner in _owners(hook):
                _install(hook, owner)


def _owners(hook: Hook) -> list[Any]:
    """The module or classes that define what is hooked.

    Raises:
        VersionError: If this Keras has no such function: training would go wrong silently.
    """
    if not hasattr(hook.owner, hook.name):
        raise versions.missing("Keras", f"it has no `{hook}`")
    if not hook.in_subclasses:
        return [hook.owner]
    classes = {hook.owner: None}  # in order
    pending = [hook.owner]
    while pending:
        new = [cls for cls in pending.pop().__subclasses__() if cls not in classes]
        classes.update(dict.fromkeys(new))
        pending.extend(new)
    return [cls for cls in classes if hook.name in vars(cls)]


def _install(hook: Hook, owner: Any) -> None:
    definition = vars(owner)[hook.name]
    if isinstance(definition, _HookedDescriptor) or definition in _hooked:
        return
    if isinstance(owner, ModuleType):
        _replace_everywhere(hook.name, definition, _with_hook(hook, definition))
    elif isinstance(definition, staticmethod):
        if definition.__func__ not in _hooked:
            setattr(owner, hook.name, staticmethod(_with_hook(hook, definition.__func__)))
    elif isinstance(definition, FunctionType):
        setattr(owner, hook.name, _with_hook(hook, definition))
    elif hasattr(definition, "__get__"):
        setattr(owner, hook.name, _HookedDescriptor(hook, definition))


def _replace_everywhere(name: str, definition: Any, function: Any) -> None:
    """Replaces a function of a module, also where others have imported it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is definition:
            setattr(module, name, function)


def _with_hook(hook: Hook, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        handler = _handler(hook)
        if handler is None:
            return function(*args, **kwargs)
        return handler(function, *args, **kwargs)

    _hooked.add(hooked)
    return hooked


class _HookedDescriptor:
    """A method that is not a plain function, such as a `tf.function`."""

    def __init__(self, hook: Hook, definition: Any) -> None:
        self._hook = hook
        self._definition = definition

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        method = self._definition.__get__(instance, owner)
        handler = None if instance is None else _handler(self._hook)
        if handler is None:
            return method

        def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
            return handler(self._call, instance, *args, **kwargs)

        return MethodType(call, instance)

    def _call(self, instance: Any, *args: Any, **kwargs: Any) -> Any:
        return self._definition.__get__(instance, type(instance))(*args, **kwargs)


def _handler(hook: Hook) -> Handler | None:
    return _handlers.get().get(hook)


# Handlers that are not a step's


@contextmanager
def generators_read_with(wrap: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Wraps the Python functions that Keras makes datasets of batches from."""

    def from_generator(plain: Any, begin: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        return plain(wrap(begin), *args, **kwargs)

    with handling({READ_GENERATOR: from_generator}):
        yield


@contextmanager
def messages_about(temporary: str, path: str) -> Iterator[None]:
    """Makes Keras's messages name `path` instead of a temporary file."""

    def print_renamed(plain: Any, message: Any, *args: Any, **kwargs: Any) -> None:
        plain(str(message).replace(temporary, path), *args, **kwargs)

    with handling({PRINT_MESSAGE: print_renamed}):
        yield
