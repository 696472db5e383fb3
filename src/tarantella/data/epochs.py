"""Data from Python code that continue from one epoch to the next, read epoch by epoch.

TensorFlow reads data ahead of the steps, on each rank as far as it gets. Where an epoch is a number
of steps and not a pass over the data, it would read beyond the end of the epoch: on each rank a
different number of batches, while the user's `on_epoch_end` changes the data or draws random
numbers. The ranks would continue with different batches. So each epoch gets a pass of its own,
which ends where the epoch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Epochs:
    """Turns data that do not end with the epoch into one pass for each epoch.

    Args:
        begin: Begins to read the data, from their beginning.
        steps: How many batches an epoch has.
        anew: Whether each epoch starts from the beginning; otherwise where the last one ended.

    Example:
        >>> epochs = Epochs(itertools.count, steps=3)
        >>> list(epochs()), list(epochs())
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
                self._batches = None  # the next epoch begins anew, as in Keras
                return
            yield batch
