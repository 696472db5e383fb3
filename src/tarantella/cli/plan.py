"""The plan: which ranks there will be, on which hosts, devices and cores.

Pure functions of what is asked for and what the hosts have, so that every kind of machine can be
planned for, and tested, on any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tarantella.cli.gpu_shortage import find_shortage
from tarantella.cli.host import Host
from tarantella.cli.options import Options
from tarantella.errors import InputError
from tarantella.runtime import words
from tarantella.runtime.configuration import GPU
from tarantella.runtime.core_shortage import core_warnings


@dataclass(frozen=True)
class Rank:
    """A planned rank.

    Attributes:
        number: its number in the run
        host: name of its host
        local_rank: its number on that host
        gpu: its GPU, counted among those that are visible; None: it computes on the CPU
        cores: the cores set aside for it
        domain: the NUMA domain that its memory is bound to; None: it is not
        threads: how many threads it computes with
    """

    number: int
    host: str
    local_rank: int
    gpu: int | None
    cores: tuple[int, ...]
    threads: int
    domain: int | None = None


@dataclass(frozen=True)
class Plan:
    """What will be run, and what the user should know about it.

    Attributes:
        hosts: where
        ranks: what
        warnings: what to say before the run
        reminders: what to say after it
    """

    hosts: tuple[Host, ...]
    ranks: tuple[Rank, ...]
    warnings: tuple[str, ...] = ()
    reminders: tuple[str, ...] = ()

    @property
    def uses_gpus(self) -> bool:
        return any(rank.gpu is not None for rank in self.ranks)

    @property
    def counts(self) -> dict[str, int]:
        """How many ranks there are on each host."""
        return {host.name: len(self.ranks_of(host)) for host in self.hosts}

    @property
    def shares_cores(self) -> bool:
        """Whether some ranks have to share cores, as there are more of them."""
        owned = [(rank.host, core) for rank in self.ranks for core in rank.cores]
        return len(set(owned)) < len(owned)

    def by_rank(self, values: Mapping[int, str]) -> list[str]:
        """Values of all ranks, in order; those of one host if they are the same on all."""
        lists = [[values[rank.number] for rank in self.ranks_of(host)] for host in self.hosts]
        if all(each == lists[0] for each in lists):
            return lists[0]
        return [value for each in lists for value in each]

    def ranks_of(self, host: Host) -> tuple[Rank, ...]:
        return tuple(rank for rank in self.ranks if rank.host == host.name)


def make_plan(options: Options, hosts: Sequence[Host]) -> Plan:
    """Assign the devices of the hosts to ranks.

    All hosts use their GPUs, or none does: a run is as fast as its slowest rank. With `--gpu`, an
    InputError says where there are too few.
    """
    asked = options.ranks or options.ranks_per_host
    counts = [asked or (0 if options.no_gpu else len(host.gpus)) for host in hosts]
    shortage = None if options.no_gpu else find_shortage(hosts, counts)
    if shortage is not None and options.gpu:
        raise InputError(shortage.refusal("--gpu" if "gpu" in options.given else GPU))
    use_gpus = not options.no_gpu and shortage is None
    ranks: list[Rank] = []
    for host, count in zip(hosts, counts, strict=True):
        ranks += _ranks_of_host(host, count or 1, use_gpus, len(ranks), options)
    plan = Plan(tuple(hosts), tuple(ranks))
    warnings = () if use_gpus else core_warnings(_cores_and_ranks(plan))
    if shortage is None:
        return replace(plan, warnings=warnings)
    return replace(
        plan, warnings=(*shortage.warnings(), *warnings), reminders=(shortage.reminder(),)
    )


def _cores_and_ranks(plan: Plan) -> list[tuple[str, int, int]]:
    return [(host.name, host.core_count, plan.counts[host.name]) for host in plan.hosts]


def _ranks_of_host(
    host: Host, count: int, use_gpus: bool, first: int, options: Options
) -> list[Rank]:
    gpus = choose_gpus(host, count) if use_gpus else None
    domains: Sequence[int | None] = [None] * count
    if options.pin_to_socket:
        homes = _homes(host, count, gpus)
        shares = pin_cores(host, homes)
        domains = homes if options.pin_memory_to_socket else domains
    else:
        shares = share_cores(host, count, gpus)
    limit = max(1, host.core_count // count)
    return [
        Rank(
            number=first + local,
            host=host.name,
            local_rank=local,
            gpu=gpus[local] if gpus else None,
            cores=cores,
            threads=min(len(cores), limit),
            domain=domains[local],
        )
        for local, cores in enumerate(shares)
    ]


def choose_gpus(host: Host, count: int) -> tuple[int, ...]:
    """The GPUs to use: spread over the sockets, where the ranks' memory is, in their own order."""
    by_socket: dict[int | None, list[int]] = {}
    for index, gpu in enumerate(host.gpus):
        by_socket.setdefault(gpu.socket, []).append(index)
    in_program_order = sorted(
        (turn, index) for group in by_socket.values() for turn, index in enumerate(group)
    )
    return tuple(sorted(index for _, index in in_program_order[:count]))


def share_cores(host: Host, count: int, gpus: tuple[int, ...] | None) -> list[tuple[int, ...]]:
    """An even share of neighbouring cores for each rank, within one socket if possible.

    Args:
        host: the host
        count: number of ranks on it
        gpus: the GPU of each rank; its cores are taken from the socket that the GPU is attached to
    """
    homes = _homes(host, count, gpus)
    on_each = {homes.count(number) for number in host.domains}
    if len(on_each) == 1:
        ranks_on_socket = on_each.pop()
        size = min(len(host.sockets[number]) for number in host.domains) // ranks_on_socket
        if size > 0:
            return [
                _cut(host.sockets[home], size, homes[:rank].count(home))
                for rank, home in enumerate(homes)
            ]
    size = len(host.cores) // count
    if size == 0:  # more ranks than cores
        return [(host.cores[rank % len(host.cores)],) for rank in range(count)]
    return [_cut(host.cores, size, rank) for rank in range(count)]


def pin_cores(host: Host, homes: Sequence[int]) -> list[tuple[int, ...]]:
    """A share of the cores of its NUMA domain for each rank.

    Args:
        host: the host
        homes: the domain of each rank
    """
    if len(host.domains) < 2:
        raise InputError(
            f"Host {host.name} does not have several NUMA domains to pin ranks to: leave out "
            "--pin-to-socket and --pin-memory-to-socket. Each rank has its own cores even "
            "without them."
        )
    for domain in host.domains:
        cores, ranks = len(host.sockets[domain]), homes.count(domain)
        if cores < ranks:
            raise InputError(
                f"Host {host.name} has {words.count(cores, 'core')} in NUMA domain {domain} for "
                f"{words.count(ranks, 'rank')}: start fewer ranks there, or leave out "
                "--pin-to-socket."
            )
    return [
        _cut(
            host.sockets[home],
            len(host.sockets[home]) // homes.count(home),
            homes[:rank].count(home),
        )
        for rank, home in enumerate(homes)
    ]


def _homes(host: Host, count: int, gpus: tuple[int, ...] | None) -> list[int]:
    """The NUMA domain for each rank: that of its GPU, or spread evenly, neighbours together."""
    if gpus is not None:
        domains = [host.gpus[gpu].socket for gpu in gpus]
        if all(domain in host.domains for domain in domains):
            return [domain for domain in domains if domain is not None]
    return [host.domains[rank * len(host.domains) // count] for rank in range(count)]


def _cut(cores: tuple[int, ...], size: int, position: int) -> tuple[int, ...]:
    return cores[position * size : (position + 1) * size]
