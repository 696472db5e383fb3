"""Binds a rank to its cores, its memory and its network, as the command has planned."""

from __future__ import annotations

import os

from tarantella.errors import InputError
from tarantella.runtime.configuration import Configuration, of_rank

# The MPI libraries, or the network libraries below them, read these: MPICH uses UCX or libfabric,
# Intel MPI libfabric.
_INTERFACE_VARIABLES = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include")


def bound(command: list[str], rank: int, settings: Configuration) -> list[str]:
    """Bind this process, and what it starts, to what is planned for a rank.

    Returns:
        The command, with numactl in front if the memory is to be bound as well.
    """
    cores = of_rank(settings.cores, rank)
    if cores is not None and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            raise InputError(
                f"rank {rank} cannot be bound to the cores {cores} that TNT_CORES names "
                f"({error.strerror}): set TNT_CORES to an empty string to leave ranks unbound"
            ) from None
    interface = of_rank(settings.network_interfaces, rank)
    if interface is not None:
        # One with a port is InfiniBand or the like, which only UCX knows.
        names = _INTERFACE_VARIABLES[:1] if ":" in interface else _INTERFACE_VARIABLES
        for name in names:
            os.environ.setdefault(name, interface)
    domain = of_rank(settings.memory, rank)
    return command if domain is None else ["numactl", f"--membind={domain}", "--", *command]
