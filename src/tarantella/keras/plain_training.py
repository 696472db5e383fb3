"""A model that `tnt.Model` has wrapped, trained as the plain one: a mistake, if ranks do it.

Every rank then trains on all of the data by itself, and nothing looks wrong. The master alone may
well train a plain model, on purpose. So the first of the other ranks is the one that reports it.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any
from weakref import WeakSet

from tarantella.keras import hooks
from tarantella.keras.hooks import Handler
from tarantella.runtime import ending, world
from tarantella.runtime.announce import (
    TRAINS_ALONE,
    Announcement,
    announce,
    is_run_by_command,
    say,
    trained_alone,
)
from tarantella.runtime.configuration import configuration
from tarantella.runtime.script_place import ScriptPlace, place_of

_WITNESS = 1

_wrapped: WeakSet[Any] = WeakSet()
_has_told = False


def note_wrapped(model: Any) -> None:
    """There is a `tnt.Model` of this plain model: that is the one to train."""
    if world.get_rank() == _WITNESS:
        _wrapped.add(model)
        hooks.handle_always({hooks.FIT: _train, hooks.TRAIN_ON_BATCH: _train})


def _train(train: Handler, model: Any, *args: Any, **kwargs: Any) -> Any:
    if not _has_told and model in _wrapped:
        _tell(model.name, ScriptPlace(place_of(sys._getframe()).line, train.__name__))
    return train(model, *args, **kwargs)


def _tell(name: str, place: ScriptPlace) -> None:
    global _has_told
    _has_told = True
    if is_run_by_command():
        host, pid = socket.gethostname(), os.getpid()
        announce(Announcement(TRAINS_ALONE, _WITNESS, host, pid, cause=name, place=str(place)))
    elif configuration().log_level != "ERROR":
        text = f"tarantella WARNING: {trained_alone(name, str(place), world.get_size())}"
        say(text, 2)
        ending.before_end(lambda: say(text, 2), by_mpi=False)
