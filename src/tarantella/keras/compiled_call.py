"""Calls of a model as separate functions compiled by XLA.

XLA cannot compile communication. With `jit_compile=True` the model's forward pass, and with
it the backward pass, is compiled, and the step around it, which communicates, is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from tarantella.graph.compiling import NOT_COMPILABLE, compiling, has_operation
from tarantella.internals import keras as internals

_LOOPS = ("While", "StatelessWhile", "TensorList")


def call_compiled(
    model: keras.Model,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    for_gradients: bool,
) -> Any:
    """What `call(*args, **kwargs)` returns, computed by a compiled function if that is possible.

    A call that communicates is not compiled. With `for_gradients`, one with a loop is not either:
    what its backward pass needs of each round is in a list, and XLA cannot hand lists from one
    function to another.

    Masks, logits and losses that layers leave behind are results too, and are passed on: the
    tensors of a function cannot be used outside it.
    """
    leaves = tf.nest.flatten((args, kwargs))
    is_tensor = [tf.is_tensor(leaf) for leaf in leaves]
    found: list[internals.Logits | None] = []

    @tf.function(jit_compile=True, autograph=False)
    def compiled(*tensors: tf.Tensor) -> tuple[Any, list[Any], list[Any], list[tf.Tensor]]:
        given = iter(tensors)
        inner = [
            next(given) if tensor else leaf for tensor, leaf in zip(is_tensor, leaves, strict=True)
        ]
        inner_args, inner_kwargs = tf.nest.pack_sequence_as((args, kwargs), inner)
        outputs = call(*inner_args, **inner_kwargs)
        masks = [internals.keras_mask(output) for output in tf.nest.flatten(outputs)]
        found[:] = [internals.logits_of(output) for output in tf.nest.flatten(outputs)]
        logits = [None if one is None else one.values for one in found]
        return outputs, masks, logits, internals.take_losses(model)

    tensors = [leaf for tensor, leaf in zip(is_tensor, leaves, strict=True) if tensor]
    unwanted = (*NOT_COMPILABLE, *_LOOPS) if for_gradients else NOT_COMPILABLE
    with compiling() as trace:
        try:
            graph = compiled.get_concrete_function(*tensors).graph
        except Exception:
            if not trace.refused:
                raise
    if trace.refused or has_operation(graph, unwanted):
        return call(*args, **kwargs)
    outputs, masks, logits, losses = compiled(*tensors)
    flat = [
        output if inside is None else internals.with_logits(output, replace(inside, values=values))
        for output, inside, values in zip(tf.nest.flatten(outputs), found, logits, strict=True)
    ]
    for output, mask in zip(flat, masks, strict=True):
        internals.set_keras_mask(output, mask)
    internals.give_losses(model, losses)
    return tf.nest.pack_sequence_as(outputs, flat)
