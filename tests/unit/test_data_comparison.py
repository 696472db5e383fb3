"""What ranks are told whose data differ."""

from __future__ import annotations

import random
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tarantella.data import comparison
from tarantella.data.comparison import SamplesTaken, Taken
from tarantella.data.micro_batch import MicroBatch
from tarantella.errors import MismatchError
from tarantella.runtime.configuration import Configuration


def test_the_advice_about_different_data_seeds_all_that_is_random(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparison, "configuration", lambda: Configuration(strict=True))
    with pytest.raises(MismatchError) as raised:
        comparison.complain_of_different_data("x")
    seed_all, make_generator = re.findall(r"`([\w.]+\(1\))`", str(raised.value))

    def draw() -> list[float]:
        names = {"keras": keras, "np": np}
        eval(seed_all, names)
        generator = eval(make_generator, names)
        tensor = float(tf.random.uniform(()))
        return [random.random(), np.random.rand(), generator.random(), tensor]

    assert draw() == draw()


def test_batches_in_another_order_are_other_data() -> None:
    fingerprints = [2**31 - 1, 5, 77, 2**30] * 20

    def taken(fingerprints: list[int]) -> Taken:
        python, graph = Taken(), SamplesTaken()
        for each in fingerprints:
            python = python.plus(2, 4, each)
            graph.add(MicroBatch(*map(np.int64, (2, 4)), (), tf.constant(each, tf.int64)))
        assert graph.read() == python
        return python

    one, other = taken(fingerprints), taken(fingerprints[::-1])
    assert (one.steps, one.count, one.total) == (other.steps, other.count, other.total)
    assert one.fingerprint != other.fingerprint
