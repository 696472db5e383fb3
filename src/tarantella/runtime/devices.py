"""The devices of a rank: one GPU, or a share of the host's cores.

TensorFlow takes every GPU and every core it finds, in each process. Ranks of one host have to
divide them, and that has to happen before TensorFlow's first operation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType

from tarantella.errors import InputError
from tarantella.runtime import launcher, world
from tarantella.runtime.announce import ON_CPU, Announcement, announce, is_run_by_command
from tarantella.runtime.configuration import GPU, NO_GPU, Configuration, configuration, of_rank
from tarantella.runtime.core_shortage import core_warnings
from tarantella.runtime.cores import thread_share
from tarantella.runtime.imports import when_imported
from tarantella.runtime.log import LOGGER
from tarantella.runtime.world import RankLocation

# A collective that waits for other ranks occupies one of TensorFlow's inter-op threads. With too
# few of them nothing is left to compute what the others wait for, and the run hangs. A
# step waits in six places at most: dense and sparse gradients, metrics, losses, layers, statistics.
LEAST_INTER_OP_THREADS = 7


def configure() -> None:
    """Gives this rank its devices, as soon as TensorFlow is imported.

    In a serial run TensorFlow is left alone, except for a check that it has a GPU if it must.
    """
    try:
        settings = configuration()
    except InputError:
        if launcher.is_command():
            return  # the command reports it, in better words than an import can
        raise
    if settings.gpu and settings.no_gpu and not launcher.is_command():
        raise InputError(f"{GPU} and {NO_GPU} exclude each other: unset one of them.")
    if world.get_size() > 1 or settings.gpu or settings.no_gpu or settings.gpus is not None:
        when_imported("tensorflow", lambda: _configure(settings))


def _configure(settings: Configuration) -> None:
    import tensorflow as tf

    tasks: list[Callable[[ModuleType, Configuration], None]] = [_take_gpu]
    if world.get_size() > 1:
        tasks += [_share_threads, _warn_of_shared_cores]
    try:
        for task in tasks:
            task(tf, settings)
    except RuntimeError:
        LOGGER.warning(
            "TensorFlow was in use before Tarantella could divide devices and threads among the "
            "ranks, which may now be slow or run out of memory: import tarantella before the "
            "first TensorFlow operation."
        )


def thread_count(settings: Configuration) -> int:
    """How many threads are this rank's share of the cores of its host."""
    planned = of_rank(settings.threads, world.get_rank())
    return _number("OMP_NUM_THREADS") or planned or _even_share()


def choose_gpu(
    count: int, local_rank: int, locations: tuple[RankLocation, ...], planned: int | None
) -> int | None:
    """The GPU of a rank, of those it sees; None if there are too few for the ranks of the host.

    Args:
        count: how many GPUs this rank sees
        local_rank: the number of this rank on its host
        locations: where each rank of the host runs
        planned: the GPU that the command has planned for it
    """
    seen = [location.gpus for location in locations]
    if count == 1 and len(seen) > 1 and None not in seen and len(set(seen)) == len(seen):
        return 0  # a scheduler shows each rank a GPU of its own
    wanted = local_rank if planned is None else planned
    enough = planned is not None or count >= len(locations)
    return wanted if enough and wanted < count else None


def _take_gpu(tf: ModuleType, settings: Configuration) -> None:
    gpus = tf.config.list_physical_devices("GPU")
    if settings.no_gpu:
        tf.config.set_visible_devices([], "GPU")
        return
    local_rank, locations = world.get_local_rank(), world.get_local_locations()
    planned = of_rank(settings.gpus, world.get_rank())
    chosen = choose_gpu(len(gpus), local_rank, locations, planned)
    is_rank = launcher.rank_of_parent() is None  # and not a process that a rank has started
    if chosen is None and settings.gpu and is_rank:
        raise InputError(_no_gpu(len(gpus), len(locations), locations[local_rank].host))
    if world.get_size() == 1 and settings.gpus is None:
        return  # a serial run, which was only checked
    if chosen is not None:
        tf.config.set_visible_devices(gpus[chosen], "GPU")
        tf.config.experimental.set_memory_growth(gpus[chosen], True)
        return
    tf.config.set_visible_devices([], "GPU")
    if gpus or settings.gpus is not None:
        if is_rank:
            host = locations[local_rank].host
            announce(Announcement(ON_CPU, world.get_rank(), host, os.getpid(), status=len(gpus)))
        LOGGER.warning(
            "TensorFlow finds %d GPUs for %d ranks on host %s: the ranks run on the CPU. Start "
            "fewer ranks, or check whether this TensorFlow supports the GPUs.",
            len(gpus),
            len(locations),
            locations[local_rank].host,
        )


def _no_gpu(gpus: int, ranks: int, host: str) -> str:
    """Why a rank cannot have the GPU that it has to have, and what to do."""
    command = is_run_by_command()
    found = {0: "no GPU", 1: "1 GPU"}.get(gpus, f"{gpus} GPUs")
    wanted = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return (
        f"{'--gpu' if command else GPU} needs a GPU for each rank, but TensorFlow finds {found} "
        f"for {wanted} on host {host}: {'start fewer ranks, ' if gpus else ''}check whether this "
        "TensorFlow supports the GPUs, or "
        f"{'use --no-gpu' if command else f'unset {GPU}'} to run on the CPU."
    )


def _share_threads(tf: ModuleType, settings: Configuration) -> None:
    threading = tf.config.threading
    share = thread_count(settings)
    if not (threading.get_intra_op_parallelism_threads() or _number("TF_NUM_INTRAOP_THREADS")):
        threading.set_intra_op_parallelism_threads(share)
    chosen = threading.get_inter_op_parallelism_threads() or _number("TF_NUM_INTEROP_THREADS")
    if not chosen:
        threading.set_inter_op_parallelism_threads(max(share, LEAST_INTER_OP_THREADS))
    elif chosen < LEAST_INTER_OP_THREADS:
        LOGGER.warning(
            "TensorFlow is set to %d inter-op threads. Ranks that wait for each other occupy some "
            "of them, and with fewer than %d a run may hang: set more, or leave it unset.",
            chosen,
            LEAST_INTER_OP_THREADS,
        )


def _warn_of_shared_cores(tf: ModuleType, _: Configuration) -> None:
    """Warn of more ranks than cores on a host; the command has done so before it starts ranks."""
    on_gpu = bool(tf.config.get_visible_devices("GPU"))
    if world.is_master_rank() and not on_gpu and not is_run_by_command():
        numbers = world.get_cores_and_ranks()
        for warning in core_warnings((host, *numbers[host]) for host in numbers):
            LOGGER.warning(warning)


def _even_share() -> int:
    locations = world.get_local_locations()
    of_all = tuple(location.cores for location in locations)
    mine = locations[world.get_local_rank()]
    return thread_share(mine.cores, of_all, mine.core_limit)


def _number(variable: str) -> int:
    """The number in a variable, the first of several; 0 if there is none."""
    first = os.environ.get(variable, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0
