"""The ranks of this run: how many there are, and which one this is.

A process that an MPI launcher has started is a rank, and starts MPI. Any other is a serial run:
one rank, which is the master rank, and no MPI at all.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from tarantella.errors import InputError, TarantellaError
from tarantella.runtime import ending, launcher, log, messages, watch
from tarantella.runtime.announce import JOINED, JOINS, Announcement, announce
from tarantella.runtime.configuration import Configuration, configuration
from tarantella.runtime.cores import core_limit, usable_cores
from tarantella.runtime.launcher import Launch

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# Collectives that run at the same time need a communicator of their own each. Creating one is
# collective too, so all are created at the start, in this order.
PURPOSES = (
    "collectives",
    "gradients",
    "sparse gradients",
    "metrics",
    "losses",
    "layers",
    "statistics",
    "callbacks",
    "notices",
    "data",
    "control",
)


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        host: name of its host
        cores: the cores it may run on
        gpus: the GPUs its environment lets it see, as CUDA_VISIBLE_DEVICES says; None: all
        core_limit: how many cores' worth of time it and its neighbours get; None: all
    """

    host: str
    cores: frozenset[int]
    gpus: str | None
    core_limit: int | None = None


def _this_place() -> Place:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Place(socket.gethostname(), frozenset(usable_cores()), visible, core_limit())


_started = False
_rank = 0
_size = 1
_places: tuple[Place, ...] = (_this_place(),)
_several_hosts = False
_communicators: dict[str, Intracomm] = {}
_pid = 0  # the process that MPI runs in; 0 where it does not


def start() -> None:
    """Start this rank. Does nothing the second time."""
    global _started, _rank, _size, _places
    if _started:
        return
    _started = True
    parent = launcher.rank_of_parent()
    launch = launcher.find_launch()
    if parent is not None:
        # A worker that a rank has spawned belongs to that rank; another program runs serially.
        if any("from multiprocessing." in word for word in sys.orig_argv):
            _rank, _size = parent
            _places *= _size  # all it knows
    else:
        ending.install()
        if launch is not None:
            _tell(JOINS, launch)
            _start_mpi(launch)
            _tell(JOINED, launch)
    settings = _settings()
    log.configure(settings, _rank, _size)
    if _pid and _size > 1 and settings.stall_seconds:
        watch.start(_rank, settings.stall_seconds)
    name = _timeline_of_master(settings) if parent is None else ""
    if name:
        from tarantella.runtime import timeline

        timeline.start(name)


def _tell(kind: str, launch: Launch) -> None:
    if launch.size != 1:
        rank = launcher.rank_by_launcher()
        announce(Announcement(kind, rank, socket.gethostname(), os.getpid()))


def _timeline_of_master(settings: Configuration) -> str:
    """The file for a timeline, also where a launcher has given the variable to the master only."""
    if launcher.is_command():
        return ""
    if _size == 1:
        return settings.timeline
    return str(messages.bcast(settings.timeline, _communicators["control"]))


def _settings() -> Configuration:
    try:
        return configuration()
    except InputError:
        if _size > 1:
            raise
        # The command is such a process too, and has better ways to tell the user.
        return Configuration()


def get_rank() -> int:
    """The number of this rank, from 0 to `get_size()` - 1."""
    return _rank


def get_size() -> int:
    """The number of ranks in this run; 1 in a serial run."""
    return _size


def get_master_rank() -> int:
    """The rank that writes files and shows output."""
    return 0


def is_master_rank() -> bool:
    """Whether this is the rank that writes files and shows output."""
    return get_rank() == get_master_rank()


def get_local_rank() -> int:
    """The number of this rank among the ranks of its host."""
    mine = get_host_names()[_rank]
    return get_host_names()[:_rank].count(mine)


def get_local_size() -> int:
    """The number of ranks on the host of this rank."""
    return len(get_local_places())


def get_host_names() -> tuple[str, ...]:
    """The host name of each rank."""
    return tuple(place.host for place in _places)


def has_several_hosts() -> bool:
    """Whether the ranks of this run are on more than one host."""
    return _several_hosts


