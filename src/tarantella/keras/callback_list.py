"""The callbacks of one `fit`, `evaluate` or `predict`, run in step with those of other ranks.

All ranks run the same events. The logs they get are those of the global batch, so that most
callbacks decide alike. What a callback may do on one rank alone is settled between the ranks at
the end of an event:

- A wish to stop on one rank stops all, after the same step.
- The learning rates are the master rank's. If weights were set or loaded, those are, too.
- An error on one rank is raised on all.
- What the master rank has written, the others may read.

At each epoch, this costs nothing that one could measure. At each batch the ranks wait for each
other only if one of them has a callback that might do such things there. Otherwise a wish to stop,
of a signal handler for example, is heard one step later, without waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from tarantella.comm import buffers, master_done
from tarantella.comm.agreement import check_same
from tarantella.comm.waiting import barrier, keep_until_done, wait
from tarantella.errors import InputError, MismatchError
from tarantella.graph.phases import end_phase
from tarantella.internals import keras as internals
from tarantella.keras import state
from tarantella.keras.backup import backup_of, tidying
from tarantella.keras.callbacks import aggregates_logs, runs_on_all_ranks, says_where_to_run
from tarantella.runtime import messages, world
from tarantella.runtime.configuration import configuration

_PHASES = ("train", "test", "predict")
_BATCHES = tuple(f"{phase}_batch_{end}" for phase in _PHASES for end in ("begin", "end"))

# Keras's own callbacks that do something at batches, but never to the model.
_ONLOOKERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.TensorBoard,
)


@dataclass(frozen=True)
class Common:
    """What the callbacks of all ranks have in common.

    Attributes:
        alike: Whether all ranks have been given the same kinds of callbacks, in the same order.
        given: Whether any rank has been given a callback.
        reads: The phases in which any of them looks at the logs of a batch.
        acts: The events of batches at which any of them might do something to the model.
        apart: Whether some ranks might do so alone.
        same_paths: The positions of callbacks that write to the same place on several ranks.
        save_freq: How often the master's `BackupAndRestore` is to save, if it has one.
    """

    alike: bool
    given: bool
    reads: frozenset[str]
    acts: frozenset[str]
    apart: bool
    same_paths: frozenset[int]
    save_freq: Any


def agree(callbacks: Sequence[Any], verbose: Any, trains: bool) -> Common:
    """Tells the other ranks about this rank's callbacks; every rank must call it.

    Args:
        callbacks: Those of this rank.
        verbose: What it shows of its progress.
        trains: Whether this is a `fit`.
    """
    shown = [keras.callbacks.ProgbarLogger()] if verbose == 1 else []
    own = (
        [f"{type(callback).__module__}.{type(callback).__qualname__}" for callback in callbacks],
        [
            phase
            for phase in _PHASES
            if any(_reads(each, phase, verbose, trains) for each in [*callbacks, *shown])
        ],
        [event for event in _BATCHES if any(_acts(callback, event) for callback in callbacks)],
        any(_acts_alone(callback) for callback in callbacks),
        [_path(callback) for callback in callbacks],
        getattr(backup_of(callbacks), "save_freq", None),
    )
    communicator = world.communicator("callbacks")
    barrier(communicator)
    everyones = messages.allgather(own, communicator)
    kinds, reads, acts, alone, paths, save_freqs = zip(*everyones, strict=True)
    alike = all(own_kinds == kinds[0] for own_kinds in kinds)
    at_position = list(zip(*paths, strict=True)) if alike else []
    return Common(
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


def _reads(callback: Any, phase: str, verbose: Any, trains: bool) -> bool:
    """Whether a callback looks at the global logs of the batches of a phase."""
    event = f"{phase}_batch_end"
    if not aggregates_logs(callback) or not internals.handles(callback, event):
        return False
    if not _looks_on(callback, event):
        return True
    if isinstance(callback, keras.callbacks.ProgbarLogger):
        return bool(verbose == 1) and not (trains and phase == "test")  # validation is silent
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return bool(callback.save_freq != "epoch")
    if isinstance(callback, keras.callbacks.TensorBoard):
        return bool(callback.update_freq != "epoch")
    return False


def _acts(callback: Any, event: str) -> bool:
    """Whether a callback might do something to the model at an event of batches."""
    return internals.handles(callback, event) and not _looks_on(callback, event)


def _looks_on(callback: Any, event: str) -> bool:
    """Whether what a callback does at an event is what an onlooker of Keras's does there."""
    name = f"on_{event}"
    own = getattr(getattr(callback, name), "__func__", None)
    return any(isinstance(callback, kind) and own is getattr(kind, name) for kind in _ONLOOKERS)


def _acts_alone(callback: Any) -> bool:
    """Whether only the master rank has a callback that might do something at batches."""
    return not runs_on_all_ranks(callback) and any(_acts(callback, event) for event in _BATCHES)


def _path(callback: Any) -> str | None:
    """Where a callback writes, if it is one of Keras's that would do so on each rank."""
    if not runs_on_all_ranks(callback):
        return None
    if isinstance(callback, keras.callbacks.CSVLogger):
        return str(callback.filename)
    if isinstance(callback, keras.callbacks.TensorBoard):
        return str(callback.log_dir)
    return None


