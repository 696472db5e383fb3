"""Sums over ranks of several hosts, of which one a host crosses the network.

Each host has leaders, as many as the host with the fewest ranks has ranks, and each leader has a
segment of the array:

1. Reduce-scatter on each host: a leader gets its segment from all ranks of its host, and adds up.
2. Allreduce between hosts: the leaders of one segment, one on each host, each get a part of it from
   the others, add it up, and send the sum to them.
3. Allgather on each host: a leader sends its segment to all ranks of its host.

So a host with P ranks sends what a host with one rank sends: of H hosts, each 2 (H - 1) / H of the
array, the least possible. With one rank on each host, only the second step sends anything. MPICH's
allreduce sends as little where all hosts have as many ranks and both numbers are powers of two;
1.5 times as much for three hosts with a rank each, 2.5 times for two hosts with three.

Numbers of 16 bits are added up in float32, which MPI cannot do. A sum is rounded to 16 bits when it
is sent: that of a host if it has several ranks, and that of all hosts. Contributions are added in
the order of the ranks, and of the hosts, and each sum is computed by one rank only: all ranks get
the same bits, in every run.

These are messages from rank to rank, which use all of a link of 1 Gbit/s; MPICH's `Ialltoallv` and
`Iallgatherv` use half of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Every host exchanges parts with every other. For parts that are smaller than this, MPI's own
# allreduce is quicker: it takes as many rounds as the logarithm of the number of hosts.
_LEAST_PART = 4 << 10


@dataclass(frozen=True)
class Exchange:
    """Communication in progress.

    Attributes:
        requests: MPI's requests; none if there is nothing to wait for.
        then: What to do when they are done; another exchange may follow.
    """

    requests: list[Any]
    then: Callable[[], Exchange | None]


@dataclass(frozen=True)
class Peers:
    """The ranks that a rank exchanges numbers with.

    Attributes:
        rank: This rank.
        neighbours: The ranks of its host, and it is one of them.
        leaders: Those of them that have a segment each.
        counterparts: The leaders of this rank's segment, one on each host, and it is one of them;
            none if it has no segment.
    """

    rank: int
    neighbours: tuple[int, ...]
    leaders: tuple[int, ...]
    counterparts: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, host_names: Sequence[str]) -> Peers:
        """The peers of a rank, with the host name of each rank."""
        hosts: dict[str, list[int]] = {}
        for other, name in enumerate(host_names):
            hosts.setdefault(name, []).append(other)
        # As many as every host has: so all hosts have the same segments.
        segments = min(map(len, hosts.values()))
        neighbours = hosts[host_names[rank]]
        local_rank = neighbours.index(rank)
        return cls(
            rank,
            tuple(neighbours),
            tuple(neighbours[:segments]),
            tuple(host[local_rank] for host in hosts.values()) if local_rank < segments else (),
        )


class HierarchicalAllreduce:
    """A flat array that is being summed.

    Args:
        source: What this rank contributes, or MPI.IN_PLACE for what is in the target.
        target: Where the sum will be.
        communicator: One of all ranks.
        peers: Those of this rank.
        tag: For numbers on their way to a sum; the next one is for sums on their way back. Two
            are enough: the ranks of a host exchange nothing in the second step.
        then: Called when all is done.
    """

    def __init__(
        self,
        source: Any,
        target: Array,
        communicator: Any,
        peers: Peers,
        tag: int,
        then: Callable[[], None],
    ) -> None:
        from mpi4py import MPI

        self._rounds = _is_16_bit_float(target.dtype)
        sent_as = np.uint16 if self._rounds else target.dtype  # MPI does not know all such types
        self._target = target.view(sent_as)
        self._source = self._target if source is MPI.IN_PLACE else source.view(sent_as)
        self._dtype = target.dtype
        self._communicator = communicator
        self._peers = peers
        self._tag = tag
        self._then = then

    def start(self) -> Exchange:
        """The leaders of this host get their segments from its ranks."""
        segments = _split(self._source, self._peers.leaders)
        if self._peers.rank not in segments:
            return self._exchange({}, segments, self._tag, self._hand_out)
        values = self._own_and_room(segments, self._peers.neighbours)
        return self._exchange(values, segments, self._tag, partial(self._between_hosts, values))

    def _between_hosts(self, values: Mapping[int, Array]) -> Exchange:
        """Each leader gets its part of its segment from the other hosts."""
        parts = _split(self._sum(values.values()), self._peers.counterparts)
        sums = self._own_and_room(parts, self._peers.counterparts)
        return self._exchange(sums, parts, self._tag, partial(self._send_sum, sums))

    def _send_sum(self, sums: Mapping[int, Array]) -> Exchange:
        """Each leader sends the sum of its part to the other hosts."""
        segment = _split(self._target, self._peers.leaders)[self._peers.rank]
        parts = _split(segment, self._peers.counterparts)
        own = parts[self._peers.rank]
        own[:] = self._sum(sums.values())
        sent = dict.fromkeys(self._peers.counterparts, own)
        return self._exchange(parts, sent, self._tag + 1, self._hand_out)

    def _hand_out(self) -> Exchange:
        """The ranks of this host get the sum from its leaders."""
        segments = _split(self._target, self._peers.leaders)
        own = segments.get(self._peers.rank)
        sent = {} if own is None else dict.fromkeys(self._peers.neighbours, own)
        return self._exchange(segments, sent, self._tag + 1, self._then)

    def _own_and_room(self, own: Mapping[int, Array], ranks: Iterable[int]) -> dict[int, Array]:
        """What this rank has for itself, and room for what the others send it, by rank."""
        mine = own[self._peers.rank]
        return {rank: mine if rank == self._peers.rank else np.empty_like(mine) for rank in ranks}

    def _exchange(
        self,
        received: Mapping[int, Array],
        sent: Mapping[int, Array],
        tag: int,
        then: Callable[[], Exchange | None],
    ) -> Exchange:
        """Starts messages from and to other ranks; what is for this rank itself is left out."""
        messages = self._communicator
        requests = [messages.Irecv(received[rank], rank, tag) for rank in self._others(received)]
        requests += [messages.Isend(sent[rank], rank, tag) for rank in self._others(sent)]
        return Exchange(requests, then)

    def _others(self, ranks: Iterable[int]) -> list[int]:
        """Begins with the next rank: if all began with the first, it would have to wait."""
        others = [rank for rank in ranks if rank != self._peers.rank]
        return sorted(others, key=lambda rank: (rank < self._peers.rank, rank))

    def _sum(self, values: Iterable[Array]) -> Array:
        first, *others = values
        if not others:
            return first
        # Gradients of mixed precision may overflow; loss scaling expects it.
        with np.errstate(over="ignore", invalid="ignore"):
            if not self._rounds:
                total = first + others[0]
                for each in others[1:]:
                    np.add(total, each, out=total)
                return total
            total = first.view(self._dtype).astype(np.float32)
            for each in others:
                np.add(total, each.view(self._dtype), out=total)
            return total.astype(self._dtype).view(np.uint16)


def uses_least_bytes(target: Array, hosts: int) -> bool:
    """Whether an array is summed like this: one that is large enough, or that MPI cannot sum."""
    return target.nbytes >= hosts * _LEAST_PART or _is_16_bit_float(target.dtype)


def _is_16_bit_float(dtype: np.dtype) -> bool:
    return dtype.itemsize == 2 and dtype.kind not in "iu"


def _split(array: Array, ranks: Sequence[int]) -> dict[int, Array]:
    """A piece of an array for each rank, by rank."""
    return dict(zip(ranks, np.array_split(array, len(ranks)), strict=True))
