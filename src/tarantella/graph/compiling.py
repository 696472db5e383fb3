"""Functions that XLA compiles: nothing in them can communicate, or call Python.

A step is compiled in two functions, with the sums over the ranks between them. Whether that is
possible shows when the first one is traced: if it needs a sum, it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import tensorflow as tf

from tarantella.graph.channel import Channel
from tarantella.internals.tensorflow import called_graphs
from tarantella.runtime.log import LOGGER

# How the types of operations begin that XLA cannot compile.
NOT_COMPILABLE = ("PyFunc", "EagerPyFunc", "Collective")


class NotCompilableError(Exception):
    """A function that is being traced for XLA does what XLA cannot compile."""


class Trace:
    """A trace for XLA.

    Attributes:
        refused: Whether it does what XLA cannot compile. Keras may replace the exception that says
            so by another.
    """

    def __init__(self) -> None:
        self.refused = False


_trace: ContextVar[Trace | None] = ContextVar("trace for XLA", default=None)


@contextmanager
def compiling() -> Iterator[Trace]:
    """What is traced in here is for XLA."""
    token = _trace.set(Trace())
    try:
        yield _trace.get()  # type: ignore[misc]  # it was set above
    finally:
        _trace.reset(token)


def is_compiling() -> bool:
    """Whether a function is being traced for XLA, in this thread."""
    return _trace.get() is not None


def refuse(what: str) -> NoReturn:
    """Ends the trace."""
    trace = _trace.get()
    if trace is not None:
        trace.refused = True
    LOGGER.debug("XLA does not compile this as a whole: it has %s.", what)
    raise NotCompilableError(what)


@contextmanager
def compilable() -> Iterator[None]:
    """Refuses the function that is traced in here if XLA cannot compile it."""

    def refuse_variable(*_: Any, **__: Any) -> NoReturn:
        refuse("a variable that is created in it")  # which would be lost with a refused trace

    with tf.variable_creator_scope(refuse_variable):
        yield
    trace = _trace.get()
    if trace is not None and trace.refused:  # and the user's code has caught the exception
        refuse("what was refused before")
    if has_operation(tf.compat.v1.get_default_graph(), NOT_COMPILABLE):
        refuse("a function that was traced before and communicates, or calls Python")


def has_operation(graph: Any, types: tuple[str, ...]) -> bool:
    """Whether a graph, or a function that it calls, has an operation of a type.

    Args:
        graph: The graph.
        types: How the names of types begin.
    """
    for operation in graph.get_operations():
        if operation.type.startswith(types):
            return True
        if any(has_operation(called, types) for called in called_graphs(operation)):
            return True
    return False


class RefusingChannel(Channel):
    """The channel for functions that XLA compiles."""

    def _sums(self, tensors: Any, buckets: Any) -> Any:
        if buckets:
            refuse(f"a sum of {self._purpose}")
        return {}

    def allreduce_with_slices(self, tensors: Any, slices: Any, threshold: int | None) -> Any:
        if slices:
            refuse(f"a sum of {self._purpose}")
        return self.allreduce(tensors, threshold), []
