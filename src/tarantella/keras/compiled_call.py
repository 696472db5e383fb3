"""Calls of a model as separate functions compiled by XLA.

XLA cannot compile communication. With `jit_compile=True` the model's forward pass, and with
it the backward pass, is compiled, and the step around it, which communicates, is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tarantella.internals import keras as internals


def call_compiled(
    model: keras.Model,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What `call(*args, **kwargs)` returns, computed by a compiled function.

    Masks and losses that layers leave behind are results too, and are passed on: the tensors of
    a function cannot be used outside it.
    """
    leaves = tf.nest.flatten((args, kwargs))
    is_tensor = [tf.is_tensor(leaf) for leaf in leaves]
    masked: list[bool] = []

    @tf.function(jit_compile=True, autograph=False)
    def compiled(*tensors: tf.Tensor) -> tuple[Any, list[tf.Tensor], list[tf.Tensor]]:
        given = iter(tensors)
        inner = [
            next(given) if tensor else leaf for tensor, leaf in zip(is_tensor, leaves, strict=True)
        ]
        inner_args, inner_kwargs = tf.nest.pack_sequence_as((args, kwargs), inner)
        outputs = call(*inner_args, **inner_kwargs)
        masks = [internals.keras_mask(output) for output in tf.nest.flatten(outputs)]
        masked[:] = [mask is not None for mask in masks]
        return outputs, [m for m in masks if m is not None], internals.take_losses(model)

    tensors = [leaf for tensor, leaf in zip(is_tensor, leaves, strict=True) if tensor]
    outputs, masks, losses = compiled(*tensors)
    remaining = iter(masks)
    for output, has_mask in zip(tf.nest.flatten(outputs), masked, strict=True):
        internals.set_keras_mask(output, next(remaining) if has_mask else None)
    internals.give_losses(model, losses)
    return outputs
