"""The callbacks of one `fit`, `evaluate` or `predict`, run in step with those of other ranks.

All ranks run the same events. The logs are those of the global batch, so most callbacks decide
alike. What a callback may do on one rank alone is synchronized at the end of an event:

- A request to stop on one rank stops all ranks, after the same step.
- All ranks take over the master's learning rates; if weights were set or loaded, those as well.
- An error on one rank is raised on all.
- What the master rank has written, the others may read.

At epochs, this costs nothing measurable. At batches, the ranks wait for each other only if one of
them has a callback that might change the model there. Otherwise a request to stop, from a signal
handler for example, reaches the other ranks one step later, or several short ones, and no rank
waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import keras
import numpy as np

from tarantella.comm import buffers, master_done
from tarantella.comm.agreement import check_same
from tarantella.comm.waiting import barrier, keep_until_done, wait
from tarantella.errors import MismatchError
from tarantella.graph.phases import end_phase
from tarantella.internals import keras as internals
from tarantella.keras import master_weights
from tarantella.keras.callback_agreement import CommonCallbacks
from tarantella.keras.callback_rules import gets_plain_model
from tarantella.keras.tracker_fit import AppendableCallbacks
from tarantella.runtime import messages, times, watch, world
from tarantella.runtime.meter import METER

# However short steps are: a step may suddenly take longer.
_MOST_STEPS_BETWEEN_REQUESTS = 16


class WithOwnLogs:
    """A callback that gets the logs of this rank's micro-batches."""

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


class SynchronizeRanks(keras.callbacks.Callback):
    """Follows a callback that only the master rank runs: the other ranks wait here for it."""

    container: RankCallbacks

    def _synchronize(self, *args: Any) -> None:
        self.container.synchronize()

    on_train_begin = on_train_end = on_epoch_begin = on_epoch_end = _synchronize
    on_test_begin = on_test_end = on_predict_begin = on_predict_end = _synchronize


