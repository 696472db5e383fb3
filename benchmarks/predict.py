"""Step times of ResNet-50 on 1 to 1024 ranks, predicted from what a step sends.

`growth.py` shows that a rank does the same in a step for every number of ranks: the same
reductions, of the same bytes, and nothing else that ranks wait for. Only the cost of a reduction in
the MPI library depends on the number, and for that there are textbook formulas. So a step can be
simulated: the backward pass produces gradients, last layer first; as soon as a message is full it
is reduced, one after the other; the step ends when the last gradient is back. Every rank has the
same number of samples, for any number of ranks.

The assumptions are printed above the table, and each has an option.

    python benchmarks/predict.py
    python benchmarks/predict.py --compute-ms 120 --latency-us 20 5 --algorithm ring
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

RANKS = [2**n for n in range(11)]
# The state of layers: the moving means and variances of 53 batch normalization layers.
SMALL_MESSAGES = (4 * 2 * 26_560,)


# The model


@dataclass(frozen=True)
class Message:
    """Bytes that are summed over the ranks.

    Attributes:
        ready: when this rank has them, in seconds from the start of the step
        nbytes: their number
    """

    ready: float
    nbytes: int


@dataclass(frozen=True)
class Network:
    """What messages cost.

    Attributes:
        latency: seconds until an empty message arrives
        bandwidth: bytes per second that a rank can send while it receives as many
        addition: bytes per second that a rank can add to its own
    """

    latency: float
    bandwidth: float
    addition: float = math.inf


@dataclass(frozen=True)
class Step:
    """How long a step takes, and how much of it is communication.

    Attributes:
        time: seconds
        communication: seconds in which messages are copied, sent or added
        exposed: seconds in which nothing else happens any more
    """

    time: float
    communication: float
    exposed: float

    @property
    def hidden(self) -> float:
        """The share of the communication that takes place during computation."""
        return 1.0 - self.exposed / self.communication if self.communication else 1.0

    @property
    def efficiency(self) -> float:
        """The time without communication over that with it."""
        return (self.time - self.exposed) / self.time


def doubling(nbytes: int, ranks: int, network: Network) -> float:
    """Recursive doubling: in log2(p) rounds, each rank swaps everything with a partner."""
    return math.ceil(math.log2(ranks)) * (
        network.latency + nbytes / network.bandwidth + nbytes / network.addition
    )


def halving(nbytes: int, ranks: int, network: Network) -> float:
    """Rabenseifner's algorithm: reduce-scatter by halves, quarters and so on, then the way back.

    In between, each rank has the sum of one segment.
    """
    return 2 * math.ceil(math.log2(ranks)) * network.latency + _moved(nbytes, ranks, network)


def ring(nbytes: int, ranks: int, network: Network) -> float:
    """A ring: segments go round twice, first to be summed, then to be distributed."""
    return 2 * (ranks - 1) * network.latency + _moved(nbytes, ranks, network)


def _moved(nbytes: int, ranks: int, network: Network) -> float:
    """All but a rank's own segment is sent and added once, and sent again as a sum."""
    others = nbytes * (ranks - 1) / ranks
    return 2 * others / network.bandwidth + others / network.addition


ALGORITHMS = {"doubling": doubling, "halving": halving, "ring": ring}


def allreduce_seconds(
    nbytes: int, ranks: int, network: Network, algorithm: str = "fastest"
) -> float:
    """How long it takes to sum bytes over ranks, with one algorithm or with the fastest."""
    if ranks == 1:
        return 0.0
    if algorithm != "fastest":
        return ALGORITHMS[algorithm](nbytes, ranks, network)
    return min(seconds(nbytes, ranks, network) for seconds in ALGORITHMS.values())


def simulate(
    compute: float,
    messages: Sequence[Message],
    reduction: Callable[[int], float],
    copy: Callable[[int], float] = lambda nbytes: 0.0,
) -> Step:
    """Simulates one step.

    Args:
        compute: Seconds of forward and backward pass.
        messages: In the order in which they are reduced.
        reduction: Seconds for the reduction of so many bytes.
        copy: Seconds from the device to the host, and as many back. One message is copied while
            another is reduced.
    """
    free = last = communication = 0.0
    for message in messages:
        taken, copied = reduction(message.nbytes), copy(message.nbytes)
        free = max(free, message.ready + copied) + taken
        last = max(last, free + copied)
        communication += taken + 2 * copied
    time = max(compute, last)
    return Step(time, communication, exposed=time - compute)


