"""Data from Python code that go on from one epoch to the next, read epoch by epoch.

TensorFlow reads data ahead of the steps, on each rank as far as it gets. Where an epoch is a
number of steps and not a pass over the data, it would read beyond the end of the epoch: each
rank another number of batches, while an `on_epoch_end` of the user's changes them, or draws
random numbers in between. The ranks would go on with different batches. So an epoch is made
a pass of its own, that ends where the epoch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Passes:
    """Makes passes of so many batches over data that go on.

    Args:
        begin: Begins to read the data, from their beginning.
        steps: How many batches a pass has.
        anew: Whether each pass begins at the beginning; otherwise where the last one ended.

    Example:
        >>> passes = Passes(itertools.count, steps=3)
        >>> list(passes()), list(passes())
        ([0, 1, 2], [3, 4, 5])
    """

    def __init__(self, begin: Callable[[], Any], steps: int, anew: bool = False) -> None:
        self._begin = begin
        self._steps = steps
        self._anew = anew
        self._batches: Iterator[Any] | None = None

    def __call__(self) -> Iterator[Any]:
        if self._batches is None or self._anew:
            self._batches = iter(self._begin())
        batches = self._batches
        for _ in range(self._steps):
            try:
                batch = next(batches)
            except StopIteration:
                self._batches = None  # the next pass begins anew, as in Keras
                return
            yield batch
