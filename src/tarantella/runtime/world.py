"""The ranks of this run: how many there are, and which one this is."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

_LAUNCHED_BY = ("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE")
_comm: Any = None


def start() -> None:
    global _comm
    if _comm is None and any(name in os.environ for name in _LAUNCHED_BY):
        from mpi4py import MPI

        _comm = MPI.COMM_WORLD
        for purpose in ("collectives", "gradients", "metrics", "losses", "control"):
            communicator(purpose)


def get_rank() -> int:
    return _comm.Get_rank() if _comm is not None else 0


def get_size() -> int:
    return _comm.Get_size() if _comm is not None else 1


def get_master_rank() -> int:
    return 0


def is_master_rank() -> bool:
    return get_rank() == get_master_rank()


@cache
def communicator(purpose: str) -> Any:
    return _comm.Dup()
