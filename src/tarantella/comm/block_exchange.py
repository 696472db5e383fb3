"""Sends a long run of bytes from every rank to every rank, with little memory.

Each rank sends one block at a time. A block's memory goes back to the system when it has been sent,
so what is received can grow by as much as what is left to send shrinks.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tarantella.comm import buffers
from tarantella.comm.waiting import barrier

if TYPE_CHECKING:
    from mpi4py import MPI

Array = npt.NDArray[Any]


class OutgoingBlocks:
    """The bytes that this rank is going to send, in the order in which they were written.

    Args:
        ranks: How many ranks send; the blocks of all of them together fit into one message.
    """

    def __init__(self, ranks: int) -> None:
        self.block_bytes = max(buffers.MESSAGE_BYTES // ranks, buffers.SMALL_BYTES)
        self._blocks: deque[Array] = deque()
        self._free = 0

    def write(self, array: Array) -> None:
        """Appends the bytes of the array's elements; they are copied."""
        data = as_bytes(np.ascontiguousarray(array))
        while data.size:
            if not self._free:
                self._blocks.append(_new_block(self.block_bytes))
                self._free = self.block_bytes
            begin, count = self.block_bytes - self._free, min(data.size, self._free)
            self._blocks[-1][begin : begin + count] = data[:count]
            self._free -= count
            data = data[count:]

    def take(self, size: int) -> Array:
        """Removes and returns the first block, of which `size` bytes are in use."""
        return self._blocks.popleft()[:size] if size else np.empty(0, np.uint8)


def exchange(
    outgoing: OutgoingBlocks,
    lengths: Sequence[int],
    targets: Sequence[Iterator[Array]],
    comm: MPI.Comm,
) -> None:
    """Puts the bytes of every rank where they belong.

    Args:
        outgoing: What this rank sends; it is empty afterwards.
        lengths: How many bytes each rank sends, known to all ranks.
        targets: For each rank, flat arrays to fill with its bytes, one after the other.
        comm: The communicator.
    """
    block_bytes = outgoing.block_bytes
    fillers = [_Filler(of_rank) for of_rank in targets]
    scratch = np.empty(sum(min(length, block_bytes) for length in lengths), np.uint8)
    for start in range(0, max(lengths), block_bytes):
        sizes = [min(max(length - start, 0), block_bytes) for length in lengths]
        received = scratch[: sum(sizes)]
        barrier(comm)
        comm.Allgatherv(outgoing.take(sizes[comm.Get_rank()]), (received, sizes))
        for filler, data in zip(fillers, np.split(received, np.cumsum(sizes)[:-1]), strict=True):
            filler.fill(data)


def as_bytes(array: Array) -> Array:
    """The bytes of a C-contiguous array's elements, without a copy."""
    return array.reshape(-1).view(np.uint8)


class _Filler:
    """Fills arrays one after the other, with data that comes in pieces of any size."""

    def __init__(self, targets: Iterator[Array]) -> None:
        self._targets = targets
        self._target: Array = np.empty(0, np.uint8)

    def fill(self, data: Array) -> None:
        while data.size:
            while not self._target.size:
                self._target = next(self._targets)
            count = min(data.size, self._target.size)
            self._target[:count] = data[:count]
            self._target, data = self._target[count:], data[count:]


def _new_block(size: int) -> Array:
    # malloc keeps what is freed for later, which may be as much as all that the rank has computed.
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)
