"""The start of a rank: MPI, log messages, the watch for stalls, a timeline, and what is shown.

A process that an MPI launcher has started is a rank, and starts MPI; any other is a serial run.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from types import ModuleType

from tarantella.errors import InputError, TarantellaError
from tarantella.runtime import (
    banner,
    ending,
    launcher,
    log,
    memory,
    messages,
    run_report,
    servers,
    timeline,
    trackers,
    watch,
    world,
)
from tarantella.runtime.announce import JOINED, JOINS, Announcement, announce
from tarantella.runtime.configuration import Configuration, configuration
from tarantella.runtime.launcher import Launch
from tarantella.runtime.world import PURPOSES, Communicators, RankLocation

_started = False


def start_rank() -> None:
    """Start this rank. Does nothing the second time."""
    global _started
    if _started:
        return
    _started = True
    parent = launcher.rank_of_parent()
    launch = launcher.find_launch()
    library = ""  # of MPI
    if parent is not None:
        # A worker that a rank has spawned belongs to that rank; another program runs serially.
        if any("from multiprocessing." in word for word in sys.orig_argv):
            world.belong_to(*parent)
    else:
        ending.install()
        if launch is not None:
            _tell(JOINS, launch)
            library = _start_mpi(launch)
            _tell(JOINED, launch)
    settings = _settings()
    log.configure(settings, world.get_rank(), world.get_size())
    if library:
        os.environ.update(trackers.variables_of_rank(world.get_rank(), settings))
    if library and world.get_size() > 1 and settings.stall_seconds:
        watch.start(world.get_rank(), settings.stall_seconds)
    if library:
        banner.show(settings)
        run_report.start(library, banner.words_for_engine())
    if parent is None and (name := _timeline_of_master(settings)):
        timeline.start(name)


def _tell(kind: str, launch: Launch) -> None:
    if launch.size != 1:
        rank = launcher.rank_by_launcher()
        announce(Announcement(kind, rank, socket.gethostname(), os.getpid()))


def _timeline_of_master(settings: Configuration) -> str:
    """The file for a timeline, also where a launcher has given the variable to the master only."""
    if launcher.is_command():
        return ""
    if world.get_size() == 1:
        return settings.timeline
    return str(messages.bcast(settings.timeline, world.communicator("control")))


def _settings() -> Configuration:
    try:
        return configuration()
    except InputError:
        if world.get_size() > 1:
            raise
        # The command is such a process too, and has better ways to tell the user.
        return Configuration()


def _start_mpi(launch: Launch) -> str:
    """Starts MPI, and returns the name of its library."""
    if "tensorflow" not in sys.modules:
        # TensorFlow says how it was built when it starts, and would do so on every rank.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if not _has_rdma():
        # UCX would record all memory that is freed, for a cache that only RDMA empties:
        # about 0.6 kB a step, of what Python takes for each call from a thread of TensorFlow.
        os.environ.setdefault("UCX_RCACHE_ENABLE", "n")
    try:
        import mpi4py

        mpi4py.rc.finalize = False  # we do it at the end, and never in a forked process
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        limit = memory.limit_in_words()
        advice = "install one, for example with `pip install mpich`"
        raise TarantellaError(
            f"{launch.launcher} has started this process, but no MPI library could be loaded "
            f"({str(error).splitlines()[0]}): "
            + (f"memory may have run out, as {limit}; if not, {advice}." if limit else f"{advice}.")
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise TarantellaError(
            "Tarantella needs MPI with MPI_THREAD_MULTIPLE, but MPI was initialized without it: "
            "import tarantella before mpi4py, leave mpi4py.rc.threads and thread_level alone, or "
            f"use an MPI library that supports it. This one is {_name_of_library(MPI)}."
        )
    everyone = MPI.COMM_WORLD
    rank, size = everyone.Get_rank(), everyone.Get_size()
    if launch.size is not None and launch.size != size:
        library = _name_of_library(MPI)
        if size == 1:
            MPI.Finalize()  # there is no other rank to end, and nothing must be left behind
        _refuse_other_library(launch, size, library)
    communicators = {name: watch.watched(everyone.Dup(), name) for name in PURPOSES}
    here = world.this_location()
    locations = messages.allgather(
        [here.host, sorted(here.cores), here.gpus, here.core_limit], communicators["control"]
    )
    world.join(
        rank,
        [
            RankLocation(host, frozenset(cores), gpus, limit)
            for host, cores, gpus, limit in locations
        ],
        Communicators(communicators),
    )
    launcher.declare_rank(rank, size)
    if size > 1:
        servers.exchange_addresses()
    return _name_of_library(MPI)


def _has_rdma() -> bool:
    """Whether this host has InfiniBand, RoCE or the like."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def _refuse_other_library(launch: Launch, size: int, library: str) -> None:
    """End a run whose launcher and MPI library do not belong together."""
    if launch.rank:
        sys.exit(2)  # one process says it for all: the others are in the same state
    if launch.launcher == "Slurm":
        raise TarantellaError(
            f"srun has started {launch.size} ranks, but the MPI library that mpi4py has loaded, "
            f"{library}, sees {size}, as srun has not told it of the others: start them with `srun "
            "--mpi=pmi2`, or with `srun --mpi=pmix` for Open MPI, or with the tarantella command."
        )
    raise TarantellaError(
        f"The launcher, {launch.launcher}, has started {launch.size} ranks, but the MPI library "
        f"that mpi4py has loaded, {library}, sees {size}: they come from different MPI "
        "installations. Start the ranks with the mpiexec of that library, or with the tarantella "
        "command, or set MPI4PY_LIBMPI to the launcher's own libmpi.so."
    )


def _name_of_library(mpi: ModuleType) -> str:
    """The name and number in what an MPI library says of itself, which can be a page long."""
    words = mpi.Get_library_version().splitlines()[0].split(",")[0].split()
    return " ".join(word for word in words if word != "Version:")
