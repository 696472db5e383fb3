"""Trackers that put a `fit` of their own in front of Keras's, to add a callback of theirs.

MLflow's `autolog` does this, and Comet if it is imported before Keras. Such a `fit` looks through
the callbacks and appends one, so ours behave like a list. It is called on the master rank only, so
that the tracker has one run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from tarantella.runtime import world
from tarantella.runtime.configuration import configuration


def is_called() -> bool:
    """Whether this rank calls a `fit` that a tracker has put into `keras.Model`."""
    wanted = world.is_master_rank() or configuration().trackers_on_all_devices
    return wanted and "fit" in vars(keras.Model)


class AppendableCallbacks(keras.callbacks.CallbackList):
    """Callbacks that can be looked through and appended to, after they know their model."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.callbacks)

    def append(self, callback: Any) -> None:
        callback.set_params(self.params)
        callback.set_model(self.model)
        self.callbacks.append(callback)
