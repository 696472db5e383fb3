"""What the ranks tell each other about their callbacks before they run them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras

from tarantella.comm.waiting import barrier
from tarantella.errors import InputError
from tarantella.keras import tracker_fit
from tarantella.keras.backup_files import backup_callback
from tarantella.keras.callback_rules import (
    Phase,
    kind,
    may_change_model,
    reads_batch_logs,
    runs_on_all_ranks,
    written_path,
)
from tarantella.runtime import messages, trackers, world
from tarantella.runtime.configuration import configuration
from tarantella.runtime.log import LOGGER

_PHASES = ("train", "test", "predict")
_warned_of: set[str] = set()
_BATCH_EVENTS = tuple(f"{phase}_batch_{end}" for phase in _PHASES for end in ("begin", "end"))


@dataclass(frozen=True)
class CommonCallbacks:
    """What the ranks know of each other's callbacks.

    Attributes:
        alike: Whether all ranks have the same kinds of callbacks, in the same order.
        given: Whether any rank has a callback.
        reads: The phases in which one of them reads the logs of batches.
        acts: The events of batches at which one of them might change the model.
        apart: Whether some ranks might do so alone.
        same_paths: The positions of callbacks that write to the same path on several ranks.
        save_freq: How often the master's `BackupAndRestore` saves; None without one.
    """

    alike: bool
    given: bool
    reads: frozenset[str]
    acts: frozenset[str]
    apart: bool
    same_paths: frozenset[int]
    save_freq: Any


def agree(callbacks: Sequence[Any], verbose: Any, trains: bool) -> CommonCallbacks:
    """Tells the other ranks about this rank's callbacks; every rank must call it.

    Args:
        callbacks: Those of this rank.
        verbose: What this rank shows of its progress.
        trains: Whether this is a `fit`.
    """
    shown = [keras.callbacks.ProgbarLogger()] if verbose == 1 else []
    phases = [Phase(name, verbose, trains) for name in _PHASES]
    own = (
        [kind(callback) for callback in callbacks],
        [
            phase.name
            for phase in phases
            if (trains and tracker_fit.is_called())
            or any(reads_batch_logs(callback, phase) for callback in [*callbacks, *shown])
        ],
        [
            event
            for event in _BATCH_EVENTS
            if any(may_change_model(callback, event) for callback in callbacks)
        ],
        any(_acts_alone(callback) for callback in callbacks),
        [written_path(callback) for callback in callbacks],
        getattr(backup_callback(callbacks), "save_freq", None),
        trackers.open_runs(),
    )
    communicator = world.communicator("callbacks")
    barrier(communicator)
    everyones = messages.allgather(own, communicator)
    kinds, reads, acts, alone, paths, save_freqs, runs = zip(*everyones, strict=True)
    _warn_of_several_runs(runs)
    alike = all(own_kinds == kinds[0] for own_kinds in kinds)
    at_position = list(zip(*paths, strict=True)) if alike else []
    return CommonCallbacks(
        alike=alike,
        given=any(kinds),
        reads=frozenset().union(*reads),
        acts=frozenset().union(*acts),
        apart=not alike or any(alone),
        same_paths=frozenset(
            position
            for position, used in enumerate(at_position)
            if used[0] is not None and len(set(used)) < len(used)
        ),
        save_freq=save_freqs[world.get_master_rank()],
    )


def _warn_of_several_runs(runs: Sequence[list[str]]) -> None:
    """Warns, once for each tracker, if several ranks have a run of it."""
    if configuration().trackers_on_all_devices:
        return
    for package in {package for of_rank in runs for package in of_rank} - _warned_of:
        ranks = sum(package in of_rank for of_rank in runs)
        if ranks > 1:
            _warned_of.add(package)
            LOGGER.warning(trackers.warning_of_several_runs(package, ranks))


def _acts_alone(callback: Any) -> bool:
    """Whether a callback that only the master rank runs might change the model at batches."""
    return not runs_on_all_ranks(callback) and any(
        may_change_model(callback, event) for event in _BATCH_EVENTS
    )


def listed(callbacks: Any) -> list[Any]:
    """The callbacks in what was passed to `fit`."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    found = keras.tree.flatten(callbacks) if callbacks else []
    for callback in found:
        if isinstance(callback, type) or not hasattr(callback, "set_model"):
            raise InputError(
                f"`callbacks` contains {callback!r}, which is not a callback. Pass objects such "
                "as `keras.callbacks.EarlyStopping()`."
            )
    return found


@contextmanager
def followed_by(callbacks: Any, last: Any) -> Iterator[Any]:
    """Callbacks, in any form that Keras takes, with one more after them."""
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        yield [*listed(callbacks), last]
        return
    last.set_params(callbacks.params)
    callbacks.callbacks.append(last)
    try:
        yield callbacks
    finally:
        callbacks.callbacks.remove(last)
