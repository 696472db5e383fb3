"""The steps of a model on several ranks: training, evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import keras
import tensorflow as tf

from tarantella.data.micro_batch import MicroBatch
from tarantella.errors import InputError
from tarantella.graph.engine import channel
from tarantella.graph.phases import end_phase
from tarantella.internals import keras as internals
from tarantella.keras import (
    compiled_step,
    custom_loop,
    hooks,
    master_weights,
    normalization,
    one_sum_step,
    prediction,
)
from tarantella.keras.advice import Advice
from tarantella.keras.batch_reductions import BatchGraph
from tarantella.keras.compared_steps import ComparedFunction, ComparedSteps, compared_function
from tarantella.keras.compiled_call import call_compiled
from tarantella.keras.compiled_step import CompiledStep, RefusedStep
from tarantella.keras.layer_state import LayerState
from tarantella.keras.measured import measured_function
from tarantella.keras.metrics import global_results
from tarantella.keras.step import Step, current
from tarantella.keras.stop_requests import StopsOnAllRanks
from tarantella.runtime import world
from tarantella.runtime.meter import METER

_UNSEEN_UPDATE = (
    "Gradients were not summed over the ranks: the optimizer updates the weights without a call of "
    "Keras's `apply` that Tarantella can see, perhaps by a method that was taken from it before "
    "`tnt.Model(model)`. Override `apply` in a subclass, and call Keras's from it."
)


@dataclass(frozen=True)
class StepKind:
    """How a training step communicates: the same on all ranks.

    Attributes:
        is_compiled: Whether XLA compiles it, unless it needs a sum in the middle.
        has_one_sum: Otherwise, whether all is summed together.
    """

    is_compiled: bool
    has_one_sum: bool


class _Replaceable:
    """A step that wraps one that the user gives a model, as in `model.train_step = step`.

    On whole batches it is the step of the class, which the user's may call.
    """

    def __init__(self, step: Callable[[Any, Any], Any]) -> None:
        self._step = step

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        if model is None:
            return self._step
        if world.get_size() == 1 and self._name in vars(model):
            return vars(model)[self._name]
        return MethodType(self._step, model)

    def __set__(self, model: Any, step: Any) -> None:
        vars(model)[self._name] = step

    def __delete__(self, model: Any) -> None:
        del vars(model)[self._name]


class RankSteps(StopsOnAllRanks, keras.Model):
    """What a model does differently on several ranks, around what its own class does.

    It comes before the class of the user's model: the user's `train_step` is called from here, on
    this rank's micro-batch. `Model`, with `fit` and so on, comes after that class: a user's `fit`
    calls it as it would call Keras's.
    """

    jit_compile: Any
    train_function: Any
    test_function: Any
    predict_function: Any
    _tnt_advice: Advice
    _tnt_steps: dict[str, ComparedSteps]
    _tnt_compiles_calls: bool
    _tnt_takes_gradients: bool  # of compiled calls
    _tnt_batch_logs: frozenset[str]
    _tnt_new_variables: master_weights.NewVariables
    _tnt_step_kinds: dict[tuple[str, bool], StepKind]
    _tnt_seen_optimizer: int  # the last one whose update was seen
    _tnt_traces_alike: bool  # all ranks have all variables of a step, or none has
    _tnt_called: set[tuple[str, bool]]  # functions of steps, with and without logs of batches
    _tnt_passes_over: bool  # whether an epoch was trained before, and only its data are read

    @_Replaceable
    def train_step(self, data: Any) -> Any:
        data = self._tnt_steps["train"].begin(data)
        if not isinstance(data, MicroBatch):
            return super().train_step(data)
        step_on = vars(self).get("train_step", super().train_step)
        if not tf.executing_eagerly():
            METER.note_tracing()
        end_phase("input", data.data)
        kind = self._kind_of_step()
        compiled = self._compiled_step(data, step_on) if kind.is_compiled else None
        if isinstance(compiled, CompiledStep):
            self._advise_on_statistics(compiled.step)
            # Keras's own step returns the results of metrics.
            return self._own_logs() if compiled.results is None else compiled.results
        written = [] if compiled is None else compiled.written
        with (
            self._tnt_new_variables.shared(self),
            self._compiled_calls(self._can_be_compiled(), for_gradients=True),
        ):
            step, logs = self._step(data, step_on, written, kind.has_one_sum)
        self._advise_on_statistics(step)
        return logs

    def _kind_of_step(self) -> StepKind:
        """How the step that is being traced communicates.

        The first call of a function of steps decides; if TensorFlow traces it twice, since it made
        variables, the second time. Later, each rank is traced again for shapes of its own, and has
        to communicate like those that are not.
        """
        function = ("train", self._needs_batch_logs("train"))
        if function not in self._tnt_called or function not in self._tnt_step_kinds:
            self._tnt_step_kinds[function] = self._possible_kind_of_step()
        return self._tnt_step_kinds[function]

    def _possible_kind_of_step(self) -> StepKind:
        # Without all variables, TensorFlow traces the step again.
        has_state = self._tnt_traces_alike and internals.has_training_state(self)
        if self._overrides_step_methods or not has_state:
            return StepKind(is_compiled=False, has_one_sum=False)
        return StepKind(
            is_compiled=bool(self.jit_compile) and self._can_be_compiled(),
            has_one_sum=one_sum_step.is_possible(self),
        )

    def _step(
        self,
        data: MicroBatch,
        step_on: Callable[[Any], Any],
        written: Sequence[Any],
        has_one_sum: bool,
    ) -> tuple[Step, Any]:
        """Takes a step, and returns it with its logs."""
        needs_logs = self._needs_batch_logs("train")
        step: Step
        if has_one_sum:
            results = self._own_logs if needs_logs else None
            step, logs = one_sum_step.take(self, data, step_on, results, written)
            logs = self._own_logs() if logs is None else logs
        else:
            step = Step(self, data, needs_logs)
            step.layer_state.note_written(written)
            with step.running():
                logs = step.metrics.global_logs(step_on(data.data))
        self._require_seen_update(step)
        return step, logs

    def _require_seen_update(self, step: Step) -> None:
        """Makes sure that gradients were summed over the ranks."""
        if step.has_trained:
            self._tnt_seen_optimizer = id(self.optimizer)
        # A function of the user's that was traced before is not traced again.
        was_seen = self._tnt_seen_optimizer == id(self.optimizer)
        if not (was_seen or self._overrides_step_methods) and self.trainable_weights:
            raise InputError(_UNSEEN_UPDATE)

    def _compiled_step(
        self, data: MicroBatch, step_on: Callable[[Any], Any]
    ) -> CompiledStep | RefusedStep:
        """Takes a step of Keras that XLA compiles."""
        with self._tnt_new_variables.shared(self):
            results = self._own_logs if self._needs_batch_logs("train") else None
            return compiled_step.take(self, data, step_on, results)

    def _advise_on_statistics(self, step: Step) -> None:
        self._tnt_advice.layers_used_own_statistics(
            normalization.local_layers(self, step.layer_state.written)
        )

    @_Replaceable
    def test_step(self, data: Any) -> Any:
        data = self._tnt_steps["test"].begin(data)
        if not isinstance(data, MicroBatch):
            return super().test_step(data)
        step_on = vars(self).get("test_step", super().test_step)
        end_phase("input", data.data)
        step = Step(self, data, self._needs_batch_logs("test"))
        with self._tnt_new_variables.shared(self), self._compiled_calls(), step.running():
            logs = step.metrics.global_logs(step_on(data.data))
        end_phase("evaluation", logs)
        return logs

    @_Replaceable
    def predict_step(self, data: Any) -> Any:
        data = self._tnt_steps["predict"].begin(data)
        if not isinstance(data, MicroBatch):
            return super().predict_step(data)
        step_on = vars(self).get("predict_step", super().predict_step)
        end_phase("input", data.data)
        layer_state = LayerState(self, data, BatchGraph.of(data.data).is_fixed)
        with self._tnt_new_variables.shared(self), self._compiled_calls():
            with hooks.handling(layer_state.handlers()):
                outputs = step_on(data.data)
            layer_state.combine(trained=False)
        end_phase("prediction", outputs)
        return prediction.own_rows(outputs, data.count)

    def get_metrics_result(self) -> dict[str, Any]:
        if self._tnt_passes_over:
            return {}
        if world.get_size() == 1 or internals.in_stateless_scope():
            return super().get_metrics_result()
        compute, step = super().get_metrics_result, current()
        if step is not None:
            return step.results(compute, self.metrics)
        return global_results(compute, self.metrics, channel("metrics"))

    def _aggregate_additional_loss(self, loss: Any) -> Any:
        """Sums up what was handed to `add_loss`, as Keras does, over the samples of all ranks."""
        total, step = super()._aggregate_additional_loss(loss), current()
        return total if step is None else step.numbers.added_loss(loss, total)

    def _own_logs(self) -> dict[str, Any]:
        """The metrics of this rank's samples."""
        return super().get_metrics_result()

    def _own_results(self) -> dict[str, Any]:
        return internals.python_logs(self._own_logs())

    # Metrics are summed over the ranks in a step only if someone reads the logs of batches.

    def _needs_batch_logs(self, phase: str) -> bool:
        return phase in self._tnt_batch_logs or self._overrides_step_methods

    @property
    def _overrides_step_methods(self) -> bool:
        """Whether a user's method might use the results of metrics in a step."""
        plain = self._tnt_plain_class
        return any(
            getattr(plain, name) is not getattr(keras.Model, name) or name in vars(self)
            for name in (
                "train_step",
                "test_step",
                "compute_metrics",
                "get_metrics_result",
                "make_train_function",
                "make_test_function",
            )
        )

    @property
    def _has_steps_of_keras(self) -> bool:
        """Whether model, steps and metrics are Keras's own."""
        is_plain = internals.is_of_keras(self._tnt_plain_class)
        return is_plain and not self._overrides_step_methods

    @contextmanager
    def _batch_logs(self, phases: frozenset[str]) -> Iterator[None]:
        """For a while, someone reads the logs of batches in these phases."""
        before, self._tnt_batch_logs = self._tnt_batch_logs, phases
        try:
            yield
        finally:
            self._tnt_batch_logs = before

    def _make(self, phase: str, make: Callable[..., Any], force: bool) -> Any:
        """Lets Keras make a function of steps twice: with and without the logs of batches.

        Both are made at once, and each call goes to one of them. Outside there is a single
        function, which others can take, or replace for a while.

        Args:
            phase: "train" or "test".
            make: Keras's method that makes the function.
            force: Whether to make it anew if there is one.
        """
        name = f"{phase}_function"
        present = getattr(self, name)
        is_made = present is not None and not force
        if self._overrides_step_methods or world.get_size() == 1 or is_made:
            return make(force=True) if force else make()  # a user's own may take no argument
        functions = {}
        for with_logs in (False, True):
            make(force=True)
            functions[with_logs] = getattr(self, name)
        self._tnt_called.difference_update([(phase, False), (phase, True)])

        def call(data: Any) -> Any:
            with_logs = self._needs_batch_logs(phase)
            results = functions[with_logs](data)
            self._tnt_called.add((phase, with_logs))
            return results

        setattr(self, name, call)
        return None

    # XLA compiles the calls of the model, and not what communicates.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._tnt_compiles_calls:
            if world.get_size() == 1 or current() is not None:
                return super().__call__(*args, **kwargs)
            with custom_loop.calling(self):
                return super().__call__(*args, **kwargs)
        for_gradients = self._tnt_takes_gradients
        with self._compiled_calls(False):
            return call_compiled(self, super().__call__, args, kwargs, for_gradients=for_gradients)

    @contextmanager
    def _compiled_calls(self, wanted: bool = True, for_gradients: bool = False) -> Iterator[None]:
        before = self._tnt_compiles_calls, self._tnt_takes_gradients
        self._tnt_compiles_calls = wanted and bool(self.jit_compile)
        self._tnt_takes_gradients = for_gradients
        try:
            yield
        finally:
            self._tnt_compiles_calls, self._tnt_takes_gradients = before

    def _can_be_compiled(self) -> bool:
        names = normalization.synchronized_layers(self)
        if names and self.jit_compile:
            self._tnt_advice.not_compiled(names)
        return not names

    @contextmanager
    def _uncompiled_steps(self) -> Iterator[None]:
        before = self.jit_compile
        self.jit_compile = before and world.get_size() == 1
        try:
            yield
        finally:
            self.jit_compile = before

    def make_train_function(self, force: bool = False) -> Any:
        with self._uncompiled_steps():
            made = self._make("train", super().make_train_function, force)
        if not isinstance(self.train_function, ComparedFunction):  # it may be measured in there
            measured = measured_function(self.train_function, self)
            self.train_function = compared_function(measured, self, self._tnt_steps["train"])
        return made

    def make_test_function(self, force: bool = False) -> Any:
        with self._uncompiled_steps():
            made = self._make("test", super().make_test_function, force)
        self.test_function = compared_function(self.test_function, self, self._tnt_steps["test"])
        return made

    def make_predict_function(self, force: bool = False) -> Any:
        make, present = super().make_predict_function, self.predict_function
        with self._uncompiled_steps():
            made = make(force=True) if force else make()
        if self.predict_function is not present:
            self.predict_function = compared_function(
                self.predict_function, self, self._tnt_steps["predict"]
            )
        return made

    def _should_eval(self, *args: Any) -> Any:
        return not self._tnt_passes_over and super()._should_eval(*args)

    def get_config(self) -> Any:
        return self._plain().get_config()

    def to_json(self, **kwargs: Any) -> Any:
        return self._plain().to_json(**kwargs)

    def __reduce__(self) -> Any:
        rebuild, args = self._plain().__reduce__()
        return self._tnt_rebuild, (rebuild, *args)

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._tnt_wrap(cls._tnt_plain_class.from_config(*args, **kwargs))