def listed(callbacks: Any) -> list[Any]:
    """The callbacks in what was passed to `fit`."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    found = keras.tree.flatten(callbacks) if callbacks else []
    for callback in found:
        if isinstance(callback, type) or not hasattr(callback, "set_model"):
            raise InputError(
                f"`callbacks` has {callback!r} in it, which is no callback. Pass objects such as "
                "`keras.callbacks.EarlyStopping()`."
            )
    return found


@contextmanager
def in_step(
    model: Any, callbacks: Any, *, verbose: Any, add_history: bool = False, **params: Any
) -> Iterator[RankCallbacks]:
    """The callbacks of one `fit`, `evaluate` or `predict`, for as long as that takes.

    Args:
        model: The model they are called for.
        callbacks: What was passed to `fit`: callbacks in any nesting, or a `CallbackList`.
        verbose: What this rank shows.
        add_history: Whether a `History` is added.
        **params: The other parameters that callbacks can see.
    """
    given = listed(callbacks)
    common = agree(given, verbose, trains=add_history)
    ready_made = isinstance(callbacks, keras.callbacks.CallbackList)
    if ready_made:
        params = callbacks.params or params
    with ExitStack() as changes:
        here = [
            placed
            for position, callback in enumerate(given)
            for placed in _placed(callback, position, common, changes)
        ]
        container = RankCallbacks(
            model,
            here,
            common,
            add_history=add_history and not ready_made,
            add_progbar=verbose != 0 and not ready_made,
            params={"verbose": verbose, **params},
        )
        changes.callback(container.let_go)
        yield container


def _placed(callback: Any, position: int, common: Common, changes: ExitStack) -> Iterator[Any]:
    """What stands for a callback on this rank, in the list of those that are called."""
    everywhere = runs_on_all_ranks(callback)
    if isinstance(callback, keras.callbacks.TensorBoard):
        wanted = configuration().tensorboard_on_all_devices and not says_where_to_run(callback)
        if everywhere or wanted:
            if not everywhere or position in common.same_paths:
                changes.enter_context(_folder_of_rank(callback))
            everywhere = True
    elif position in common.same_paths:
        _refuse_own_logs(callback)
        everywhere = False
    elif isinstance(callback, keras.callbacks.ModelCheckpoint) and not aggregates_logs(callback):
        everywhere = False  # on logs of their own, ranks do not agree when to save
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        everywhere = False
        (callback,) = tidying([callback])
    if everywhere or world.is_master_rank():
        yield callback if aggregates_logs(callback) else _WithOwnLogs(callback)
    if not everywhere and common.alike:
        yield _Settling()


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


class _WithOwnLogs:
    """A callback, called with the logs of this rank's part of the data."""

    container: RankCallbacks

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._callback, name)
        if not name.startswith("on_") or internals.is_default(method):
            return method

        def call(*args: Any, **kwargs: Any) -> None:
            *where, logs = (*args, *kwargs.values())
            method(*where, self.container.own_logs(name, logs))

        return call


class _Settling(keras.callbacks.Callback):
    """Stands behind a callback that only the master rank runs: the others wait here for it."""

    container: RankCallbacks

    def _settle(self, *args: Any) -> None:
        self.container.settle()

    on_train_begin = on_train_end = on_epoch_begin = on_epoch_end = _settle
    on_test_begin = on_test_end = on_predict_begin = on_predict_end = _settle


