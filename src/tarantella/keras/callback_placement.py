"""Which of the callbacks that were passed to `fit` this rank runs, and how."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from tarantella.errors import InputError
from tarantella.keras.callback_agreement import CommonCallbacks, agree, listed
from tarantella.keras.callback_list import RankCallbacks, SynchronizeRanks, WithOwnLogs
from tarantella.keras.callback_rules import (
    aggregates_logs,
    master_decides,
    needs_folder_per_rank,
    runs_on_all_ranks,
    stand_in_for,
    user_chose_ranks,
)
from tarantella.runtime import world
from tarantella.runtime.configuration import configuration


@contextmanager
def in_step(
    model: Any, callbacks: Any, *, verbose: Any, add_history: bool = False, **params: Any
) -> Iterator[RankCallbacks]:
    """The callbacks of one `fit`, `evaluate` or `predict`, for as long as that takes.

    Args:
        model: The model that they are called for.
        callbacks: What was passed to `fit`: callbacks in any nesting, or a `CallbackList`.
        verbose: What this rank shows of its progress.
        add_history: Whether a `History` is added.
        **params: Further parameters that callbacks can see.
    """
    given = listed(callbacks)
    common = agree(given, verbose, trains=add_history)
    ready_made = isinstance(callbacks, keras.callbacks.CallbackList)
    if ready_made:
        params = callbacks.params or params
    with ExitStack() as changes:
        here = [
            run
            for position, callback in enumerate(given)
            for run in _run_here(callback, position, common, changes)
        ]
        container = RankCallbacks(
            model,
            here,
            common,
            add_history=add_history and not ready_made,
            add_progbar=verbose != 0 and not ready_made,
            params={"verbose": verbose, **params},
        )
        changes.callback(container.release_model)
        yield container


def _run_here(
    callback: Any, position: int, common: CommonCallbacks, changes: ExitStack
) -> Iterator[Any]:
    """What this rank runs for a callback that was passed to `fit`.

    Args:
        callback: The callback.
        position: Its position among those that were passed.
        common: What the ranks know of each other's callbacks.
        changes: Undoes changes to the callback at the end.
    """
    everywhere = runs_on_all_ranks(callback)
    if needs_folder_per_rank(callback):
        wanted = configuration().tensorboard_on_all_devices and not user_chose_ranks(callback)
        if everywhere or wanted:
            if not everywhere or position in common.same_paths:
                changes.enter_context(_folder_of_rank(callback))
            everywhere = True
    elif position in common.same_paths:
        _refuse_own_logs(callback)
        everywhere = False
    elif master_decides(callback):
        everywhere = False
    stand_in = stand_in_for(callback)
    if stand_in is not None:
        callback, everywhere = stand_in, False
    if everywhere or world.is_master_rank():
        yield callback if aggregates_logs(callback) else WithOwnLogs(callback)
    if not everywhere and common.alike:
        yield SynchronizeRanks()


def _refuse_own_logs(callback: Any) -> None:
    if not aggregates_logs(callback):
        raise InputError(
            f"Several ranks would write their own logs to {callback.filename!r}: give each rank "
            "a file of its own, as in `keras.callbacks.CSVLogger(f'log-{tnt.get_rank()}.csv')`."
        )


@contextmanager
def _folder_of_rank(tensorboard: Any) -> Iterator[None]:
    common_folder = tensorboard.log_dir
    tensorboard.log_dir = f"{common_folder}/rank_{world.get_rank()}"  # it may be a URL
    try:
        yield
    finally:
        tensorboard.log_dir = common_folder