def get_places() -> tuple[Place, ...]:
    """Where each rank runs."""
    return _places


def get_local_places() -> tuple[Place, ...]:
    """Where each rank of this host runs, by local rank."""
    return tuple(place for place in _places if place.host == _places[_rank].host)


def communicator(purpose: str) -> Intracomm:
    """The communicator of all ranks that is set aside for a purpose, one of `PURPOSES`."""
    if purpose not in PURPOSES:
        raise ValueError(f"There is no communicator for {purpose!r}, only for {PURPOSES}.")
    if _pid != os.getpid():
        raise TarantellaError(
            "This process is not a rank, so it cannot communicate with the ranks: "
            "it runs serially, or it is a worker process that a rank has started."
        )
    return _communicators[purpose]


def _start_mpi(launch: Launch) -> None:
    global _rank, _size, _places, _several_hosts, _pid
    if "tensorflow" not in sys.modules:
        # TensorFlow tells on its way up how it was built, and would do so on every rank.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if not _has_rdma():
        # UCX would note down all memory that is given back, for a cache that only RDMA empties:
        # about 0.6 kB a step, of what Python takes for each call from a thread of TensorFlow.
        os.environ.setdefault("UCX_RCACHE_ENABLE", "n")
    try:
        import mpi4py

        mpi4py.rc.finalize = False  # at the end it is done by us, and never in a forked process
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TarantellaError(
            f"{launch.launcher} has started this process, but no MPI library could be loaded "
            f"({str(error).splitlines()[0]}): install one, for example with `pip install mpich`."
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise TarantellaError(
            "Tarantella needs MPI with MPI_THREAD_MULTIPLE, and MPI was started without it: "
            "import tarantella before mpi4py, leave mpi4py.rc.threads and thread_level alone, or "
            f"use an MPI library that supports it. This one is {_name_of_library(MPI)}."
        )
    world = MPI.COMM_WORLD
    if launch.size is not None and launch.size != world.Get_size():
        size, library = world.Get_size(), _name_of_library(MPI)
        if size == 1:
            MPI.Finalize()  # there is nobody to end, and nothing has to be left behind
        _refuse_other_library(launch, size, library)
    _communicators.update({name: watch.watched(world.Dup(), name) for name in PURPOSES})
    _pid = os.getpid()
    _rank, _size = world.Get_rank(), world.Get_size()
    here = _this_place()
    places = messages.allgather(
        [here.host, sorted(here.cores), here.gpus, here.core_limit], _communicators["control"]
    )
    _places = tuple(
        Place(host, frozenset(cores), gpus, limit) for host, cores, gpus, limit in places
    )
    _several_hosts = len(set(get_host_names())) > 1
    ending.before_end(_settle)
    launcher.declare_rank(_rank, _size)


def _has_rdma() -> bool:
    """Whether this host has InfiniBand, RoCE or the like."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def _settle() -> None:
    """Leave no message on its way."""
    from tarantella.comm import master_done

    master_done.settle()


def _refuse_other_library(launch: Launch, size: int, library: str) -> None:
    """End a run whose launcher and whose MPI library do not know each other."""
    if launch.rank:
        sys.exit(2)  # one of the processes says it, the others are in the same state
    if launch.launcher == "Slurm":
        raise TarantellaError(
            f"srun has started {launch.size} ranks, but the MPI library that mpi4py has loaded, "
            f"{library}, sees {size}, as it was not told of the others: start them with `srun "
            "--mpi=pmi2`, or with `srun --mpi=pmix` for Open MPI, or with the tarantella command."
        )
    raise TarantellaError(
        f"The launcher, {launch.launcher}, has started {launch.size} ranks, but the MPI library "
        f"that mpi4py has loaded, {library}, sees {size}: they are of different MPI "
        "installations. Start the ranks with the mpiexec of that library, or with the tarantella "
        "command, or let the variable MPI4PY_LIBMPI name the launcher's own libmpi.so."
    )


def _name_of_library(mpi: ModuleType) -> str:
    """The name and number in what an MPI library says of itself, which can be a page long."""
    return " ".join(mpi.Get_library_version().splitlines()[0].split(",")[0].split())
