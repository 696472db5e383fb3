"""The random numbers that Python code draws while it makes data."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

from tarantella.comm.waiting import meet
from tarantella.runtime import world


def share() -> None:
    """Gives all ranks the state of the master's random generators, those that modules hold.

    A generator of batches, or a `PyDataset` that shuffles after each epoch, then draws the
    same on all ranks, with or without a seed. Every rank must call it.
    """
    if world.get_size() == 1:
        return
    communicator = world.communicator("control")
    meet(communicator)
    states = communicator.bcast(_states() if world.is_master_rank() else None, 0)
    if not world.is_master_rank():
        _set_states(states)


def _states() -> dict[str, Any]:
    states = {"random": random.getstate(), "numpy": np.random.get_state()}
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state().numpy()
    return states


def _set_states(states: dict[str, Any]) -> None:
    random.setstate(states["random"])
    np.random.set_state(states["numpy"])
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in states:
        torch.set_rng_state(torch.from_numpy(states["torch"]))
