"""The signals that ask the command to end, whatever it is doing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asks the command to end, or nobody reads its output any more."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StopSignals:
    """Turns these signals into an exception while armed, and remembers them otherwise."""

    def __init__(self) -> None:
        self._armed = False
        self._number: int | None = None

    @property
    def received(self) -> bool:
        """Whether the command was asked to end."""
        return self._number is not None

    def arm(self) -> None:
        """Make the next signal raise `Stopped`; if one has come already, raise it now."""
        self._armed = True
        if self._number is not None:
            raise Stopped(self._number)

    def arm_again(self) -> None:
        """Make another signal raise, after one has."""
        self._armed = True

    def disarm(self) -> None:
        self._armed = False

    def record(self, number: int) -> None:
        """The command has to end as if this signal had come."""
        self._number = number

    def handle(self, number: int, _: FrameType | None) -> None:
        """The handler of the signals."""
        self._number = number
        if self._armed:
            self._armed = False  # the clean-up that follows is not disturbed
            raise Stopped(number)


@contextmanager
def handled_signals() -> Iterator[StopSignals]:
    """Handles the signals for a while, not armed at first."""
    stop_signals = StopSignals()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, action in before.items():
        # A command started by nohup outlives its terminal. But SIGINT is ignored in whatever a
        # shell script starts with &, and there it can only have been sent on purpose.
        if number != signal.SIGHUP or action is not signal.SIG_IGN:
            signal.signal(number, stop_signals.handle)
    try:
        yield stop_signals
    finally:
        for number, action in before.items():
            signal.signal(number, action)