# ResNet-50


@dataclass(frozen=True)
class Layer:
    """A layer with weights.

    Attributes:
        work: its share of the backward pass
        shapes: of its trainable variables
    """

    work: float
    shapes: tuple[tuple[int, ...], ...]


def layers_of(model: Any) -> list[Layer]:
    """The layers of a model, from first to last, with their multiplications as work."""
    layers = [layer for layer in model.layers if layer.trainable_variables]
    works = [_multiplications(layer) for layer in layers]
    return [
        Layer(work / sum(works), tuple(tuple(v.shape) for v in layer.trainable_variables))
        for layer, work in zip(layers, works, strict=True)
    ]


def _multiplications(layer: Any) -> int:
    """Those of a convolution or a matrix; other layers compute little in comparison."""
    kernel = getattr(layer, "kernel", None)
    places = layer.output.shape[1:-1]
    return 0 if kernel is None else math.prod(kernel.shape) * math.prod(places)


def messages_of(
    layers: Sequence[Layer], forward: float, backward: float, threshold: int | None, hosts: int = 2
) -> list[Message]:
    """The messages of a step, as Tarantella makes them from 32-bit gradients.

    Args:
        layers: From first to last; the backward pass goes the other way.
        forward: Seconds.
        backward: Seconds.
        threshold: The fusion threshold, in bytes; None: the best one for that many hosts.
        hosts: The number of hosts.
    """
    import numpy as np

    from tarantella.comm.buckets import TensorSpec, fuse
    from tarantella.comm.fusion import best_threshold

    specs, ready, done = [], [], 0.0
    for layer in reversed(layers):
        done += layer.work
        for shape in reversed(layer.shapes):
            specs.append(TensorSpec(shape, np.dtype(np.float32)))
            ready.append(forward + done * backward)
    if threshold is None:
        threshold = best_threshold(tuple(specs), hosts)
    return [
        Message(max(ready[member] for member in bucket.members), bucket.nbytes)
        for bucket in fuse(specs, threshold)
    ]


# The table


def main() -> None:
    options = parsed()
    compute = options.compute_ms / 1e3
    forward = options.forward_share * compute
    layers, kilobytes = resnet50(), options.fusion_threshold
    threshold = None if kilobytes is None else kilobytes * 1024
    gradients = {
        ranks: messages_of(layers, forward, compute - forward, threshold, ranks)
        for ranks in options.ranks
    }
    # The state of layers is ready after the forward pass, before any gradient.
    small = [Message(forward, nbytes) for nbytes in options.small_messages]
    print_assumptions(options, list(gradients.values()), small)
    predictions = {}
    for gigabits, latency in zip(options.gigabits, options.latency_us, strict=True):
        bandwidth = options.usable * gigabits * 1e9 / 8
        network = Network(latency / 1e6, bandwidth, options.addition_gb * 1e9)
        predictions[gigabits] = [
            predicted(options, [*small, *gradients[ranks]], ranks, network)
            for ranks in options.ranks
        ]
    print_table(options.ranks, predictions)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=RANKS)
    add("--compute-ms", type=float, default=300.0, help="a rank's forward and backward pass")
    add("--samples", type=int, default=64, help="a rank's samples in that time")
    add("--forward-share", type=float, default=1 / 3, help="share of the forward pass")
    add("--gigabits", type=float, nargs="+", default=[10.0, 100.0], help="networks")
    add("--latency-us", type=float, nargs="+", default=[30.0, 10.0], help="of each network")
    add("--usable", type=float, default=0.9, help="share of the bandwidth that MPI achieves")
    add("--addition-gb", type=float, default=8.0, help="GB/s at which a rank adds gradients")
    add("--copy-gb", type=float, default=12.0, help="GB/s from GPU to host and back; 0: no GPU")
    add("--call-us", type=float, default=100.0, help="Python's overhead of a reduction")
    add("--algorithm", choices=["fastest", *ALGORITHMS], default="fastest")
    add("--small-messages", type=int, nargs="*", default=list(SMALL_MESSAGES), metavar="BYTES")
    add("--fusion-threshold", type=int, metavar="KB", help="chosen as in a run, if left out")
    options = parser.parse_args()
    if len(options.gigabits) != len(options.latency_us):
        parser.error("--gigabits and --latency-us need one number each for every network")
    return options