class RankCallbacks(AppendableCallbacks):
    """The callbacks that this rank runs, in step with those of the other ranks.

    Args:
        model: The model that they are called for.
        callbacks: Those of this rank.
        common: What the ranks know of each other's callbacks.
        add_history: Whether a `History` is added.
        add_progbar: Whether a `ProgbarLogger` is added.
        params: The parameters that callbacks can see.
    """

    def __init__(
        self,
        model: Any,
        callbacks: Sequence[Any],
        common: CommonCallbacks,
        *,
        add_history: bool,
        add_progbar: bool,
        params: dict[str, Any],
    ) -> None:
        self.common = common
        self._communicator = world.communicator("callbacks")
        self._learning_rates = master_weights.learning_rates(model)
        self._pending: tuple[Any, Any, Any] | None = None
        self._steps_between_requests = 1  # the same on all ranks
        self._last_exchange, self._steps_since = monotonic(), 0
        self._shared_error: Exception | None = None
        self._trains = False
        self._own_training_logs: dict[str, Any] | None = None
        for callback in callbacks:
            if isinstance(callback, (WithOwnLogs, SynchronizeRanks)):
                callback.container = self
        self._has_own_logs = any(isinstance(callback, WithOwnLogs) for callback in callbacks)
        super().__init__(
            list(callbacks),
            add_history=add_history,
            add_progbar=add_progbar,
            model=model,
            **params,
        )
        for callback in callbacks:
            if gets_plain_model(callback):
                callback.set_model(model._plain())

    def release_model(self) -> None:
        """Gives the model back to the user."""
        if self._pending is not None:  # an error has ended it
            request, *buffers = self._pending
            keep_until_done(request, buffers)
            self._pending = None
        self.model._tnt_stop_requests.undecide()

    # Events

    def on_train_begin(self, logs: Any = None) -> None:
        self._trains = True
        with self._event():
            super().on_train_begin(logs)

    def on_train_end(self, logs: Any = None) -> None:
        with self._event():
            super().on_train_end(logs)
        METER.note_trained()

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
        watch.note_step(batch + 1)
        with self._batch_event("train_batch_begin"):
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        with self._batch_event("train_batch_end"):
            super().on_train_batch_end(batch, logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        watch.note_step(batch + 1)
        with self._batch_event("test_batch_begin"):
            super().on_test_batch_begin(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        with self._batch_event("test_batch_end"):
            super().on_test_batch_end(batch, logs)

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        watch.note_step(batch + 1)
        with self._batch_event("predict_batch_begin"):
            super().on_predict_batch_begin(batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        with self._batch_event("predict_batch_end"):
            super().on_predict_batch_end(batch, logs)

    def own_logs(self, event: str, logs: Any) -> Any:
        """The logs of an event, computed from this rank's micro-batches alone."""
        if not logs or not isinstance(logs, dict):
            return logs
        own = self.model._own_results()
        if event in ("on_epoch_end", "on_train_end") and self._own_training_logs is not None:
            own = {f"val_{name}": value for name, value in own.items()}
            own.update(self._own_training_logs)
        return {name: own.get(name, value) for name, value in logs.items()}

    # Synchronization at the end of an event

    @contextmanager
    def _event(self, follows_master: bool = True) -> Iterator[None]:
        self.model._tnt_stop_requests.undecide()  # callbacks see their own requests
        with METER.callbacks():
            try:
                yield
            except Exception as error:
                if error is self._shared_error or isinstance(error, MismatchError):
                    raise  # all ranks have it already
                master_done.report_failure(error)
                self.synchronize(error, follows_master)
            self.synchronize(follows_master=follows_master)

    @contextmanager
    def _batch_event(self, event: str) -> Iterator[None]:
        if event in self.common.acts:
            with self._event(follows_master=self.common.apart):
                yield
        else:
            with METER.callbacks():
                yield
            in_fit = self._trains and self.common.save_freq is not None
            if event == "train_batch_end" or (event == "test_batch_end" and in_fit):
                self._exchange_requests()
        if event.endswith("begin"):
            end_phase("between steps", [])

    def synchronize(self, problem: Exception | None = None, follows_master: bool = True) -> None:
        """Brings all ranks to the same state, or to the same error; every rank must call it.

        Args:
            problem: The error that a callback has raised on this rank.
            follows_master: Whether the ranks take over the master's learning rates.
        """
        self._drop_pending_requests()
        if follows_master:
            check_same(None, "the end of an event of callbacks")
        requests = self.model._tnt_stop_requests
        sums = np.array(
            [
                problem is not None,
                not self.model._tnt_has_master_weights,
                *requests.wanted,
                *(self._rates_of_master() if follows_master else []),
            ],
            np.float64,
        )
        barrier(self._communicator)
        self._communicator.Allreduce(_in_place(), sums)
        failed, differ, *others = sums.tolist()
        if failed:
            self._raise_together(problem)
        requests.decide([wanted > 0 for wanted in others[: len(requests.wanted)]])
        if follows_master:
            self._take_rates(others[len(requests.wanted) :])
        if differ:
            self.model._take_from_master()

    def _rates_of_master(self) -> list[float]:
        values = [float(rate) for rate in self._learning_rates]
        return values if world.is_master_rank() else [0.0] * len(values)

    def _take_rates(self, rates: list[float]) -> None:
        if world.is_master_rank():
            return
        for rate, value in zip(self._learning_rates, rates, strict=True):
            if float(rate) != value:
                rate.assign(value)

    def _raise_together(self, problem: Exception | None) -> None:
        own = b"" if problem is None else messages.packed_error(problem)
        problems = [each for each in buffers.allgather_bytes(own, self._communicator) if each]
        self._shared_error = problem or messages.unpacked_error(problems[0])
        raise self._shared_error

    # Requests to stop that do not come from a callback

    def _exchange_requests(self) -> None:
        """Sends this rank's requests, and receives those that all ranks sent the time before.

        By now these have arrived, so no rank waits. All ranks do it after the same steps, as the
        step time of the slowest one says when.
        """
        self._steps_since += 1
        if self._steps_since < self._steps_between_requests:
            return
        requests = self.model._tnt_stop_requests
        if self._pending is not None:
            request, _, sent = self._pending
            wait(request, "callbacks")
            *wanted, step_time = sent.tolist()
            requests.decide([each > 0 for each in wanted])
            self._steps_between_requests = _steps_between_requests(step_time)
        now = monotonic()
        step_time = (now - self._last_exchange) / self._steps_since
        self._last_exchange, self._steps_since = now, 0
        own = np.array([*requests.wanted, step_time], np.float64)
        sent = np.empty_like(own)
        self._pending = self._communicator.Iallreduce(own, sent, _largest()), own, sent

    def _drop_pending_requests(self) -> None:
        if self._pending is not None:
            wait(self._pending[0], "callbacks")
            self._pending = None
        self._steps_between_requests = 1


def _steps_between_requests(step_time: float) -> int:
    """How many steps the ranks take until they exchange requests again.

    Args:
        step_time: How long a step took on the slowest rank; the same number on all ranks.
    """
    shortest = times.TIME_BETWEEN_REQUESTS / _MOST_STEPS_BETWEEN_REQUESTS
    return max(int(times.TIME_BETWEEN_REQUESTS / max(step_time, shortest)), 1)


def _in_place() -> Any:
    from mpi4py import MPI

    return MPI.IN_PLACE


def _largest() -> Any:
    from mpi4py import MPI

    return MPI.MAX
