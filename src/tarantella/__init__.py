"""Distributed training for Keras on TensorFlow, with two more lines.

The import starts the communication between the ranks. Everything that needs Keras is loaded on
first use.
"""

from __future__ import annotations

import signal
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tarantella.errors import VersionError
from tarantella.runtime import ending, launcher, versions

if launcher.is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl+C ends the command at once until it is loaded and handles signals itself: Python can lose
    # a KeyboardInterrupt during an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

try:
    versions.check_python()
except VersionError:
    ending.install()  # shows the message without a traceback
    raise

from tarantella.runtime import devices, imports
from tarantella.runtime.start import start_rank
from tarantella.runtime.world import get_master_rank, get_rank, get_size, is_master_rank

if TYPE_CHECKING:
    from tarantella import keras as keras
    from tarantella import models as models
    from tarantella.calls.run_function import run
    from tarantella.comm.collectives import allgather, allreduce, barrier, broadcast
    from tarantella.keras import callbacks as callbacks
    from tarantella.keras import optimizers as optimizers
    from tarantella.keras.distributed_dataset import distribute_dataset
    from tarantella.keras.model import Model, ParallelStrategy, Sequential

__version__ = "0.1.0"

__all__ = [
    "Model",
    "ParallelStrategy",
    "Sequential",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "distribute_dataset",
    "get_master_rank",
    "get_rank",
    "get_size",
    "init",
    "is_master_rank",
    "run",
]

_HOME = {
    "Model": "tarantella.keras.model",
    "ParallelStrategy": "tarantella.keras.model",
    "Sequential": "tarantella.keras.model",
    "allgather": "tarantella.comm.collectives",
    "allreduce": "tarantella.comm.collectives",
    "barrier": "tarantella.comm.collectives",
    "broadcast": "tarantella.comm.collectives",
    "distribute_dataset": "tarantella.keras.distributed_dataset",
    "run": "tarantella.calls.run_function",
}

_MODULES = {
    "callbacks": "tarantella.keras.callbacks",  # its name in earlier versions
    "keras": "tarantella.keras",
    "models": "tarantella.models",
    "optimizers": "tarantella.keras.optimizers",  # its name in earlier versions
}


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(_MODULES[name])
        if name not in _HOME:
            raise AttributeError(f"module 'tarantella' has no attribute {name!r}")
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})


def init(devices_per_node: int | None = None) -> None:
    """Does nothing, as the import starts Tarantella. Scripts for earlier versions call it.

    Args:
        devices_per_node: Ignored: the command sets the number of ranks.
    """


start_rank()
if not launcher.is_command():
    versions.check()
devices.configure()
imports.when_imported("tensorflow", lambda: import_module("tarantella.graph.tensors").install())
if get_size() > 1:
    imports.when_imported("tensorflow", lambda: import_module("tarantella.graph.engine").prepare())
    ending.before_end(lambda: import_module("tarantella.comm.master_done").drain())
    imports.when_imported("keras", lambda: import_module("tarantella.keras.shared_files").install())
