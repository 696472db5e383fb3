"""What `allreduce` computes: the form in which MPI reduces a leaf, and the way back from it.

- float16, bfloat16 and float8 are reduced in float32 and rounded once, at the end. Not every MPI
  library knows them, and rounding after each rank would lose digits.
- Integers are summed in their own type, and wrap around as NumPy's do. A Python integer does not:
  its sum is exact.
- The mean of integers is float64, as in NumPy.
- The minimum and maximum of anything with a NaN are NaN, as in NumPy; MPI leaves that open.
- Booleans are True and False only: "max" is True where any rank has True, "min" where all have.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tarantella.comm.values.leaf import Leaf
from tarantella.errors import InputError

Array = npt.NDArray[Any]

OPERATIONS = ("sum", "mean", "min", "max")


def check(leaf: Leaf, op: str) -> None:
    """Raises an InputError if `op` means nothing for this leaf."""
    if leaf.is_string:
        raise InputError("strings cannot be reduced")
    if leaf.dtype == "bool" and op in ("sum", "mean"):
        raise InputError(
            f"booleans have no {op}; use op='max' for any, op='min' for all, or cast to a number"
        )
    if leaf.dtype.startswith("complex") and op in ("min", "max"):
        raise InputError(f"complex numbers have no {op}")


def load(leaf: Leaf, op: str) -> Array:
    """Returns a new array to be reduced by MPI's sum, minimum or maximum in place of the leaf."""
    if _is_exact(leaf, op):
        number = int(leaf.read())
        return np.array([number >> 32, number & 0xFFFFFFFF], np.int64)
    work = leaf.read(_work_dtype(leaf, op))
    if leaf.dtype == "bool":
        return work.view(np.uint8)
    if leaf.dtype.startswith("complex"):
        return work.reshape(-1).view(work.real.dtype)  # some MPI libraries lack complex numbers
    if _is_ordered(leaf, op):
        return _to_ordered(work, op)
    return work


def unload(work: Array, leaf: Leaf, op: str, size: int) -> Array:
    """Returns the result for the leaf, from what MPI left in the array that `load` made.

    Args:
        work: The reduced array; it may be reused.
        leaf: The leaf that was loaded.
        op: The operation that was asked for.
        size: The number of ranks.
    """
    if _is_exact(leaf, op):
        if leaf.returns == "python":
            return np.array((int(work[0]) << 32) + int(work[1]), object)
        return ((work[:1] << 32) + work[1:]).reshape(())  # arrays wrap around without a warning
    if leaf.dtype == "bool":
        return work.view(np.bool_)
    if leaf.dtype.startswith("complex"):
        work = work.view(leaf.numpy_dtype).reshape(leaf.shape)
    elif _is_ordered(leaf, op):
        work = _from_ordered(work)
    if op == "mean":
        np.divide(work, size, out=work)
    if _is_narrow_float(leaf):
        with np.errstate(over="ignore", invalid="ignore"):  # too large becomes inf or NaN, silently
            return work.astype(leaf.numpy_dtype)
    return work


def _is_exact(leaf: Leaf, op: str) -> bool:
    """Whether halves of a single 64-bit integer are summed, so that the sum cannot overflow.

    Only Python integers need it. A NumPy integer is summed in the same way, as another rank may
    have a Python integer.
    """
    return op == "sum" and leaf.dtype == "int64" and leaf.shape == ()


def _is_narrow_float(leaf: Leaf) -> bool:
    return leaf.dtype in ("float16", "bfloat16") or leaf.dtype.startswith("float8_")


def _work_dtype(leaf: Leaf, op: str) -> np.dtype[Any]:
    if _is_narrow_float(leaf):
        return np.dtype(np.float32)
    if op == "mean" and leaf.numpy_dtype.kind in "iu":
        return np.dtype(np.float64)
    return np.dtype(leaf.dtype)


def _is_ordered(leaf: Leaf, op: str) -> bool:
    return op in ("min", "max") and _work_dtype(leaf, op).kind == "f"


def _to_ordered(work: Array, op: str) -> Array:
    """Turns floats into integers of the same order, with NaN at the end that wins.

    All ranks then agree on every bit, also for 0.0 and -0.0, which compare equal as floats.
    """
    work[np.isnan(work)] = np.copysign(np.nan, 1.0 if op == "max" else -1.0)
    return _flip_negative(work.view(f"i{work.itemsize}"))


def _from_ordered(work: Array) -> Array:
    return _flip_negative(work).view(f"f{work.itemsize}")


def _flip_negative(bits: Array) -> Array:
    """Reverses the order of negative floats' bits, which grow as the float falls; or undoes it."""
    info = np.iinfo(bits.dtype)
    bits ^= (bits >> (info.bits - 1)) & info.max
    return bits
