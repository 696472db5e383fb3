"""The signals that ask the command to end, at whatever point it is."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asks the command to end, or nobody reads its output any more."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Stops:
    """Turns the signals that ask us to end into an exception, once there is something to end."""

    def __init__(self) -> None:
        self._armed = False
        self._came: int | None = None

    def arm(self) -> None:
        self._armed = True
        if self._came is not None:
            raise Stopped(self._came)

    def arm_again(self) -> None:
        """Have the next signal raise, after one has."""
        self._armed = True

    def note(self, number: int) -> None:
        """The command has to end as if this signal had come."""
        self._came = number

    @property
    def came(self) -> bool:
        """Whether the command was asked to end."""
        return self._came is not None

    def disarm(self) -> None:
        self._armed = False

    def take(self, number: int, _: FrameType | None) -> None:
        self._came = number
        if self._armed:
            self._armed = False  # who tidies up after it is not disturbed
            raise Stopped(number)


@contextmanager
def stop_signals() -> Iterator[Stops]:
    stops = Stops()
    before = {number: signal.getsignal(number) for number in _STOPS}
    for number, action in before.items():
        # A command started by nohup outlives its terminal. But SIGINT is ignored in whatever a
        # shell script starts with &, and there it can only have been sent on purpose.
        if number != signal.SIGHUP or action is not signal.SIG_IGN:
            signal.signal(number, stops.take)
    try:
        yield stops
    finally:
        for number, action in before.items():
            signal.signal(number, action)
