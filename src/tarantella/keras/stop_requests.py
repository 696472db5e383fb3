"""Ranks stop together: what one of them requests happens once all of them know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# The attributes by which callbacks make Keras stop `fit`, `evaluate` or `predict`; and a request
# from outside, to save the training and leave the script.
NAMES = ("stop_training", "stop_evaluating", "stop_predicting", "leave")


class StopRequests:
    """What this rank requests to be stopped, and what all ranks have decided to stop.

    A callback sees its own requests, and those of the callbacks before it. Between the calls of
    callbacks, Keras sees the decisions: a request that comes then, from a signal handler or a
    thread, does not count yet.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, Any] = dict.fromkeys(NAMES, False)
        self._decided: dict[str, Any] | None = None

    @property
    def wanted(self) -> list[bool]:
        """This rank's requests, in the order of `NAMES`."""
        return [bool(self._wanted[name]) for name in NAMES]

    def decide(self, decisions: Sequence[bool]) -> None:
        """Makes these decisions count from now on; they are the same on all ranks."""
        self._decided = dict(zip(NAMES, decisions, strict=True))
        for name, decision in self._decided.items():
            self._wanted[name] = self._wanted[name] or decision

    def undecide(self) -> None:
        """Makes this rank's own requests count until the next decision."""
        self._decided = None

    def wants(self, name: str) -> bool:
        """Whether this rank requests a stop, whatever counts at present."""
        return bool(self._wanted[name])

    def get(self, name: str) -> Any:
        """What counts at present."""
        return (self._wanted if self._decided is None else self._decided)[name]

    def want(self, name: str, value: Any) -> None:
        """Requests a stop, or withdraws the request."""
        self._wanted[name] = value


def _request(name: str) -> property:
    def get(model: Any) -> Any:
        return model._tnt_stop_requests.get(name)

    def want(model: Any, value: Any) -> None:
        model._tnt_stop_requests.want(name, value)

    return property(get, want)


class StopsOnAllRanks:
    """A model whose requests to stop are followed by all ranks, after the same step."""

    _tnt_stop_requests: StopRequests

    stop_training = _request("stop_training")
    stop_evaluating = _request("stop_evaluating")
    stop_predicting = _request("stop_predicting")