def resnet50() -> list[Layer]:
    import os

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras

    return layers_of(keras.applications.ResNet50(weights=None))


def predicted(
    options: argparse.Namespace, messages: Sequence[Message], ranks: int, network: Network
) -> Step:
    compute = options.compute_ms / 1e3
    if ranks == 1:
        return simulate(compute, [], lambda nbytes: 0.0)

    def reduction(nbytes: int) -> float:
        call: float = options.call_us / 1e6
        return call + allreduce_seconds(nbytes, ranks, network, options.algorithm)

    def copy(nbytes: int) -> float:
        return float(nbytes / (options.copy_gb * 1e9)) if options.copy_gb else 0.0

    return simulate(compute, messages, reduction, copy)


def print_assumptions(
    options: argparse.Namespace, gradients: Sequence[Sequence[Message]], small: Sequence[Message]
) -> None:
    print(f"ResNet-50, 224 x 224, {options.samples} samples on each rank, for any number of ranks.")
    print("Assumed:")
    for assumption in assumptions(options, gradients, small):
        print(textwrap.fill(assumption, 96, initial_indent="- ", subsequent_indent="  "))
    print()


def assumptions(
    options: argparse.Namespace, gradients: Sequence[Sequence[Message]], small: Sequence[Message]
) -> list[str]:
    speed = 1e3 * options.samples / options.compute_ms
    megabytes = sum(message.nbytes for message in gradients[0]) / 1e6
    counts = sorted({len(messages) for messages in gradients})
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    threshold = options.fusion_threshold
    fused = "small ones fused" if threshold is None else f"those below {threshold} KiB fused"
    sizes = " and ".join(str(message.nbytes) for message in small)
    before = f"Before them, {sizes} bytes are sent after the forward pass. " if small else ""
    networks = " and ".join(
        f"{gigabits:g} Gbit/s with {latency:g} us a message"
        for gigabits, latency in zip(options.gigabits, options.latency_us, strict=True)
    )
    return [
        f"Forward and backward pass take {options.compute_ms:g} ms on every rank and in every "
        f"step ({speed:.0f} samples a second), {options.forward_share:.0%} of it forward. The "
        "backward pass spends its time on layers in proportion to their multiplications.",
        f"Gradients of {megabytes:.1f} MB are reduced in {number} messages, {fused}, in order, one "
        f"after the other. {before}"
        f"Each message takes {options.call_us:g} us more than MPI needs for it.",
        f"Networks of {networks}, of which every rank can use {options.usable:.0%} in both "
        "directions at the same time, wherever the ranks are.",
        f"MPI reduces by {_IN_WORDS[options.algorithm]}. A rank adds {options.addition_gb:g} GB/s.",
        f"Gradients go from the GPU to the host and back at {options.copy_gb:g} GB/s."
        if options.copy_gb
        else "Gradients are on the host already.",
        "Input is always ready. No rank is ever late, and messages do not disturb each other: the "
        "figures do not include the cost of waiting for the slowest of many ranks.",
    ]


_IN_WORDS = {
    "fastest": "the fastest of recursive doubling, recursive halving (Rabenseifner) and a ring",
    "doubling": "recursive doubling",
    "halving": "recursive halving (Rabenseifner)",
    "ring": "a ring",
}


def print_table(ranks: Sequence[int], predictions: dict[float, list[Step]]) -> None:
    print("       " + "".join(f"{gigabits:>18g} Gbit/s      " for gigabits in predictions))
    print("  ranks" + "    step ms  efficiency  hidden" * len(predictions))
    for row, count in enumerate(ranks):
        cells = ""
        for steps in predictions.values():
            step = steps[row]
            hidden = f"{step.hidden:8.0%}" if step.communication else f"{'-':>8}"
            cells += f"{1e3 * step.time:11.1f}{step.efficiency:12.1%}{hidden}"
        print(f"{count:7}{cells}")


if __name__ == "__main__":
    main()
