"""`tnt.keras.callbacks.Callback` sets which ranks run a callback, and which logs it gets.

Without it, `callback_rules` decides.
"""

from __future__ import annotations

from typing import Any

import keras

from tarantella.errors import InputError


class Callback(keras.callbacks.Callback):
    """Chooses which ranks run a callback, and which logs it gets.

    By default, callbacks run on all ranks with the logs of the global batch, so all ranks make the
    same decisions. Keras callbacks that only write (`CSVLogger`, `TensorBoard`, `RemoteMonitor`),
    and those of Weights & Biases, MLflow and Comet, run only on the master rank.

    Returns a callback of the same class, which shares its state with the one passed in.

    Args:
        callback (Keras callback): The callback.
        aggregate_logs: If True, the callback gets the logs of the global batch; if False, those of
            the rank's own micro-batch, which differ between the ranks.
        run_on_all_ranks: If True, all ranks run the callback; if False, only the master rank. If
            the callback writes a file on all ranks, give each rank its own path.

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
        """Changes nothing: the attributes are those of the callback that was passed in."""


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
            "tnt.keras.callbacks.Callback takes a single callback, not a CallbackList: wrap the "
            "callbacks in the list one by one."
        )
    for name, value in settings.items():
        if not isinstance(value, bool):
            raise InputError(
                f"{name.removeprefix('_tnt_')} is {value!r}; it must be True or False."
            )
    if isinstance(callback, Callback):
        configured: Any = callback
    else:
        configured = object.__new__(_configured_class(type(callback)))
        # Not a copy: they share what they learn while they run.
        object.__setattr__(configured, "__dict__", vars(callback))
    for name, value in settings.items():
        setattr(configured, name, value)
    return configured


_configured_classes: dict[Any, Any] = {}


def _configured_class(plain: Any) -> Any:
    """The class of callbacks that are both a `Callback` and a `plain` one."""
    if plain not in _configured_classes:
        _configured_classes[plain] = type(
            plain.__name__,
            (Callback, plain),
            {"__module__": plain.__module__, "__doc__": plain.__doc__},
        )
    return _configured_classes[plain]
