"""Training that is measured: functions of steps, and epochs, as this rank reports them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import keras
import tensorflow as tf

from tarantella.data.batch_size import find_batch_size
from tarantella.internals import keras as internals
from tarantella.keras.callback_agreement import followed_by
from tarantella.runtime import run_report, world
from tarantella.runtime.meter import CALLBACKS, COMPUTE, INPUT, METER, STEPS

_BATCH_SIZE_OF_KERAS = 32  # for arrays, by default

_fits = count(1)


def measured_function(function: Any, model: Any) -> Any:
    """The same function of training steps, measured if the command wants to know."""
    if function is None or isinstance(function, MeasuredFunction):
        return function  # a user's `make_train_function` has made none; or it is measured already
    if not run_report.is_wanted():
        return function
    return MeasuredFunction(function, model)


def stated_batch_size(x: Any, batch_size: int | None) -> int:
    """How many samples a step of one rank has, as far as the arguments of `fit` say; 0: unknown.

    The last batch of an epoch may be smaller.
    """
    if isinstance(x, tf.data.Dataset):
        return find_batch_size(x) or 0
    return (batch_size or _BATCH_SIZE_OF_KERAS) if internals.is_arrays(x) else 0


class MeasuredFunction:
    """A function of training steps that Keras made.

    Args:
        function: The function.
        model: The model that it trains.
    """

    def __init__(self, function: Callable[[Any], Any], model: Any) -> None:
        self._function = function
        self._model = model

    def __call__(self, data: Any) -> Any:
        if world.get_size() > 1 and isinstance(data, tf.data.Iterator):
            # `step_agreement` and `compared_steps` know when data have arrived.
            with METER.part(STEPS):
                return self._function(data)
        with METER.part(COMPUTE):
            results = self._function(data)
            if world.get_size() == 1 and isinstance(data, tf.data.Iterator):
                steps = self._model.steps_per_execution
                METER.note_step(steps * self._model._tnt_batch_size, steps)
        return results


class EpochReports(keras.callbacks.Callback):
    """Reports each epoch to the command, after all other callbacks.

    Args:
        note_steps: Notes the steps that were taken until now.
    """

    def __init__(self, note_steps: Callable[[], None]) -> None:
        super().__init__()
        self._note_steps = note_steps
        self._fit = next(_fits)
        self._steps = METER.totals().steps
        self._began = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._note_steps()
        steps, now = METER.totals().steps, time.monotonic()
        run_report.report_epoch(
            fit=self._fit,
            number=epoch + 1,
            epochs=self.params.get("epochs") or epoch + 1,
            steps=steps - self._steps,
            seconds=now - self._began,
            logs=logs or {},
        )
        self._steps, self._began = steps, now


@contextmanager
def measured_fit(callbacks: Any, note_steps: Callable[[], None] = lambda: None) -> Iterator[Any]:
    """The callbacks of a `fit` that is measured, and its epochs reported.

    Args:
        callbacks: Those of the `fit`, in any form that Keras takes.
        note_steps: Notes the steps that were taken until now, if nothing else does.
    """
    if not run_report.is_wanted():
        yield callbacks
        return
    between_steps = CALLBACKS if world.get_size() == 1 else INPUT
    with METER.part(between_steps), followed_by(callbacks, EpochReports(note_steps)) as followed:
        yield followed
