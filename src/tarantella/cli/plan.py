"""The plan: which ranks there will be, on which hosts, devices and cores.

Pure functions of what is asked for and what the hosts have, so that every kind of machine can be
planned for, and tested, on any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tarantella.cli.host import Host
from tarantella.cli.options import Options


@dataclass(frozen=True)
class Rank:
    """A rank to be.

    Attributes:
        number: its number in the run
        host: name of its host
        local_rank: its number on that host
        gpu: its GPU, counted among those that are visible; None: it computes on the CPU
        cores: the cores set aside for it
        threads: how many threads it computes with
    """

    number: int
    host: str
    local_rank: int
    gpu: int | None
    cores: tuple[int, ...]
    threads: int


@dataclass(frozen=True)
class Plan:
    """What will be run, and what the user should know about it."""

    hosts: tuple[Host, ...]
    ranks: tuple[Rank, ...]
    warnings: tuple[str, ...] = ()

    @property
    def uses_gpus(self) -> bool:
        return any(rank.gpu is not None for rank in self.ranks)

    def ranks_of(self, host: Host) -> tuple[Rank, ...]:
        return tuple(rank for rank in self.ranks if rank.host == host.name)


def make_plan(options: Options, hosts: Sequence[Host]) -> Plan:
    """Share the devices of the hosts out to ranks.

    All hosts use their GPUs, or none does: a run is as fast as its slowest rank.
    """
    warnings: list[str] = []
    counts = [options.ranks or (0 if options.no_gpu else len(host.gpus)) for host in hosts]
    use_gpus = not options.no_gpu
    if use_gpus:
        for host, count in zip(hosts, counts, strict=True):
            if not host.gpus or len(host.gpus) < count:
                use_gpus = False
                warnings.append(_too_few_gpus(host, count))
    ranks: list[Rank] = []
    for host, count in zip(hosts, counts, strict=True):
        ranks += _ranks_of_host(host, count or 1, use_gpus, first=len(ranks))
    return Plan(tuple(hosts), tuple(ranks), tuple(warnings))


def _too_few_gpus(host: Host, ranks: int) -> str:
    way_out = "Use --no-gpu to run on the CPU without this warning."
    if ranks == 0:
        return f"No GPU was found on host {host.name}: one rank runs there, on the CPU. {way_out}"
    there = {0: "no GPU", 1: "1 GPU"}.get(len(host.gpus), f"{len(host.gpus)} GPUs")
    wanted = "1 rank" if ranks == 1 else f"{ranks} ranks"
    runs = "it runs" if ranks == 1 else "they run"
    return f"Host {host.name} has {there} for {wanted}: {runs} on the CPU. {way_out}"


def _ranks_of_host(host: Host, count: int, use_gpus: bool, first: int) -> list[Rank]:
    gpus = choose_gpus(host, count) if use_gpus else None
    shares = share_cores(host, count, gpus)
    limit = max(1, (host.core_limit or len(host.cores)) // count)
    return [
        Rank(
            number=first + local,
            host=host.name,
            local_rank=local,
            gpu=gpus[local] if gpus else None,
            cores=cores,
            threads=min(len(cores), limit),
        )
        for local, cores in enumerate(shares)
    ]


def choose_gpus(host: Host, count: int) -> tuple[int, ...]:
    """The GPUs to use: spread over the sockets, where the ranks' memory is, in their own order."""
    by_socket: dict[int | None, list[int]] = {}
    for index, gpu in enumerate(host.gpus):
        by_socket.setdefault(gpu.socket, []).append(index)
    in_turn = sorted(
        (turn, index) for group in by_socket.values() for turn, index in enumerate(group)
    )
    return tuple(sorted(index for _, index in in_turn[:count]))


def share_cores(host: Host, count: int, gpus: tuple[int, ...] | None) -> list[tuple[int, ...]]:
    """An even share of neighbouring cores for each rank, inside of one socket if that can be even.

    Args:
        host: the host
        count: number of ranks on it
        gpus: the GPU of each rank; its cores are taken from the socket that the GPU is attached to
    """
    sockets = [number for number, cores in enumerate(host.sockets) if cores]
    homes: list[int | None] = [sockets[rank * len(sockets) // count] for rank in range(count)]
    if gpus is not None and all(host.gpus[gpu].socket in sockets for gpu in gpus):
        homes = [host.gpus[gpu].socket for gpu in gpus]
    on_each = {homes.count(number) for number in sockets}
    if len(on_each) == 1:
        ranks_on_socket = on_each.pop()
        size = min(len(host.sockets[number]) for number in sockets) // ranks_on_socket
        if size > 0:
            return [
                _cut(host.sockets[home or 0], size, homes[:rank].count(home))
                for rank, home in enumerate(homes)
            ]
    size = len(host.cores) // count
    if size == 0:  # more ranks than cores
        return [(host.cores[rank % len(host.cores)],) for rank in range(count)]
    return [_cut(host.cores, size, rank) for rank in range(count)]


def _cut(cores: tuple[int, ...], size: int, position: int) -> tuple[int, ...]:
    return cores[position * size : (position + 1) * size]
