"""Custom training loops use the same hooks as `fit`.

Such a loop has no step of ours around it. It works on the batch that `tnt.distribute_dataset`
handed out last, and calls our models and optimizers, which set the handlers here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tarantella.data import share
from tarantella.internals import keras as internals
from tarantella.keras import gradients, hooks, normalization
from tarantella.keras.hooks import Handler
from tarantella.keras.normalization import GlobalMoments
from tarantella.runtime import world

Check = Callable[[Sequence[Any], Sequence[Any]], None]


@contextmanager
def calling(model: Any) -> Iterator[None]:
    """Makes a call of a model use the statistics of the global batch.

    The gradients get their shares from a `tnt.keras.optimizers.Optimizer`.
    """
    if not normalization.synchronized_layers(model):
        yield
        return
    moments = GlobalMoments(share.current, loss_has_share=lambda: False)
    with hooks.handling(moments.handlers()):
        yield


@contextmanager
def applying(check: Check) -> Iterator[None]:
    """Makes an optimizer apply the gradients of all ranks.

    In a step of ours they are summed there, and for the optimizer inside another one they are
    summed already.

    Args:
        check: Is given the gradients and the variables before they are summed.
    """
    if world.get_size() == 1 or hooks.has_handler(hooks.APPLY_GRADIENTS):
        yield
        return

    def apply_sums(
        apply: Handler, optimizer: Any, grads: Any, trainable_variables: Any = None
    ) -> Any:
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if trainable_variables is not None or optimizer.built:
            variables = trainable_variables or internals.trained_variables(optimizer)
            gradients.give_shapes(grads, variables)
            check(grads, variables)
            grads = gradients.sum_in_program_order(gradients.weighted(grads, share.current()))
        with hooks.suspended(hooks.APPLY_GRADIENTS):
            result = apply(optimizer, grads, trainable_variables)
        gradients.end_update(trainable_variables or internals.trained_variables(optimizer))
        return result

    with hooks.handling({hooks.APPLY_GRADIENTS: apply_sums}):
        yield
