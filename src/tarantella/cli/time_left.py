"""How long a run still takes: a line after an epoch; Keras shows only the progress within one."""

from __future__ import annotations

import time
from collections.abc import Callable

from tarantella.runtime.announce import EPOCH, Announcement
from tarantella.runtime.words import duration

_SELDOM = 60.0  # seconds between two lines, if nobody has asked for them


class TimeLeft:
    """Shows how long a `fit` still takes.

    Args:
        show: shows a line
        always: whether after each epoch; otherwise once a minute at most
    """

    def __init__(self, show: Callable[[str], None], always: bool) -> None:
        self._show = show
        self._always = always
        self._shown = time.monotonic()
        self._fit = 0
        self._seconds: list[float] = []  # of the epochs of this fit

    def hear(self, news: Announcement) -> None:
        """A rank announces something."""
        if news.kind != EPOCH:
            return
        number, epochs = news.data["number"], news.data["epochs"]
        if news.data["fit"] != self._fit:
            self._fit, self._seconds = news.data["fit"], []
        self._seconds.append(news.data["seconds"])
        now = time.monotonic()
        if number >= epochs or not (self._always or now - self._shown > _SELDOM):
            return
        self._shown = now
        left = duration((epochs - number) * self._seconds_of_epoch())
        self._show(f"epoch {number} of {epochs} done, about {left} left.")

    def _seconds_of_epoch(self) -> float:
        """The mean of the last epochs; the first one, in which steps are traced, takes longer."""
        some = self._seconds[1:][-10:] or self._seconds
        return sum(some) / len(some)
