"""The line that the master rank shows at the start of a run: how many ranks, on what, what sums."""

from __future__ import annotations

from tarantella.runtime import devices, servers, world
from tarantella.runtime.announce import say
from tarantella.runtime.configuration import Configuration
from tarantella.runtime.words import count


def show(settings: Configuration) -> None:
    """Shows the line, on the master rank, unless the user wants none."""
    if world.is_master_rank() and not settings.quiet:
        say(f"tarantella: {text(settings)}", 2)


def text(settings: Configuration) -> str:
    """The ranks of this run in one line."""
    hosts = world.get_host_count()
    ranks = f"{count(world.get_size(), 'rank')} on {count(hosts, 'host')}"
    engine = words_for_engine()
    return f"{ranks}, {_devices(settings)}{f'; sums by {engine}' if engine else ''}"


def words_for_engine() -> str:
    """What sums over the ranks, as far as it is known before the first sum; empty for one rank."""
    if world.get_size() == 1:
        return ""
    if servers.addresses():
        return servers.words_for_collectives()
    return "MPI in the background" if world.has_several_hosts() else "MPI and shared memory"


def _devices(settings: Configuration) -> str:
    """What each rank computes on, or all of them where ranks share cores."""
    each = " a rank" if world.get_size() > 1 else ""
    hosts = world.get_cores_and_ranks().values()
    are_shared = any(ranks > cores for cores, ranks in hosts)
    total = f"{count(sum(cores for cores, _ in hosts), 'core')} in all"
    cores = total if are_shared else f"{_cores_of_a_rank(settings)}{each}"
    if not _uses_gpu(settings):
        return cores
    return f"1 GPU{each} and {cores}" if are_shared else f"1 GPU and {cores}"


def _cores_of_a_rank(settings: Configuration) -> str:
    threads = settings.threads or (devices.thread_count(settings),)
    fewest, most = min(threads), max(threads)
    return count(most, "core") if fewest == most else f"{fewest} to {most} cores"


def _uses_gpu(settings: Configuration) -> bool:
    """Whether a rank is to compute on a GPU, as far as it is known without TensorFlow."""
    return not settings.no_gpu and (settings.gpus is not None or servers.has_gpu())
