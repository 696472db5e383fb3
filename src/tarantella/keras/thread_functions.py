"""Models that are trained at the same time, each in a thread of the script.

Sums use the communicators of the thread in which Keras's function of a step was traced. A model
that goes to another thread needs functions that are traced there.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from tarantella.comm.thread_communicators import communicators_of_this_thread
from tarantella.runtime import world

Method = TypeVar("Method", bound=Callable[..., Any])

_traced_with: WeakKeyDictionary[Any, world.Communicators] = WeakKeyDictionary()
_calls_in: Counter[int] = Counter()  # by thread


def with_communicators_of_thread(method: Method) -> Method:
    """Decorates a method of a model, such as `fit`, whose ranks communicate."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        with communicators_of_this_thread():
            _forget_functions_of_other_threads(self)
            _calls_in[thread] += 1
            try:
                return method(self, *args, **kwargs)
            finally:
                _calls_in[thread] -= 1

    return call  # type: ignore[return-value]


def training_threads() -> set[int]:
    """The threads that are in `fit` or the like right now."""
    return {thread for thread, calls in list(_calls_in.items()) if calls}


def _forget_functions_of_other_threads(model: Any) -> None:
    if world.get_size() == 1:
        return
    before = _traced_with.setdefault(model, world.communicators())
    if before is not world.communicators():
        model.train_function = model.test_function = model.predict_function = None
        _traced_with[model] = world.communicators()
