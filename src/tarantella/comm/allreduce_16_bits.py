"""Sums of numbers of 16 bits over the ranks, of which one a host crosses the network.

MPI cannot add such numbers and keep their sums in 32 bits. So the ranks send them to each other and
add them up in float32. Each host has carriers, as many as the host with the fewest ranks has ranks,
and each carrier has a segment of the array:

1. It gets its segment from all ranks of its host, and adds it up.
2. The carriers of one segment, one on each host, do the same with parts of it: each gets its part
   from the others, adds it up, and sends the sum to them.
3. It hands its segment to all ranks of its host.

So a host with P ranks sends what a host with one rank sends: of H hosts, each 2 (H - 1) / H of the
array, the least possible. With one rank on each host, only the second step sends anything.

A sum is rounded to 16 bits when it is sent: that of a host if it has several ranks, and that of all
hosts. Contributions are added in the order of the ranks, and of the hosts, and each sum is rounded
by one rank only: all ranks get the same bits, in every run.

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
class Route:
    """The ranks that a rank exchanges numbers with.

    Attributes:
        rank: This rank.
        neighbours: The ranks of its host, and it is one of them.
        carriers: Those of them that have a segment each.
        counterparts: The carriers of this rank's segment, one on each host, and it is one of them;
            none if it has no segment.
    """

    rank: int
    neighbours: tuple[int, ...]
    carriers: tuple[int, ...]
    counterparts: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, host_names: Sequence[str]) -> Route:
        """The route of a rank, with the host name of each rank."""
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


class SumOf16Bits:
    """A flat array of 16-bit numbers that is being summed.

    Args:
        source: What this rank contributes, or MPI.IN_PLACE for what is in the target.
        target: Where the sum will be.
        communicator: One of all ranks.
        route: The route of this rank.
        tag: For numbers on their way to a sum; the next one is for sums on their way back. Two
            are enough: the ranks of a host exchange nothing in the second step.
        then: Called when all is done.
    """

    def __init__(
        self,
        source: Any,
        target: Array,
        communicator: Any,
        route: Route,
        tag: int,
        then: Callable[[], None],
    ) -> None:
        from mpi4py import MPI

        # As integers, since MPI does not know all types of 16 bits.
        self._target = target.view(np.uint16)
        self._source = self._target if source is MPI.IN_PLACE else source.view(np.uint16)
        self._dtype = target.dtype
        self._communicator = communicator
        self._route = route
        self._tag = tag
        self._then = then

    def start(self) -> Exchange:
        """The carriers of this host get their segments from its ranks."""
        segments = _split(self._source, self._route.carriers)
        if self._route.rank not in segments:
            return self._exchange({}, segments, self._tag, self._hand_out)
        values = self._own_and_room(segments, self._route.neighbours)
        return self._exchange(values, segments, self._tag, partial(self._between_hosts, values))

    def _between_hosts(self, values: Mapping[int, Array]) -> Exchange:
        """Each carrier gets its part of its segment from the other hosts."""
        parts = _split(self._sum(values.values()), self._route.counterparts)
        sums = self._own_and_room(parts, self._route.counterparts)
        return self._exchange(sums, parts, self._tag, partial(self._send_sum, sums))

    def _send_sum(self, sums: Mapping[int, Array]) -> Exchange:
        """Each carrier sends the sum of its part to the other hosts."""
        segment = _split(self._target, self._route.carriers)[self._route.rank]
        parts = _split(segment, self._route.counterparts)
        own = parts[self._route.rank]
        own[:] = self._sum(sums.values())
        sent = dict.fromkeys(self._route.counterparts, own)
        return self._exchange(parts, sent, self._tag + 1, self._hand_out)

    def _hand_out(self) -> Exchange:
        """The ranks of this host get the sum from its carriers."""
        segments = _split(self._target, self._route.carriers)
        own = segments.get(self._route.rank)
        sent = {} if own is None else dict.fromkeys(self._route.neighbours, own)
        return self._exchange(segments, sent, self._tag + 1, self._then)

    def _own_and_room(self, own: Mapping[int, Array], ranks: Iterable[int]) -> dict[int, Array]:
        """What this rank has for itself, and room for what the others send it, by rank."""
        mine = own[self._route.rank]
        return {rank: mine if rank == self._route.rank else np.empty_like(mine) for rank in ranks}

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
        others = [rank for rank in ranks if rank != self._route.rank]
        return sorted(others, key=lambda rank: (rank < self._route.rank, rank))

    def _sum(self, values: Iterable[Array]) -> Array:
        first, *others = values
        if not others:
            return first
        total = np.zeros(len(first), np.float32)
        for each in (first, *others):
            np.add(total, each.view(self._dtype), out=total)
        return total.astype(self._dtype).view(np.uint16)


def _split(array: Array, ranks: Sequence[int]) -> dict[int, Array]:
    """A piece of an array for each rank, by rank."""
    return dict(zip(ranks, np.array_split(array, len(ranks)), strict=True))
