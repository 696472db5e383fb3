"""Allreduce of ranks of one host in a TensorFlow graph, compared with MPI's own.

A graph has several allreduces one after the other, and the time of calling a graph without any is
subtracted: the comparison is about an allreduce, not about a call from Python. MPI's own is one
plain Allreduce of the whole buffer to the next in a chain of as many buffers; and also of one
buffer in place, again and again, which stays in the caches. All take turns in each round. A round's
figure is the median of its calls, on the slower rank.

    python benchmarks/allreduce.py                  # 1 kB to 256 MB
    python benchmarks/allreduce.py --ranks 2 4 8 16
    python benchmarks/allreduce.py --quick          # checks only that it runs
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import report
from common import RANKS, check_cores, is_rank, last_line, on_ranks
from report import Figure

SIZES = [4**power << 10 for power in range(10)]  # 1 kB to 256 MB
# The targets: a share of MPI's own speed from a size up; microseconds more at a size.
SHARE, SHARE_FROM = 0.8, 256 << 10
EXTRA, EXTRA_AT = 100.0, 4 << 10
CHAINED_BYTES, CHAINED = 64 << 20, 16  # the most allreduces in a graph
MOVED_BYTES, CALLS = 1 << 30, 50  # the most calls in a round; at least three

Times = dict[str, float]  # seconds of an allreduce, and of a call of a graph without one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round, up to 64 kB")
    parser.add_argument("--ranks", nargs="+", type=int, default=[RANKS])
    options = parser.parse_args()
    if is_rank():
        rank_main(options.rounds, options.quick)
        return
    check_cores(parser, options.ranks, options.quick)
    for ranks in options.ranks:
        print(report.table(measured(options.rounds, options.quick, ranks)), flush=True)


def measured(rounds: int, quick: bool, ranks: int = RANKS) -> list[Figure]:
    """Measures on fresh ranks."""
    part = "allreduce" if ranks == RANKS else f"allreduce, {ranks} ranks"
    print(f"{part} ...", file=sys.stderr, flush=True)
    arguments = ["--rounds", str(rounds), *(["--quick"] if quick else [])]
    command = [*on_ranks(ranks, "-x", "TNT_THREADS=1"), __file__, *arguments]
    sizes: dict[str, list[Times]] = last_line(command)
    figures = [one for size, times in sizes.items() for one in figures_of(part, int(size), times)]
    calls = [1e6 * one["call"] for times in sizes.values() for one in times]
    return [*figures, Figure(part, "0 kB", "call of a graph without one", calls, "us")]


def figures_of(part: str, size: int, rounds: Sequence[Times]) -> list[Figure]:
    subject = f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} kB"

    def figure(what: str, values: list[float], unit: str = "", **more: Any) -> Figure:
        return Figure(part, subject, what, values, unit, **more)

    extra = [1e6 * (one["graph"] - one["mpi"]) for one in rounds]
    return [
        figure("mpi", [size / one["mpi"] / 1e9 for one in rounds], "GB/s"),
        figure("mpi in place", [size / one["in place"] / 1e9 for one in rounds], "GB/s"),
        figure("tarantella", [size / one["graph"] / 1e9 for one in rounds], "GB/s"),
        figure(
            "tarantella",
            [one["mpi"] / one["graph"] for one in rounds],
            over="mpi",
            at_least=SHARE if size >= SHARE_FROM else None,
        ),
        figure("extra", extra, "us", at_most=EXTRA if size == EXTRA_AT else None),
    ]


def rank_main(rounds: int, quick: bool) -> None:
    """Measures all sizes, and prints the times of each round as a line."""
    import tarantella as tnt

    sizes = SIZES[:4] if quick else SIZES
    times = {size: compared(size, 1 if quick else rounds) for size in sizes}
    if tnt.is_master_rank():
        print(json.dumps(times), flush=True)


def compared(size: int, rounds: int) -> list[Times]:
    """The times of an allreduce of `size` bytes, in each round."""
    from mpi4py import MPI

    from tarantella.comm.buckets import aligned_zeros

    chained = max(1, min(CHAINED, CHAINED_BYTES // size))
    calls = max(3, min(CALLS, MOVED_BYTES // (size * chained)))
    graph, empty = chain(size, chained), chain(size, 0)
    buffers = [aligned_zeros(size).view("float32") for _ in range(chained + 1)]

    def mpi() -> None:
        for source, target in itertools.pairwise(buffers):
            MPI.COMM_WORLD.Allreduce(source, target)

    def in_place() -> None:
        for _ in range(chained):
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffers[0])

    found = []
    for _ in range(rounds):
        call = seconds(empty, calls)
        both = {
            "graph": (seconds(graph, calls) - call) / chained,
            "mpi": seconds(mpi, calls) / chained,
            "in place": seconds(in_place, calls) / chained,
        }
        found.append({"call": call, **both})
    return found


def chain(size: int, length: int) -> Callable[[], Any]:
    """A graph with `length` allreduces, each of the result of the one before."""
    import tensorflow as tf

    from tarantella.graph.engine import channel as gradient_channel

    zeros = tf.zeros(size // tf.float32.size)  # and so are all their sums

    @tf.function
    def graph(tensor: tf.Tensor) -> tf.Tensor:
        channel = gradient_channel("gradients")
        for _ in range(length):
            (tensor,) = channel.allreduce([tensor], threshold=0)
        return tensor[0]

    return lambda: graph(zeros)


def seconds(action: Callable[[], Any], calls: int) -> float:
    """The median time of a call on the slower rank; the first two do not count."""
    import tarantella as tnt

    times = []
    tnt.barrier()
    for _ in range(2 + calls):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return float(tnt.allreduce(statistics.median(times[2:]), op="max"))


if __name__ == "__main__":
    main()
