"""Where the time of a rank goes, by a clock that the test turns."""

from __future__ import annotations

import threading

import pytest

from tarantella.runtime import watch
from tarantella.runtime.meter import CALLBACKS, COMPUTE, EVALUATION, INPUT, STEPS, SUMS, Meter


class Clock:
    now = 0.0
    waited = 0.0

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def waits(self, seconds: float) -> None:
        self.now += seconds
        self.waited += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("tarantella.runtime.meter.monotonic", lambda: made.now)
    monkeypatch.setattr(watch, "seconds_waited", lambda: made.waited)
    return made


def parts(meter: Meter) -> dict[str, float]:
    return {part: seconds for part, seconds in meter.totals().parts.items() if seconds}


def test_waits_are_taken_out_of_the_part_that_they_are_in(clock: Clock) -> None:
    meter = Meter()
    clock.passes(100)  # outside of everything
    with meter.part(CALLBACKS):
        clock.passes(1)
        with meter.part(INPUT):
            clock.passes(2)
            meter.note_input()
            clock.waits(4)
            meter.note_step(samples=7)
            clock.passes(8)
        clock.waits(16)
        with meter.part(EVALUATION):
            clock.waits(32)
            with meter.callbacks():
                clock.passes(64)
            meter.note_step(samples=9)  # not of a training
    clock.waits(100)
    assert parts(meter) == {INPUT: 2, COMPUTE: 8, CALLBACKS: 1, SUMS: 20, EVALUATION: 96}
    assert (meter.totals().steps, meter.totals().samples) == (1, 7)


def test_what_comes_after_the_training_is_not_input(clock: Clock) -> None:
    meter = Meter()
    with meter.part(INPUT):
        clock.passes(1)
        meter.note_trained()
        clock.passes(5)
    assert parts(meter) == {INPUT: 1, CALLBACKS: 5}


def test_tracing_is_not_input(clock: Clock) -> None:
    meter = Meter()
    with meter.part(INPUT):
        meter.note_tracing()
        clock.passes(5)
        meter.note_input()
        clock.passes(1)
    assert parts(meter) == {COMPUTE: 6}


def test_steps_of_which_nobody_knows_wait_as_long_as_those_before(clock: Clock) -> None:
    meter = Meter()
    with meter.part(STEPS):  # the first one
        meter.note_tracing()
        clock.passes(100)
        meter.note_input()
    assert parts(meter) == {COMPUTE: 100}
    for waited in (2, 4):
        with meter.part(STEPS):
            clock.passes(waited)
            meter.note_input()
            meter.note_samples(8)
            clock.passes(10)
    assert parts(meter) == {INPUT: 6, COMPUTE: 120}
    for seconds in (10, 1):  # 3 of them for data, if it takes that long
        with meter.part(STEPS):
            clock.passes(seconds / 2)
            meter.totals()
            clock.passes(seconds / 2)
    assert parts(meter) == {INPUT: 10, COMPUTE: 127}
    meter.note_samples(8)  # of an evaluation, or a custom loop, which notes its own
    assert meter.totals().samples == 16


def test_a_call_that_was_traced_does_not_tell_how_long_data_take(clock: Clock) -> None:
    meter = Meter()
    for traces in (True, False):
        with meter.part(INPUT):
            with meter.part(STEPS):
                if traces:
                    meter.note_tracing()
                clock.passes(10)
            meter.note_wait(9 if traces else 2)
    with meter.part(STEPS):
        clock.passes(10)
    assert parts(meter) == {INPUT: 2, COMPUTE: 28}


def test_a_wait_while_gradients_are_computed_costs_nothing(clock: Clock) -> None:
    meter = Meter()
    with meter.part(COMPUTE):
        meter.note_sent()
        clock.passes(5)  # a thread waits all the time, and others compute
        meter.note_received(since=0.0)
        meter.note_sent()
        clock.passes(2)
        meter.note_received(since=5.0)
        clock.passes(1)
    assert parts(meter) == {COMPUTE: 6, SUMS: 2}


def test_what_goes_on_is_in_the_totals(clock: Clock) -> None:
    meter = Meter()
    with meter.part(COMPUTE):
        clock.passes(3)
        assert parts(meter) == {COMPUTE: 3}
        clock.passes(3)
    assert parts(meter) == {COMPUTE: 6}


def test_one_of_several_threads_that_train_is_measured(clock: Clock) -> None:
    meter = Meter()

    def train() -> None:
        with meter.part(COMPUTE):
            clock.passes(4)

    with meter.part(CALLBACKS):
        other = threading.Thread(target=train)
        other.start()
        other.join()
    assert parts(meter) == {CALLBACKS: 4}


def test_waits_of_several_threads_count_once() -> None:
    before = watch.seconds_waited()
    began, go_on = threading.Barrier(2), threading.Event()

    def wait() -> None:
        with watch.waiting("gradients"):
            began.wait()
            go_on.wait()

    with watch.waiting("metrics"):
        other = threading.Thread(target=wait)
        other.start()
        began.wait()
        first = watch.seconds_waited()  # up to now
    assert watch.seconds_waited() >= first > before
    go_on.set()
    other.join()
    ended = watch.seconds_waited()
    assert watch.seconds_waited() == ended
    with watch.waiting("gradients", computes=True):
        assert watch.seconds_waited() == ended
