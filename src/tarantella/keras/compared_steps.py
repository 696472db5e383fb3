"""Functions of steps whose data are compared with those of the other ranks, after some calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tarantella.data.comparison import Comparison, SamplesTaken, Taken, is_due
from tarantella.data.micro_batch import MicroBatch
from tarantella.data.on_device import micro_batch_of
from tarantella.runtime import run_report, world
from tarantella.runtime.meter import METER


class ComparedSteps:
    """The steps that a model takes in one phase: training, evaluation or prediction."""

    def __init__(self) -> None:
        self._taken = SamplesTaken()
        self._comparison: Comparison | None = None
        self._noted = Taken()
        self._calls = 0

    @contextmanager
    def over(self, comparison: Comparison | None) -> Iterator[None]:
        """Steps in here are over data that are compared.

        Args:
            comparison: What compares them; None if the ranks agree on each step anyway.
        """
        if comparison is None:
            yield
            return
        # A callback may call the method that calls it.
        outer = self._comparison, self._noted, self._calls
        taken_before = self._taken.read()
        self._taken.restart(Taken())
        self._comparison, self._noted, self._calls = comparison, Taken(), 0
        try:
            yield
            if self._calls and not is_due(self._calls):
                self._compare(comparison)
        finally:
            self._comparison, self._noted, self._calls = outer
            self._taken.restart(taken_before)

    def prepare(self) -> None:
        """Has to come before a function of steps is traced."""
        self._taken.prepare()

    def begin(self, data: Any) -> Any:
        """The data of a step as a micro-batch, if they are one, which is noted."""
        data = micro_batch_of(data)
        if isinstance(data, MicroBatch):
            self._taken.add(data)
        return data

    def call(self, function: Callable[[Any], Any], data: Any, steps: int) -> Any:
        """Calls a function that takes some steps."""
        comparison = self._comparison
        if comparison is None:
            return function(data)
        if isinstance(data, list):  # single steps: each shape in one would be traced anew
            data = [micro_batch_of(one) for one in data]
        called = time.time()
        results = function(data)
        self._calls += 1
        if is_due(self._calls):
            self._compare(comparison)
            arrival = self._taken.arrival() if run_report.is_wanted() else 0.0
            if arrival and steps == 1:  # of several, only the last one's is known
                METER.note_wait(arrival - called)
        return results

    def note(self) -> None:
        """Notes for the report of the run what was trained until now."""
        if self._comparison is not None:
            self._note(self._taken.read())

    def _compare(self, comparison: Comparison) -> None:
        taken = self._taken.read()
        self._note(taken)
        comparison.compare(taken)

    def _note(self, taken: Taken) -> None:
        before, self._noted = self._noted, taken
        METER.note_steps_before(taken.count - before.count, taken.steps - before.steps)


class ComparedFunction:
    """A function of steps that Keras made, or that is measured.

    Args:
        function: The function.
        model: The model whose steps it takes.
        steps: The steps of this phase.
    """

    def __init__(self, function: Callable[[Any], Any], model: Any, steps: ComparedSteps) -> None:
        self._function = function
        self._model = model
        self._steps = steps

    def __call__(self, data: Any) -> Any:
        return self._steps.call(self._function, data, self._model.steps_per_execution)


def compared_function(function: Any, model: Any, steps: ComparedSteps) -> Any:
    """The same function, whose data are compared.

    Args:
        function: A function of steps; None if a user's method has made none.
        model: The model whose steps it takes.
        steps: The steps of this phase.
    """
    if function is None or isinstance(function, ComparedFunction) or world.get_size() == 1:
        return function
    steps.prepare()
    return ComparedFunction(function, model, steps)
