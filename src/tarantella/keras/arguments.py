"""What `fit`, `evaluate` and `predict` are given, looked at before anything is done with it.

What Keras takes is taken. What it would refuse in words of Python's or TensorFlow's, or quietly
misread, is refused here in words that name it.
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
    """Raises an InputError for the first that is not one; None stands for what was not stated."""
    for name, value in numbers.items():
        if value is not None and not _is_whole(value):
            raise InputError(f"{name} is {value!r}; it must be a whole number.")


def require_steps(x: Any, **numbers: Any) -> None:
    """Raises an InputError for a number of steps over the data `x` that makes no sense."""
    for name, value in numbers.items():
        if value is None:
            continue
        # Of batches, Keras takes all if the number is negative; of arrays, it cannot.
        if not _is_whole(value) or (value < 0 and internals.is_arrays(x)):
            raise InputError(
                f"{name} is {value!r}; it must be a whole number of batches, 1 or more. Leave it "
                "out to use all data."
            )


def require_validation(split: Any, frequency: Any) -> None:
    """Raises an InputError for a `validation_split` or `validation_freq` that makes no sense."""
    if not isinstance(split, (int, float, np.number)) or not 0 <= split < 1:
        raise InputError(
            f"validation_split is {split!r}; it must be the fraction of the samples to validate "
            "with: 0, or more, but less than 1."
        )
    if _is_whole(frequency) and frequency < 1:
        raise InputError(
            f"validation_freq is {frequency!r}; it must be the number of epochs from one "
            "validation to the next, 1 or more, or a list of epochs."
        )


def require_numbers(model: keras.Model, spec: Any) -> None:
    """Raises an InputError if the data are text, and the model is known to take numbers.

    Args:
        model: The model.
        spec: The structure of a batch.
    """
    expected = {one.dtype for one in tf.nest.flatten(getattr(model, "inputs", None) or [])}
    x = spec[0] if isinstance(spec, (list, tuple)) else spec  # with an own step, of any length
    given = [getattr(leaf, "dtype", None) for leaf in tf.nest.flatten(x)]
    if expected and "string" not in expected and tf.string in given:
        raise InputError(
            f"The data are text, but the model '{model.name}' takes numbers "
            f"({', '.join(sorted(expected))}). Turn the text into numbers first, with a "
            "`keras.layers.TextVectorization`, say."
        )


@contextmanager
def explained(**data: Any) -> Iterator[None]:
    """Names the array that Keras refuses because of what it is made of.

    Args:
        data: What Keras looks at, by the names that the user knows.
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
                        f"`{name}` has an array of {_kind(leaf)}, where Keras takes numbers. Turn "
                        "it into numbers; for a model that reads text, pass `tf.constant(...)`, "
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
