"""What a backup keeps of callbacks: Keras's own resume where they stopped.

`callback_rules` says which, and `internals.keras` which of their attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tarantella.internals import keras as internals
from tarantella.keras.backup_files import Position
from tarantella.keras.callback_rules import Rule, rules_for
from tarantella.keras.rank_state import as_stored
from tarantella.runtime import world


def record(callbacks: Sequence[Any], position: Position) -> None:
    """Adds the state of callbacks to a position."""
    for name, callback, rule in _with_state(callbacks):
        state = internals.callback_state(callback, rule.callback)
        if state is not None:
            position.add(name, state.pop(rule.weights, None) or [])
            position.callbacks[name] = state
    for number, logger in enumerate(_csv_loggers(callbacks)):
        position.callbacks[f"CSVLogger{number}"] = {"size": internals.csv_size(logger)}


def restore(callbacks: Sequence[Any], position: Position) -> None:
    """Gives callbacks the state that they had at a position."""
    for name, callback, rule in _with_state(callbacks):
        kept = position.callbacks.get(name)
        if kept is None or internals.callback_state(callback, rule.callback) is None:
            continue
        for attribute in rule.state:
            if attribute in kept:
                setattr(callback, attribute, kept[attribute])
        if getattr(callback, "restore_best_weights", False) and (best := position.numbered(name)):
            weights = [
                as_stored(value, weight)
                for value, weight in zip(best, callback.model.weights, strict=True)
            ]
            setattr(callback, rule.weights, weights)
    if world.is_master_rank():
        for number, logger in enumerate(_csv_loggers(callbacks)):
            size = position.callbacks.get(f"CSVLogger{number}", {}).get("size")
            if size is not None:
                internals.shorten_csv(logger, size)


def append_to_logs(callbacks: Sequence[Any]) -> None:
    """Keeps the epochs before the interruption in log files."""
    for logger in _csv_loggers(callbacks):
        logger.append = True


def _with_state(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any, Rule]]:
    """The callbacks with state, each with a name and its rule."""
    counts: dict[str, int] = {}
    for callback in callbacks:
        for rule in rules_for(callback):
            if rule.state:
                counts[rule.callback] = counts.get(rule.callback, 0) + 1
                yield f"{rule.callback}{counts[rule.callback]}", callback, rule


def _csv_loggers(callbacks: Sequence[Any]) -> list[Any]:
    return [each for each in callbacks if isinstance(each, keras.callbacks.CSVLogger)]
