"""The collectives for users: `allreduce`, `broadcast`, `allgather` and `barrier`.

Every rank must call the same ones in the same order, with values of the same structure, shapes and
dtypes. If they do not, each rank gets an error that says which rank has what.

A value is an array, a tensor, a variable, a number, a string, or any nesting of dicts, lists,
tuples and named tuples of those; None stays None. Results have the type of the value: a tensor for
a tensor or a variable, an array for an array, a float for a float. They share no memory with the
value, which does not change. With one rank, results are copies, and MPI is not used.

Threads of one rank take turns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tarantella.comm import agreement, buffers, structures
from tarantella.comm.buffers import Array
from tarantella.comm.values import reductions, strings
from tarantella.comm.values.leaf import Leaf, classify, is_tracing
from tarantella.errors import InputError
from tarantella.runtime import world

if TYPE_CHECKING:
    from mpi4py import MPI


def allreduce(value: Any, op: str = "sum") -> Any:
    """Combines the values of all ranks, element by element; every rank gets the result.

    The same values on the same number of ranks give bit-identical results, on every rank and in
    every run.

    Args:
        value (array, tensor, number, nested structure): What this rank contributes; see above.
            float16, bfloat16 and float8 are summed in float32. Arrays of integers wrap around,
            Python integers do not. Strings are refused.
        op: "sum", "mean" (of integers in float64), "min" or "max" (NaN wins). Booleans take only
            "max" (any) and "min" (all), complex numbers only "sum" and "mean".

    Returns:
        A value of the same structure.

    Raises:
        InputError: If any rank has a value that cannot be reduced.
        MismatchError: If the ranks' values differ in structure, shape or dtype.

    Example:
        >>> import numpy as np
        >>> import tarantella as tnt
        >>> tnt.allreduce({"correct": 12, "loss": np.array([0.5, 0.25])})  # the same on two ranks
        {'correct': 24, 'loss': array([1. , 0.5])}
    """

    def describe(leaf: Leaf) -> str:
        reductions.check(leaf, op)
        return f"{leaf.dtype} {leaf.shape}"

    problem = None
    if op not in reductions.OPERATIONS:
        problem = InputError(
            f"allreduce: op={op!r} is not one of {', '.join(reductions.OPERATIONS)}"
        )
    with _together(f"allreduce(op={op!r})", value, describe, problem) as (leaves, comm):
        arrays = [reductions.load(leaf, op) for leaf in leaves]
        if comm is not None:
            buffers.allreduce_arrays(arrays, _mpi_operation(op), comm)
        size = world.get_size()
        return structures.rebuild(
            value,
            (
                leaf.result(reductions.unload(array, leaf, op, size))
                for leaf, array in zip(leaves, arrays, strict=True)
            ),
        )


def broadcast(value: Any, root: int | None = None) -> Any:
    """Gives every rank the value of one rank.

    Args:
        value (array, tensor, number, string, nested structure): On the root, what is sent; see
            above. On the other ranks, a value of the same structure, shapes and dtypes; its
            contents do not matter. Strings may have any length.
        root: The rank whose value is sent, by default the master rank.

    Returns:
        The root's value.

    Raises:
        InputError: If any rank has a value that cannot be sent, or the root is not a rank.
        MismatchError: If the ranks' values differ in structure, shape or dtype, or their roots.

    Example:
        >>> import tarantella as tnt
        >>> tnt.broadcast([tnt.get_rank(), "hello"])  # on every rank
        [0, 'hello']
    """
    source, problem = _root(root)
    call = f"broadcast(root={source})"
    with _together(call, value, lambda leaf: f"{leaf.dtype} {leaf.shape}", problem) as (
        leaves,
        comm,
    ):
        if comm is None:
            arrays = [leaf.read() for leaf in leaves]
        else:
            arrays = _broadcast_leaves(leaves, comm, source)
        return _rebuild(value, leaves, arrays)


def allgather(value: Any) -> list[Any]:
    """Gives every rank the values of all ranks.

    Args:
        value (array, tensor, number, string, nested structure): What this rank contributes; see
            above. The first dimension of an array or tensor may differ between ranks, and strings
            may have any length.

    Returns:
        A list with the value of each rank, in the order of the ranks. Arrays are not joined; use
        `np.concatenate` on the list for that.

    Raises:
        InputError: If any rank has a value that cannot be sent.
        MismatchError: If the ranks' values differ in structure or dtype, or in any dimension but
            the first.

    Example:
        >>> import numpy as np
        >>> import tarantella as tnt
        >>> tnt.allgather(np.arange(tnt.get_rank() + 1))  # on each of two ranks
        [array([0]), array([0, 1])]
    """
    with _together("allgather()", value, _describe_growing) as (leaves, comm):
        if comm is None:
            return [_rebuild(value, leaves, [leaf.read() for leaf in leaves])]
        gathered = buffers.allgather_arrays(
            [array for leaf in leaves for array in _to_send(leaf)], comm
        )
        return [_rebuild(value, leaves, _received(leaves, iter(sent))) for sent in gathered]


def barrier() -> None:
    """Waits until every rank has called it.

    Example:
        >>> from pathlib import Path
        >>> import tarantella as tnt
        >>> if tnt.is_master_rank():
        ...     _ = Path("words.txt").write_text("a b c")
        >>> tnt.barrier()
        >>> Path("words.txt").read_text()  # every rank finds the file
        'a b c'
    """
    # Agreeing means waiting for all: no rank can know that the others are here before they are.
    with _together("barrier()", None, str):
        pass


@contextmanager
def _together(
    call: str,
    value: Any,
    describe: Callable[[Leaf], str],
    problem: Exception | None = None,
) -> Iterator[tuple[list[Leaf], MPI.Comm | None]]:
    """Enters a collective: all ranks agree on the call, or all get an error.

    A rank that cannot take part tells the others, and they do not wait for it.

    Args:
        call: The call and its arguments, which must be the same on all ranks.
        value: The structure to communicate.
        describe: What must be the same on all ranks about a leaf; raises an InputError for one that
            is refused.
        problem: What is known to be wrong already.

    Returns:
        The leaves of `value`, and the communicator, which is None with one rank.
    """
    lines: list[agreement.Line] = []
    leaves: list[Leaf] = []
    try:
        if problem is not None:
            raise problem
        _refuse_tracing(call)
        for path, item in structures.walk(value):
            if structures.is_leaf(item):
                leaf, text = _leaf(item, path, call, describe)
                leaves.append(leaf)
            else:
                text = structures.describe_container(item)
            lines.append((path, text))
    except Exception as error:
        problem = error
    if world.get_size() > 1:
        with agreement.turn() as comm:
            agreement.agree(call, lines, comm, problem)
            yield leaves, comm
    elif problem is not None:
        raise problem
    else:
        yield leaves, None


def _leaf(item: Any, path: str, call: str, describe: Callable[[Leaf], str]) -> tuple[Leaf, str]:
    try:
        leaf = classify(item)
        return leaf, describe(leaf)
    except InputError as error:
        where = f", for {path}" if path else ""
        raise InputError(f"{call}: {error}{where}") from None


def _refuse_tracing(call: str) -> None:
    if is_tracing():
        raise InputError(
            f"{call} was called inside a tf.function, where it would run once, while the function "
            "is traced, and not at each step; call it outside"
        )


def _describe_growing(leaf: Leaf) -> str:
    if not leaf.shape:
        return f"{leaf.dtype} ()"
    return f"{leaf.dtype} ({', '.join(['*', *map(str, leaf.shape[1:])])})"


def _mpi_operation(op: str) -> MPI.Op:
    from mpi4py import MPI

    return {"sum": MPI.SUM, "mean": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}[op]


def _root(root: int | None) -> tuple[int, InputError | None]:
    size = world.get_size()
    try:
        source = world.get_master_rank() if root is None else operator.index(root)
    except TypeError:
        source = -1
    if 0 <= source < size:
        return source, None
    return source, InputError(
        f"broadcast: root={root!r} is not a rank; ranks go from 0 to {size - 1}"
    )


def _broadcast_leaves(leaves: list[Leaf], comm: MPI.Comm, root: int) -> list[Array]:
    """Returns the elements of the root's leaves, in new arrays."""
    if comm.Get_rank() == root:
        sent = [_to_send(leaf) for leaf in leaves]
        buffers.broadcast_arrays([pair[0] for pair in sent if len(pair) == 2], comm, root)
    else:
        sent = [
            [np.empty(leaf.shape, np.int64 if leaf.is_string else leaf.numpy_dtype)]
            for leaf in leaves
        ]
        lengths = [s for s, leaf in zip(sent, leaves, strict=True) if leaf.is_string]
        # The lengths of strings go first: they say how many bytes there are to receive.
        buffers.broadcast_arrays([array for (array,) in lengths], comm, root)
        for pair in lengths:
            pair.append(np.empty(int(pair[0].sum()), np.uint8))
    buffers.broadcast_arrays([pair[-1] for pair in sent], comm, root)
    return _received(leaves, (array for pair in sent for array in pair))


def _to_send(leaf: Leaf) -> list[Array]:
    """The elements of a leaf as buffers: lengths and bytes for strings, one buffer otherwise."""
    if leaf.is_string:
        return list(strings.encode(leaf.read(), leaf.dtype))
    return [leaf.read()]


def _received(leaves: list[Leaf], arrays: Iterator[Array]) -> list[Array]:
    return [
        strings.decode(next(arrays), next(arrays), leaf.dtype) if leaf.is_string else next(arrays)
        for leaf in leaves
    ]


def _rebuild(value: Any, leaves: list[Leaf], arrays: list[Array]) -> Any:
    return structures.rebuild(
        value, (leaf.result(array) for leaf, array in zip(leaves, arrays, strict=True))
    )