class RankCallbacks(keras.callbacks.CallbackList):
    """The callbacks that this rank runs, in step with those of the others.

    Args:
        model: The model they are called for.
        callbacks: Those of this rank.
        common: What the ranks know of each other's.
        add_history: Whether a `History` is added.
        add_progbar: Whether a `ProgbarLogger` is added.
        params: The parameters that callbacks can see.
    """

    def __init__(
        self,
        model: Any,
        callbacks: Sequence[Any],
        common: Common,
        *,
        add_history: bool,
        add_progbar: bool,
        params: dict[str, Any],
    ) -> None:
        self.common = common
        self._communicator = world.communicator("callbacks")
        self._learning_rates = state.learning_rates(model)
        self._heard: tuple[Any, Any, Any] | None = None
        self._shared_error: Exception | None = None
        self._trains = False
        self._own_training_logs: dict[str, Any] | None = None
        for callback in callbacks:
            if isinstance(callback, (_WithOwnLogs, _Settling)):
                callback.container = self
        self._has_own_logs = any(isinstance(callback, _WithOwnLogs) for callback in callbacks)
        super().__init__(
            list(callbacks),
            add_history=add_history,
            add_progbar=add_progbar,
            model=model,
            **params,
        )

    def let_go(self) -> None:
        """The model is the user's own again."""
        if self._heard is not None:  # an error has ended it
            request, *buffers = self._heard
            keep_until_done(request, buffers)
            self._heard = None
        self.model._tnt_stops.let_go()

    # Events

    def on_train_begin(self, logs: Any = None) -> None:
        self._trains = True
        with self._event():
            super().on_train_begin(logs)

    def on_train_end(self, logs: Any = None) -> None:
        with self._event():
            super().on_train_end(logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._own_training_logs = None
        with self._event():
            super().on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        with self._event():
            super().on_epoch_end(epoch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        if self._trains and self._has_own_logs:
            self._own_training_logs = self.model._own_results()
        with self._event():
            super().on_test_begin(logs)

    def on_test_end(self, logs: Any = None) -> None:
        with self._event():
            super().on_test_end(logs)

    def on_predict_begin(self, logs: Any = None) -> None:
        with self._event():
            super().on_predict_begin(logs)

    def on_predict_end(self, logs: Any = None) -> None:
        with self._event():
            super().on_predict_end(logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        with self._batch_event("train_batch_begin"):
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        with self._batch_event("train_batch_end"):
            super().on_train_batch_end(batch, logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        with self._batch_event("test_batch_begin"):
            super().on_test_batch_begin(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        with self._batch_event("test_batch_end"):
            super().on_test_batch_end(batch, logs)

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        with self._batch_event("predict_batch_begin"):
            super().on_predict_batch_begin(batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        with self._batch_event("predict_batch_end"):
            super().on_predict_batch_end(batch, logs)

    def own_logs(self, event: str, logs: Any) -> Any:
        """The logs of an event, as they are for this rank's part of the data."""
        if not logs or not isinstance(logs, dict):
            return logs
        own = self.model._own_results()
        if event in ("on_epoch_end", "on_train_end") and self._own_training_logs is not None:
            own = {f"val_{name}": value for name, value in own.items()}
            own.update(self._own_training_logs)
        return {name: own.get(name, value) for name, value in logs.items()}

    # What the ranks settle

    @contextmanager
    def _event(self, asks_master: bool = True) -> Iterator[None]:
        self.model._tnt_stops.let_go()  # callbacks see what they have asked for
        try:
            yield
        except Exception as error:
            if error is self._shared_error or isinstance(error, MismatchError):
                raise  # the others have it, too
            master_done.report_failure(error)
            self.settle(error, asks_master)
        self.settle(asks_master=asks_master)

    @contextmanager
    def _batch_event(self, event: str) -> Iterator[None]:
        if event in self.common.acts:
            with self._event(asks_master=self.common.apart):
                yield
        else:
            yield
            in_fit = self._trains and self.common.save_freq is not None
            if event == "train_batch_end" or (event == "test_batch_end" and in_fit):
                self._hear_of_stops()
        if event.endswith("begin"):
            end_phase("between steps", [])

    def settle(self, problem: Exception | None = None, asks_master: bool = True) -> None:
        """Comes to the same state on all ranks, or to the same error; every rank must call it.

        Args:
            problem: Why this rank cannot go on.
            asks_master: Whether the master's learning rates and so on are taken over.
        """
        self._forget_what_was_heard()
        if asks_master:
            check_same(None, "the end of what callbacks do at an event")
        stops = self.model._tnt_stops
        told = np.array(
            [
                problem is not None,
                not self.model._tnt_started,
                *stops.wanted,
                *(self._told_by_master() if asks_master else []),
            ],
            np.float64,
        )
        barrier(self._communicator)
        self._communicator.Allreduce(_in_place(), told)
        failed, differ, *told = told.tolist()
        if failed:
            self._raise_together(problem)
        stops.decide([wanted > 0 for wanted in told[: len(stops.wanted)]])
        if asks_master:
            self._do_as_master(told[len(stops.wanted) :])
        if differ:
            self.model._take_from_master()

    def _told_by_master(self) -> list[float]:
        values = [float(rate) for rate in self._learning_rates]
        return values if world.is_master_rank() else [0.0] * len(values)

    def _do_as_master(self, told: list[float]) -> None:
        if world.is_master_rank():
            return
        for rate, value in zip(self._learning_rates, told, strict=True):
            if float(rate) != value:
                rate.assign(value)

    def _raise_together(self, problem: Exception | None) -> None:
        own = b"" if problem is None else messages.packed_error(problem)
        problems = [each for each in buffers.allgather_bytes(own, self._communicator) if each]
        self._shared_error = problem or messages.unpacked_error(problems[0])
        raise self._shared_error

    # Stopping between events, when no callback could have asked for it

    def _hear_of_stops(self) -> None:
        """Says whether this rank is to stop, and hears what the others said one step before.

        By then they have said so, and nobody waits.
        """
        stops = self.model._tnt_stops
        if self._heard is not None:
            request, _, said = self._heard
            wait(request, "callbacks")
            stops.decide([wanted > 0 for wanted in said])
        own, said = np.array(stops.wanted, np.int32), np.empty(len(stops.wanted), np.int32)
        self._heard = self._communicator.Iallreduce(own, said), own, said

    def _forget_what_was_heard(self) -> None:
        if self._heard is not None:
            wait(self._heard[0], "callbacks")
            self._heard = None


def _in_place() -> Any:
    from mpi4py import MPI

    return MPI.IN_PLACE
