"""MPI on host buffers: many arrays in few messages, and none too large for any MPI library.

Nothing here checks that the ranks agree; see `agreement`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mpi4py import MPI

Array = npt.NDArray[Any]

# Far below the 2**31 elements that an MPI count holds, for speed: an allreduce needs a scratch
# buffer as large as the message, and from 32 MiB on malloc asks the system for new pages each
# time. Allreduce in place on two ranks of one machine: 2.4 GB/s in one piece, 7.8 GB/s in many.
MESSAGE_BYTES = 16 << 20
# Arrays up to this size share a message: copying them costs less than a message of their own.
SMALL_BYTES = 64 << 10


def allreduce_arrays(arrays: Sequence[Array], op: MPI.Op, comm: MPI.Comm) -> None:
    """Reduces arrays over the ranks, in place.

    Equal inputs give equal bits on every rank and in every run: MPI libraries follow the
    standard's advice that an allreduce depends on nothing but its arguments and the ranks'
    order, and addition is commutative. (The bits inside a NaN may differ.)

    Args:
        arrays: C-contiguous and writeable, of the same shapes and dtypes on all ranks.
        op: The reduction.
        comm: The communicator.
    """
    from mpi4py import MPI

    def reduce(buffer: Array) -> None:
        for piece in _pieces(buffer):
            comm.Allreduce(MPI.IN_PLACE, piece, op)

    _in_messages([array.reshape(-1) for array in arrays], reduce)


def broadcast_arrays(arrays: Sequence[Array], comm: MPI.Comm, root: int = 0) -> None:
    """Gives every rank the elements that the root's arrays have, in place.

    Args:
        arrays: C-contiguous, of the same shapes and dtypes on all ranks; writeable, but for the
            root's, which are only read.
        comm: The communicator.
        root: The rank whose elements are sent.

    Example:
        >>> weights = [np.full((3, 4), comm.rank), np.arange(5.0) * comm.rank]
        >>> broadcast_arrays(weights, comm)
    """
    writes = comm.Get_rank() != root

    def broadcast(buffer: Array) -> None:
        for piece in _pieces(buffer):
            comm.Bcast(piece, root)

    _in_messages([_as_bytes(array) for array in arrays], broadcast, writes)


def allgather_arrays(arrays: Sequence[Array], comm: MPI.Comm) -> list[list[Array]]:
    """Returns every rank's arrays, by rank.

    Args:
        arrays: C-contiguous. All ranks have as many, with the same dtypes and the same shapes but
            for the first dimension. They become part of the result.
        comm: The communicator.
    """
    rank = comm.Get_rank()
    sizes = np.empty((comm.Get_size(), len(arrays)), np.int64)
    comm.Allgather(np.array([_leading_size(array) for array in arrays], np.int64), sizes)
    gathered = [
        [
            np.empty((size, *array.shape[1:]) if array.ndim else (), array.dtype)
            for size, array in zip(of_rank.tolist(), arrays, strict=True)
        ]
        for of_rank in sizes
    ]
    gathered[rank] = list(arrays)
    if sum(array.nbytes for of_rank in gathered for array in of_rank) <= MESSAGE_BYTES:
        _allgather_in_one(gathered, comm)
    else:
        # Large results are received where they will stay, and no message holds all ranks' data.
        for root, of_root in enumerate(gathered):
            broadcast_arrays(of_root, comm, root)
    return gathered


def allgather_bytes(data: bytes, comm: MPI.Comm) -> list[bytes]:
    """Returns every rank's bytes, by rank."""
    gathered = allgather_arrays([np.frombuffer(data, np.uint8)], comm)
    return [of_rank.tobytes() for (of_rank,) in gathered]


def _allgather_in_one(gathered: list[list[Array]], comm: MPI.Comm) -> None:
    rank = comm.Get_rank()
    counts = [sum(array.nbytes for array in of_rank) for of_rank in gathered]
    sent = np.concatenate([np.empty(0, np.uint8), *map(_as_bytes, gathered[rank])])
    received = np.empty(sum(counts), np.uint8)
    comm.Allgatherv(sent, (received, counts))
    for other, part in enumerate(np.split(received, np.cumsum(counts)[:-1])):
        if other != rank:
            _copy_out(part, [_as_bytes(array) for array in gathered[other]])


def _in_messages(
    buffers: Sequence[Array], send: Callable[[Array], None], writes: bool = True
) -> None:
    """Calls `send` on flat buffers, the small ones of one dtype together in one.

    With `writes`, what `send` leaves in a shared buffer is copied back to where it came from.
    """
    small: dict[np.dtype[Any], list[Array]] = {}
    for buffer in buffers:
        if buffer.nbytes > SMALL_BYTES:
            send(buffer)
        else:
            small.setdefault(buffer.dtype, []).append(buffer)
    for together in small.values():
        shared = np.concatenate(together) if len(together) > 1 else together[0]
        send(shared)
        if writes and len(together) > 1:
            _copy_out(shared, together)


def _copy_out(source: Array, targets: Sequence[Array]) -> None:
    start = 0
    for target in targets:
        target[...] = source[start : start + target.size]
        start += target.size


def _pieces(buffer: Array) -> Iterator[Array]:
    step = max(1, MESSAGE_BYTES // buffer.itemsize)
    for start in range(0, buffer.size, step):
        yield buffer[start : start + step]


def _as_bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _leading_size(array: Array) -> int:
    return array.shape[0] if array.ndim else 1
