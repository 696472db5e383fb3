"""Training that was interrupted resumes where it stopped, and ends as if it had never stopped.

Keras's `BackupAndRestore` keeps weights, optimizer and the number of the epoch. That is not
enough: shuffled data would come in another order, an interrupted epoch would start again with
weights from its middle, and callbacks would forget how long they have waited. So a backup also
keeps the step, the metrics of the epoch and the state of random layers on each rank, and the state
of Keras's own callbacks.

To bring the data to the same point, they are read again from the start, without training on them.
For a whole epoch, the first step is enough if Keras reads the data anew in each epoch, in an order
that depends on nothing else.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from tarantella.errors import InputError
from tarantella.internals import keras as internals
from tarantella.keras import callback_state, rank_state
from tarantella.keras.backup_files import Backup, Position
from tarantella.keras.rank_state import RankState
from tarantella.keras.stop_requests import NAMES
from tarantella.keras.tracker_fit import AppendableCallbacks
from tarantella.runtime import world
from tarantella.runtime.failure import Terminated
from tarantella.runtime.log import LOGGER


@contextmanager
def backed_up(
    model: Any,
    inner: keras.callbacks.CallbackList,
    callback: Any | None,
    save_freq: Any,
    restarts_each_epoch: Callable[[], bool],
    initial_epoch: int,
    build: Callable[[], None],
) -> Iterator[keras.callbacks.CallbackList]:
    """The callbacks of a `fit` that is backed up, and resumes where another one stopped.

    Args:
        model: The model that is trained.
        inner: The callbacks that Keras would call.
        callback: The `BackupAndRestore` of this rank.
        save_freq: That of the master's `BackupAndRestore`; None if there is no backup.
        restarts_each_epoch: Whether the data of an epoch depend only on the number of epochs
            before. It looks at every operation, so it is only called if there is a backup.
        initial_epoch: The number of the first epoch.
        build: Makes the variables of a model that has not seen data yet.
    """
    if save_freq is None:
        yield inner
        return
    backup = Backup(callback if world.is_master_rank() else None, model, build)
    container = ResumingCallbacks(
        model, inner, backup, save_freq, restarts_each_epoch(), initial_epoch
    )
    try:
        with _sigterm_requests_end(model):
            yield container
    finally:
        container.release_model()


@contextmanager
def _sigterm_requests_end(model: Any) -> Iterator[None]:
    """Makes SIGTERM request the end of training, unless the script handles it."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def request(*_: object) -> None:
        model._tnt_stop_requests.want("leave", True)

    signal.signal(signal.SIGTERM, request)
    came = False
    try:
        yield
        came = model._tnt_stop_requests.wants("leave")
    finally:
        model._tnt_stop_requests.want("leave", False)
        if signal.getsignal(signal.SIGTERM) is request:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if came:  # after the last step
        signal.raise_signal(signal.SIGTERM)


