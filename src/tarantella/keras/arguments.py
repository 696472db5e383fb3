"""Checks of the arguments of `fit`, `evaluate` and `predict`, before they do anything.

What Keras takes is taken. What it would silently misread, or refuse with an unclear error of
Python's or TensorFlow's, is refused here with an error that names the argument.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella.errors import InputError
from tarantella.internals import keras as internals


def require_data(x: Any, method: str) -> None:
    """Raises an InputError if there are no data at all."""
    if x is None:
        raise InputError(f"`{method}` needs data to work on, but `x` is None.")


def require_whole_numbers(**numbers: Any) -> None:
    """Raises an InputError for the first that is not a whole number; None is fine."""
    for name, value in numbers.items():
        if value is not None and not _is_whole(value):
            raise InputError(f"{name} is {value!r}; it must be a whole number.")


def require_steps(x: Any, **numbers: Any) -> None:
    """Raises an InputError for an invalid number of steps over the data `x`."""
    for name, value in numbers.items():
        if value is None:
            continue
        # A negative number means all batches to Keras, but not of arrays.
        if not _is_whole(value) or (value < 0 and internals.is_arrays(x)):
            raise InputError(
                f"{name} is {value!r}; it must be a whole number of batches, 1 or more. Leave it "
                "out to use all the data."
            )


def require_validation(x: Any, split: Any, frequency: Any, steps: Any) -> None:
    """Raises an InputError for invalid arguments of `fit` about validation.

    Args:
        x: The data to validate with, or to take them from.
        split: `validation_split`.
        frequency: `validation_freq`.
        steps: `validation_steps`.
    """
    if not isinstance(split, (int, float, np.number)) or not 0 <= split < 1:
        raise InputError(
            f"validation_split is {split!r}; it must be the fraction of the samples to validate "
            "with, at least 0 and less than 1."
        )
    if _is_whole(frequency) and frequency < 1:
        raise InputError(
            f"validation_freq is {frequency!r}; it must be the number of epochs from one "
            "validation to the next, 1 or more, or a list of epochs."
        )
    require_steps(x, validation_steps=steps)


def require_numbers(model: keras.Model, spec: Any) -> None:
    """Raises an InputError if the data are text and the model takes numbers.

    Args:
        model: The model.
        spec: The structure of a batch.
    """
    expected = {one.dtype for one in tf.nest.flatten(getattr(model, "inputs", None) or [])}
    x = spec[0] if isinstance(spec, (list, tuple)) else spec  # any length, with a custom step
    given = [getattr(leaf, "dtype", None) for leaf in tf.nest.flatten(x)]
    if expected and "string" not in expected and tf.string in given:
        raise InputError(
            f"The data are text, but the model '{model.name}' takes numbers "
            f"({', '.join(sorted(expected))}). Turn the text into numbers first, for example with "
            "`keras.layers.TextVectorization`."
        )


@contextmanager
def explained(**data: Any) -> Iterator[None]:
    """Names the array whose kind of elements Keras refuses.

    Args:
        data: The data for Keras, by the names of the arguments.
    """
    try:
        yield
    except InputError:
        raise
    except (TypeError, ValueError):
        for name, value in data.items():
            for leaf in tf.nest.flatten(value):
                if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSU":
                    raise InputError(
                        f"`{name}` has an array of {_kind(leaf)}, but Keras takes numbers. Turn "
                        "it into numbers; for a model that reads text, pass `tf.constant(...)` "
                        "or a dataset."
                    ) from None
        raise


def _is_whole(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _kind(array: np.ndarray) -> str:
    return "Python objects" if array.dtype.kind == "O" else "text"
