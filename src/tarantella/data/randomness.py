"""Random numbers that must be the same on all ranks, and those that must differ."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

from tarantella.comm.waiting import barrier
from tarantella.runtime import messages, world

# Any odd number that spreads the ranks over the range of seeds.
_SEED_STRIDE = 0x9E3779B1


def seed_of_rank(state: np.ndarray, rank: int) -> np.ndarray:
    """The state of a Keras seed generator for one rank; rank 0 keeps the given one.

    With one seed, random layers would treat the samples of all ranks alike.
    """
    state = state.copy()
    state[0] = (int(state[0]) + rank * _SEED_STRIDE) % 2**32
    return state


def generator_of_rank(state: np.ndarray, rank: int) -> np.ndarray:
    """The state of a `tf.random.Generator` for one rank, as in `seed_of_rank`."""
    state = state.copy()
    state[-1] += rank * _SEED_STRIDE  # its key
    return state


def operation_seeds_of_rank(seed: int, seed2: int, rank: int) -> tuple[int, int]:
    """The seeds of a random operation for one rank, as in `seed_of_rank`."""
    if not seed and not seed2:  # it was given none
        return seed, seed2
    return (seed + rank * _SEED_STRIDE) % 2**31 or 1, seed2


def broadcast_from_master() -> None:
    """Gives all ranks the state of the master's global random generators.

    A generator of batches, or a `PyDataset` that shuffles after each epoch, then draws the same
    numbers on all ranks, with or without a seed. Every rank must call it.
    """
    if world.get_size() == 1:
        return
    communicator = world.communicator("control")
    barrier(communicator)
    states = messages.bcast(_states() if world.is_master_rank() else None, communicator)
    if not world.is_master_rank():
        _set_states(states)


def _states() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=True)
    if not isinstance(state, dict):  # the usual one, the Mersenne Twister
        kind, key, *more = state
        state = [kind, key.tolist(), *more]
    states = {"random": random.getstate(), "numpy": state}
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state().tolist()
    return states


def _set_states(states: dict[str, Any]) -> None:
    version, internal, following = states["random"]
    random.setstate((version, tuple(internal), following))
    state = states["numpy"]
    if not isinstance(state, dict):
        kind, key, *more = state
        state = kind, np.array(key, np.uint32), *more
    np.random.set_state(state)
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in states:
        torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
