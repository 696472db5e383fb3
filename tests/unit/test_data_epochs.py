"""Epochs over data that continue from one to the next."""

from __future__ import annotations

import itertools

from tarantella.data.epochs import Epochs


def test_a_pass_continues_where_the_last_one_ended_and_reads_no_further() -> None:
    numbers = itertools.count()
    epochs = Epochs(lambda: numbers, steps=3)
    assert [list(epochs()), list(epochs())] == [[0, 1, 2], [3, 4, 5]]
    assert next(numbers) == 6


def test_data_that_have_ended_are_begun_anew() -> None:
    epochs = Epochs(lambda: range(4), steps=3)
    assert [list(epochs()) for _ in range(3)] == [[0, 1, 2], [3], [0, 1, 2]]


def test_every_pass_can_begin_at_the_beginning() -> None:
    epochs = Epochs(itertools.count, steps=2, anew=True)
    assert [list(epochs()), list(epochs())] == [[0, 1], [0, 1]]
