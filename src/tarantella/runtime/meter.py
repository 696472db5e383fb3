"""Where the time of this rank goes: what it does is in one part at a time, and each part has a sum.

The parts change when a function of steps is called, when its data have arrived, and when it
returns; waiting for other ranks is taken out of the part that it happens in. No tensor is read,
and nothing communicates. Ranks that compare only some of their batches (`step_agreement`) know
only then when data have arrived: what these steps waited is assumed for those in between.
"""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from dataclasses import dataclass
from time import monotonic

from tarantella.runtime import watch

INPUT = "input"  # waiting for this rank's own data, and all else that `fit` does between steps
COMPUTE = "compute"  # steps, tracing included
SUMS = "sums"  # waiting for other ranks, in whatever part but evaluation
CALLBACKS = "callbacks"  # on a single rank, all that `fit` does between steps
EVALUATION = "evaluation"  # `evaluate` and `predict`, also within `fit`
PARTS = (INPUT, COMPUTE, SUMS, CALLBACKS, EVALUATION)
STEPS = "steps"  # a function of steps, on several ranks: `INPUT`, and then `COMPUTE`
_WEIGHT_OF_LAST = 0.5  # in the average of how long steps wait for their data
_ELSEWHERE = "elsewhere"  # in a thread that is not measured


@dataclass(frozen=True)
class Totals:
    """What this rank has done so far.

    Attributes:
        steps: training steps
        samples: this rank's samples in them, as far as they are known
        parts: seconds for each of `PARTS`
    """

    steps: int
    samples: int
    parts: dict[str, float]


class Meter:
    """Adds up what this rank does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps = self._samples = 0
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._part: str | None = None  # None: nothing that is measured
        self._thread = 0  # the one that is measured
        self._since = monotonic()
        self._waited = 0.0  # by then
        # Sums in the background: waits since the last gradients were sent, and when that was.
        self._background = 0.0
        self._sent = 0.0
        # When a function of steps was called, when its data arrive, and what that usually takes.
        self._called: float | None = None
        self._traces = False  # in that call
        self._arrival = 0.0
        self._usual_wait: float | None = None

    def part(self, name: str) -> _InPart:
        """What is done in here is in this part; also a decorator of a function."""
        return _InPart(self, name)

    def callbacks(self) -> _InPart:
        """What is done in here is done by callbacks; those of an evaluation belong to it."""
        return _InPart(self, EVALUATION if self._part == EVALUATION else CALLBACKS)

    def enter(self, part: str) -> str | None:
        """Begins a part, and returns the one before; `_ELSEWHERE` if another thread is measured."""
        thread = threading.get_ident()
        if self._part is None:
            self._thread = thread
        elif self._thread != thread:
            return _ELSEWHERE
        before = self.switch(part)
        if part == STEPS:
            self._traces = False
            self._called = self._since
            self._arrival = self._since + (self._usual_wait or 0.0)
        return before

    def switch(self, part: str | None) -> str | None:
        """From now on, this rank is in another part; returns the one before."""
        with self._lock:
            self._add_up()
            before, self._part = self._part, part
        if part != COMPUTE:
            self._called = None
        return before

    def next_input(self) -> None:
        """The step of a custom training loop has ended, and it waits for the next data."""
        if self._thread == threading.get_ident() and self._part is not None:
            self.switch(INPUT)

    def note_trained(self) -> None:
        """What still follows in `fit` is not input: a tracker may save the model, for example."""
        if self._thread == threading.get_ident() and self._part == INPUT:
            self.switch(CALLBACKS)

    def note_tracing(self) -> None:
        """A step is being traced: this rank does not wait for its data yet."""
        self._traces = True
        if self._part in (INPUT, STEPS):
            self._arrival = self._since
            self.switch(COMPUTE)

    def note_input(self) -> None:
        """The data of a step are there."""
        if self._part == STEPS and self._called is not None:
            self._arrival = monotonic()
            self._note_wait(self._arrival - self._called)
        if self._part in (INPUT, STEPS):
            self.switch(COMPUTE)

    def note_wait(self, seconds: float) -> None:
        """The data of a call of a function of steps, which has ended, came after this time.

        If it was traced in that call, most of the time went there.
        """
        if not self._traces and self._part == INPUT and self._thread == threading.get_ident():
            self._note_wait(seconds)

    def note_samples(self, samples: int, steps: int = 1) -> None:
        """A function of steps has got the data of some, with this many samples of this rank."""
        if self._called is not None:
            self._add_steps(samples, steps)

    def note_step(self, samples: int, steps: int = 1) -> None:
        """Training steps are taken, with this many samples of this rank."""
        if self._part in (INPUT, COMPUTE):
            self._add_steps(samples, steps)

    def note_steps_before(self, samples: int, steps: int) -> None:
        """Training steps were taken, before what is done now, unless this is an evaluation."""
        if self._part in (INPUT, COMPUTE, CALLBACKS):
            self._add_steps(samples, steps)

    def note_sent(self) -> None:
        """Gradients are sent while others are computed: waits before that have cost nothing."""
        self._background, self._sent = 0.0, monotonic()

    def note_received(self, since: float) -> None:
        """The sums of gradients that were waited for since then are there."""
        self._background += monotonic() - max(since, self._sent)

    def totals(self) -> Totals:
        with self._lock:
            self._add_up()
            return Totals(self._steps, self._samples, dict(self._parts))

    def _add_steps(self, samples: int, steps: int) -> None:
        with self._lock:
            self._steps += steps
            self._samples += samples

    def _note_wait(self, seconds: float) -> None:
        usual = self._usual_wait
        self._usual_wait = seconds if usual is None else usual + _WEIGHT_OF_LAST * (seconds - usual)

    def _add_up(self) -> None:
        now, waited = monotonic(), watch.seconds_waited()
        if self._part is not None:
            elapsed = now - self._since
            for_others = 0.0
            if self._part != EVALUATION:
                for_others = min(waited - self._waited + self._background, elapsed)
            self._parts[SUMS] += for_others
            own = elapsed - for_others
            if self._part == STEPS:
                for_data = min(max(self._arrival - self._since, 0.0), own)
                self._parts[INPUT] += for_data
                self._parts[COMPUTE] += own - for_data
            else:
                self._parts[self._part] += own
        self._since, self._waited, self._background = now, waited, 0.0


class _InPart(ContextDecorator):
    """See `Meter.part`. A class, since generators take three times as long."""

    def __init__(self, meter: Meter, part: str) -> None:
        self._meter = meter
        self._part = part
        self._before: str | None = None

    def __enter__(self) -> None:
        self._before = self._meter.enter(self._part)

    def __exit__(self, *_: object) -> None:
        if self._before != _ELSEWHERE:
            self._meter.switch(self._before)

    def _recreate_cm(self) -> _InPart:  # each call of a decorated function has its own
        return _InPart(self._meter, self._part)


METER = Meter()
