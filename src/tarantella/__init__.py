"""Distributed training for Keras on TensorFlow, in two more lines."""

from tarantella.runtime import world

world.start()

from tarantella.comm.collectives import allgather, allreduce, barrier, broadcast  # noqa: E402
from tarantella.keras.model import Model, ParallelStrategy, Sequential  # noqa: E402
from tarantella.runtime.world import (  # noqa: E402
    get_master_rank,
    get_rank,
    get_size,
    is_master_rank,
)


def init() -> None:
    """Does nothing: importing Tarantella has started it. Older scripts call this."""


__all__ = [
    "Model",
    "ParallelStrategy",
    "Sequential",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "get_master_rank",
    "get_rank",
    "get_size",
    "init",
    "is_master_rank",
]