class ResumingCallbacks(AppendableCallbacks):
    """Callbacks that are not called for what was trained before, and are followed by a backup.

    Args:
        model: The model that is trained.
        inner: The callbacks.
        backup: The backup.
        save_freq: "epoch", or the number of steps from one backup to the next.
        restarts_each_epoch: Whether reading the first step of an epoch is enough to skip it.
        initial_epoch: The number of the first epoch.
    """

    def __init__(
        self,
        model: Any,
        inner: keras.callbacks.CallbackList,
        backup: Backup,
        save_freq: Any,
        restarts_each_epoch: bool,
        initial_epoch: int,
    ) -> None:
        super().__init__([], model=model)
        self.callbacks, self.params = inner.callbacks, inner.params
        self._inner = inner
        self._backup = backup
        self._save_freq = save_freq
        self._restarts_each_epoch = restarts_each_epoch
        self._initial_epoch = initial_epoch
        self._epoch = 0
        self._done = 0  # steps of this epoch
        self._unsaved = 0  # steps since the last backup
        self._train: Any = None
        self._found: Position | None = None  # where it stopped, until training is there again
        self._has_callback_state = True  # whether callbacks have the state that they had
        self._has_trained = False  # whether the variables that training makes are there
        self._logs: Any = None  # of the last step
        self._own: RankState | None = None  # while validation overwrites it

    def release_model(self) -> None:
        """Gives the model back to the user."""
        self._train_again()
        self.model._tnt_stop_requests.undecide()

    # Events

    def on_train_begin(self, logs: Any = None) -> None:
        found = self._backup.read()
        if found is not None and self._backup.callback is not None:
            callback_state.append_to_logs(self._inner.callbacks)
        self._inner.on_train_begin(logs)
        if found is None:
            return
        if (found.epoch, found.step) <= (self._initial_epoch, 0):
            self._backup.build_optimizer()
            self._backup.restore(found)
        self._found, self._has_callback_state = found, False
        self._unsaved = found.unsaved
        self._train = self.model.train_function

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._done = epoch, 0
        if self._found is not None and epoch < self._found.epoch:
            self._read_with(self._skip_step)
            return
        self._restore_callbacks()
        if self._found is not None and epoch == self._found.epoch and self._found.step:
            self._read_with(self._reread_step)
        else:
            self._resume()
        self._inner.on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._found is None:
            self._inner.on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before, self._done = self._done, batch + 1
        if self._found is not None:
            self._leave_unsaved_if_asked()
            if (self._epoch, self._done) == (self._found.epoch, self._found.step):
                self._backup.restore_own(self._found)
                if self._found.stopped:
                    self._stop()
                self._resume()
            return
        self._inner.on_train_batch_end(batch, logs)
        self._logs = logs
        self._unsaved += self._done - before
        self._leave_if_asked(self._epoch, self._done)
        if self._save_freq != "epoch" and self._unsaved >= self._save_freq:
            self._unsaved = 0
            self._save(self._epoch, self._done)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._found is not None:
            self._end_of_skipped_epoch(epoch, self._found)
            return
        self._inner.on_epoch_end(epoch, logs)
        self._leave_if_asked(epoch + 1, 0)
        if self._save_freq == "epoch":
            self._save(epoch + 1, 0)

    def on_train_end(self, logs: Any = None) -> None:
        self._restore_callbacks()
        self._resume()
        self._inner.on_train_end(logs)

    def on_test_begin(self, logs: Any = None) -> None:
        self._inner.on_test_begin(logs)
        self._leave_if_asked(self._epoch, self._done)
        self._own = rank_state.of_this_rank(self.model)

    def on_test_end(self, logs: Any = None) -> None:
        self._own = None
        self._inner.on_test_end(logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._inner.on_test_batch_begin(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._inner.on_test_batch_end(batch, logs)
        self._leave_if_asked(self._epoch, self._done)

    # Backups

    def _save(self, epoch: int, step: int) -> None:
        position = Position(
            epoch,
            step,
            self._unsaved,
            stopped=bool(self.model.stop_training),
            logs=dict(internals.python_logs(self._logs or {})) if step else {},
        )
        if self._backup.callback is not None:
            callback_state.record(self._inner.callbacks, position)
        self._backup.save(position, self._own or rank_state.of_this_rank(self.model))

    def _leave_if_asked(self, epoch: int, step: int) -> None:
        if not self.model._tnt_stop_requests.get("leave"):
            return
        self._save(epoch, step)
        done = f"step {step} of epoch {epoch + 1}" if step else f"epoch {epoch}"
        folder = getattr(self._backup.callback, "backup_dir", "")
        LOGGER.warning("Stopped by SIGTERM: the training is saved in %s, after %s.",
                       folder, done)  # fmt: skip
        raise Terminated("it received SIGTERM and saved the training")

    def _leave_unsaved_if_asked(self) -> None:
        """Exits at once, without the other ranks: the backup has all that was trained."""
        if self.model._tnt_stop_requests.wants("leave"):
            raise Terminated("it received SIGTERM before it resumed from a backup")

    def _stop(self) -> None:
        self.model._tnt_stop_requests.decide([name == "stop_training" for name in NAMES])

    # Skipping what was trained before

    def _restore_callbacks(self) -> None:
        """Gives callbacks the state that they had, once."""
        if self._found is not None and not self._has_callback_state:
            callback_state.restore(self._inner.callbacks, self._found)
            self._has_callback_state = True

    def _skip_step(self, iterator: Any) -> dict[str, Any]:
        """Replaces the step that Keras runs, in an epoch that was trained to its end."""
        if self._done == 0 or not self._restarts_each_epoch:
            self._read(iterator)
        return {}

    def _reread_step(self, iterator: Any) -> dict[str, Any]:
        """Replaces the step that Keras runs, up to the step where training stopped."""
        assert self._found is not None
        self._read(iterator)
        return self._found.logs

    def _read(self, iterator: Any) -> None:
        """Reads the data of a step.

        The first time, the model is trained: that makes the variables of optimizers and metrics.
        Then these are restored.
        """
        assert self._found is not None
        if self._has_trained:
            _read(iterator, self.model.steps_per_execution)
            return
        self.model._tnt_passes_over = False
        self._train(iterator)
        self.model._tnt_passes_over = True
        self._has_trained = True
        self._backup.restore(self._found)

    def _end_of_skipped_epoch(self, epoch: int, found: Position) -> None:
        self._leave_unsaved_if_asked()
        if epoch == found.epoch:
            raise InputError(
                f"The data have {self._done} steps in an epoch, but the backup was made after "
                f"step {found.step}: resume with the same data, or remove the backup."
            )
        if epoch == found.epoch - 1 and found.stopped and not found.step:
            self._stop()

    def _read_with(self, function: Any) -> None:
        """Makes Keras call a function that reads data but does not train."""
        self.model.train_function = function
        self.model._tnt_passes_over = True

    def _resume(self) -> None:
        self._found = None
        self._train_again()

    def _train_again(self) -> None:
        if self._train is not None:
            self.model.train_function, self._train = self._train, None
        self.model._tnt_passes_over = False


def _read(iterator: Any, steps: int) -> None:
    for step in range(steps):
        if not iterator.get_next_as_optional().has_value():
            if step == 0:
                raise StopIteration
            return
