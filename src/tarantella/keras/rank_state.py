"""The state of a model that differs between the ranks, for a backup to keep.

Weights and optimizer are the same on all ranks. Random generators, stateful recurrent layers and
metrics are not: each rank has seen different samples.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tarantella.comm import agreement, buffers
from tarantella.internals import keras as internals
from tarantella.keras import master_weights
from tarantella.runtime import messages, world

# The arrays of one rank, by name.
RankState = dict[str, list[Any]]


def of_this_rank(model: Any) -> RankState:
    """The current values."""
    return {
        name: [np.array(variable) for variable in variables]
        for name, variables in _variables(model).items()
    }


def restore(model: Any, values: RankState) -> None:
    """Gives a model the values that this rank had.

    Training makes some of the variables. Those that are not there yet are left alone.
    """
    if values.get("seed"):
        internals.make_global_seed()
    for name, variables in _variables(model).items():
        kept = values.get(name, [])
        if len(kept) == len(variables):
            for variable, value in zip(variables, kept, strict=True):
                variable.assign(as_stored(value, variable))


def _variables(model: Any) -> dict[str, list[Any]]:
    layers = internals.flat_layers(model)
    metrics = model.metrics if model.compiled else []
    seed = internals.global_seed()
    return {
        "seeds": [variable for variable in model.variables if master_weights.is_seed(variable)],
        "seed": [] if seed is None else [seed],
        "states": keras.tree.flatten([getattr(each, "states", None) or [] for each in layers
                                      if getattr(each, "stateful", False)]),
        "metrics": [variable for metric in metrics for variable in metric.variables],
    }  # fmt: skip


NAMES = ("seeds", "seed", "states", "metrics")


def as_stored(value: Any, variable: Any) -> Any:
    """An array with the dtype of a variable: files do not know dtypes that NumPy lacks."""
    return value.view(np.array(variable).dtype) if value.dtype.kind == "V" else value


def gathered(own: RankState) -> list[RankState]:
    """The state of each rank, by rank; its contents may differ. Every rank must call it."""
    if world.get_size() == 1:
        return [own]
    kinds = {name: [[a.dtype.str, a.shape] for a in arrays] for name, arrays in own.items()}
    data = b"".join(array.tobytes() for arrays in own.values() for array in arrays)
    with agreement.turn() as communicator:
        agreement.agree("BackupAndRestore", [], communicator)
        everyones_kinds = messages.allgather(kinds, communicator)
        everyones_data = buffers.allgather_bytes(data, communicator)
    return [_unpacked(*each) for each in zip(everyones_kinds, everyones_data, strict=True)]


def _unpacked(kinds: dict[str, list[Any]], data: bytes) -> RankState:
    own: RankState = {}
    start = 0
    for name, of_arrays in kinds.items():
        own[name] = [np.empty(shape, dtype) for dtype, shape in of_arrays]
        for array in own[name]:
            array.flat = np.frombuffer(data, array.dtype, array.size, start)
            start += array.nbytes
    return own
