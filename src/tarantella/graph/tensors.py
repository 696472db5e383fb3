"""TensorFlow's tensors and variables, and those of Keras, as values of `comm`'s collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tarantella.comm.values import strings
from tarantella.comm.values.leaf import Array, Leaf, is_numeric, register
from tarantella.errors import InputError


@dataclass(frozen=True)
class _TensorLeaf(Leaf):
    """A dense tensor that has a value."""

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(object if self.is_string else self.source.dtype.as_numpy_dtype)

    def read(self, dtype: npt.DTypeLike | None = None) -> Array:
        # numpy() copies, as its documentation promises; a second copy is not needed.
        dtype = self.numpy_dtype if dtype is None else dtype
        return np.asarray(self.source.numpy(), dtype, order="C").reshape(self.shape)

    def result(self, array: Array) -> Any:
        return tf.convert_to_tensor(array, tf.string if self.is_string else None)


class _TensorFlow:
    """What collectives need to know of TensorFlow; see `comm.values.leaf.Tensors`."""

    def leaf(self, value: Any) -> Leaf | None:
        if not tf.is_tensor(value):
            return None
        if isinstance(value, (tf.IndexedSlices, tf.RaggedTensor, tf.SparseTensor)):
            raise InputError(f"a {type(value).__name__} is not dense; convert it to a dense tensor")
        if tf.is_symbolic_tensor(value):
            raise InputError("a symbolic tensor has no value; call this outside of tf.function")
        tensor = tf.convert_to_tensor(value)  # reads a variable, of TensorFlow or of Keras
        dtype = strings.BYTES if tensor.dtype == tf.string else tensor.dtype.name
        if dtype != strings.BYTES and not is_numeric(dtype):
            raise InputError(f"tensors of {dtype} cannot be sent to other ranks; cast them first")
        return _TensorLeaf(tensor, "tensor", dtype, tuple(tensor.shape))

    def is_tracing(self) -> bool:
        return not tf.executing_eagerly()


def install() -> None:
    """Lets collectives take tensors."""
    register(_TensorFlow())
