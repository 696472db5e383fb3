"""Keras callbacks on several ranks: which ranks run one, and which logs it gets."""

from __future__ import annotations

from typing import Any

import keras

from tarantella.errors import InputError

# Keras's own callbacks that only write or send something. One rank is enough for that.
_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("CSVLogger", "OrbaxCheckpoint", "RemoteMonitor", "TensorBoard")
    if hasattr(keras.callbacks, name)
)


class Callback(keras.callbacks.Callback):
    """Says where a callback runs, and with which logs.

    Without it, callbacks run on all ranks with the logs of the global batch, so that all ranks
    come to the same decisions; those of Keras that only write (`CSVLogger`, `TensorBoard`,
    `RemoteMonitor`) run on the master rank.

    What comes back is a callback of the class of the one passed in, and both are one in all they
    hold.

    Args:
        callback: A Keras callback.
        aggregate_logs: Whether it gets the logs of the global batch. Otherwise it gets those of
            the rank's own part, which differ between the ranks.
        run_on_all_ranks: Whether all ranks run it, and not only the master rank. Where it writes a
            file, give each rank a path of its own.

    Example:

    ```python
    import keras
    import numpy as np
    import tarantella as tnt

    model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile(optimizer="sgd", loss="mse")
    own_loss = keras.callbacks.CSVLogger(f"rank-{tnt.get_rank()}.csv")
    say = keras.callbacks.LambdaCallback(on_train_end=lambda logs: print("trained"))
    model.fit(
        np.ones((64, 4)),
        np.ones((64, 1)),
        callbacks=[
            tnt.keras.callbacks.Callback(own_loss, aggregate_logs=False),
            tnt.keras.callbacks.Callback(say, run_on_all_ranks=False),
        ],
    )
    ```
    """

    _tnt_aggregate_logs: bool
    _tnt_run_on_all_ranks: bool

    def __new__(
        cls, callback: Any, aggregate_logs: bool = True, run_on_all_ranks: bool = True
    ) -> Any:
        return _with_settings(
            callback,
            _tnt_aggregate_logs=aggregate_logs,
            _tnt_run_on_all_ranks=run_on_all_ranks,
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Leaves everything as it is in the callback that was passed in."""


def aggregates_logs(callback: Any) -> bool:
    """Whether a callback gets the logs of the global batch."""
    return getattr(callback, "_tnt_aggregate_logs", True)


def runs_on_all_ranks(callback: Any) -> bool:
    """Whether all ranks run a callback, and not only the master rank."""
    default = not isinstance(callback, _WRITERS)
    return getattr(callback, "_tnt_run_on_all_ranks", default)


def says_where_to_run(callback: Any) -> bool:
    """Whether the user has said for this one callback which ranks run it."""
    return hasattr(callback, "_tnt_run_on_all_ranks")


def _with_settings(callback: Any, **settings: bool) -> Any:
    if isinstance(callback, type) or not isinstance(callback, keras.callbacks.Callback):
        named = callback.__name__ if isinstance(callback, type) else type(callback).__name__
        raise InputError(
            f"tnt.keras.callbacks.Callback takes a Keras callback, not {named}. Make one first: "
            "`tnt.keras.callbacks.Callback(keras.callbacks.EarlyStopping(), "
            "aggregate_logs=False)`."
        )
    if isinstance(callback, keras.callbacks.CallbackList):
        raise InputError(
            "tnt.keras.callbacks.Callback takes a single callback, not a CallbackList: wrap those "
            "in the list one by one."
        )
    for name, value in settings.items():
        if not isinstance(value, bool):
            raise InputError(f"{name.removeprefix('_tnt_')} is {value!r}; it can be True or False.")
    if isinstance(callback, Callback):
        marked: Any = callback
    else:
        marked = object.__new__(_marked_class(type(callback)))
        # Not a copy: what one of them learns while it runs, the other knows.
        object.__setattr__(marked, "__dict__", vars(callback))
    for name, value in settings.items():
        setattr(marked, name, value)
    return marked


_marked_classes: dict[Any, Any] = {}


def _marked_class(plain: Any) -> Any:
    """The class of the callbacks that are a Callback of ours and a `plain` one."""
    if plain not in _marked_classes:
        _marked_classes[plain] = type(
            plain.__name__,
            (Callback, plain),
            {"__module__": plain.__module__, "__doc__": plain.__doc__},
        )
    return _marked_classes[plain]
