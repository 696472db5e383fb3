"""Ranks stop together: what one of them wants is done when all know of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Where callbacks leave their wish that Keras stops `fit`, `evaluate` or `predict`; and a wish that
# comes from outside: to save, and to leave the script.
NAMES = ("stop_training", "stop_evaluating", "stop_predicting", "leave")


class Stops:
    """What a rank wants to be stopped, and what all ranks have decided to stop.

    A callback sees what it, or another one before it, has asked for. Keras, between the calls of
    callbacks, sees what was decided: a wish that comes then, from a signal handler or a thread, is
    not taken for a decision.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, Any] = dict.fromkeys(NAMES, False)
        self._decided: dict[str, Any] | None = None

    @property
    def wanted(self) -> list[bool]:
        """What this rank wants."""
        return [bool(self._wanted[name]) for name in NAMES]

    def decide(self, decisions: Sequence[bool]) -> None:
        """From now on these decisions count, the same on all ranks."""
        self._decided = dict(zip(NAMES, decisions, strict=True))
        for name, decision in self._decided.items():
            self._wanted[name] = self._wanted[name] or decision

    def let_go(self) -> None:
        """What this rank wants counts again, until the next decision."""
        self._decided = None

    def wants(self, name: str) -> bool:
        """Whether this rank wants something to stop, whatever counts at present."""
        return bool(self._wanted[name])

    def get(self, name: str) -> Any:
        """What counts at present."""
        return (self._wanted if self._decided is None else self._decided)[name]

    def want(self, name: str, value: Any) -> None:
        """Asks for a stop, or takes the wish back."""
        self._wanted[name] = value


def _stop(name: str) -> property:
    def get(model: Any) -> Any:
        return model._tnt_stops.get(name)

    def want(model: Any, value: Any) -> None:
        model._tnt_stops.want(name, value)

    return property(get, want)


class StopsTogether:
    """A model on which a wish to stop is done by all ranks, after the same step."""

    _tnt_stops: Stops

    stop_training = _stop("stop_training")
    stop_evaluating = _stop("stop_evaluating")
    stop_predicting = _stop("stop_predicting")
