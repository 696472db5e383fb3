"""What a step costs regardless of its size: a model of one small layer on two ranks.

Variants of the same training take turns in the same two processes: plain Keras on a micro-batch
(the limit), Tarantella as it is, and Tarantella with one part left out on both ranks, to see what
it costs. A callback reads the logs of every batch, unless that is what is left out. A round's
figure is the median of its epochs' seconds a step on the slower rank; the result is the median of
the rounds.

    python benchmarks/step_cost.py
    python benchmarks/step_cost.py --quick          # checks only that it runs
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from common import RANKS, is_rank, last_line, on_ranks, tarantella_on_ranks
from report import Figure, table

MICRO_BATCH = 16
EPOCHS = 4  # in a round; the first one also makes the functions
LIMIT, ALL = "limit", "all"
TARGET_US = 400.0  # over the limit
TARGET_RATIO = 0.63


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000, help="steps in an epoch")
    parser.add_argument("--quick", action="store_true", help="one round of a few steps")
    options = parser.parse_args()
    if is_rank():
        rank_main(options.rounds, options.steps)
        return
    print(table(measured(options.rounds, options.quick, options.steps)))


def measured(rounds: int, quick: bool, steps: int = 1000) -> list[Figure]:
    """The limit, what a step costs beyond it, and what each part of that is."""
    print("step cost ...", file=sys.stderr, flush=True)
    few = ["--rounds", "1", "--steps", "3"] if quick else []
    arguments = few or ["--rounds", str(rounds), "--steps", str(steps)]
    seconds = last_line([*on_ranks(RANKS), __file__, *arguments])

    def figure(what: str, values: list[float], unit: str = "us", **options: Any) -> Figure:
        return Figure("step cost", "one layer", what, values, unit, **options)

    def over(variant: str) -> list[float]:
        pairs = zip(seconds[ALL], seconds[variant], strict=True)
        return [1e6 * (whole - part) for whole, part in pairs]

    ratios = [a / b for a, b in zip(seconds[LIMIT], seconds[ALL], strict=True)]
    return [
        figure(LIMIT, [1e6 * second for second in seconds[LIMIT]]),
        figure("tarantella", [1e6 * second for second in seconds[ALL]]),
        figure("tarantella", ratios, "", over=LIMIT, at_least=TARGET_RATIO),
        figure("all of it", over(LIMIT), over=LIMIT, at_most=TARGET_US),
        *(figure(part, over(part)) for part in LEFT_OUT),
    ]


def rank_main(rounds: int, steps: int) -> None:
    tnt = tarantella_on_ranks()
    trainings = {LIMIT: training(None, LIMIT, steps), ALL: training(tnt, ALL, steps)}
    trainings |= {part: training(tnt, part, steps) for part in LEFT_OUT}
    seconds: dict[str, list[float]] = {variant: [] for variant in trainings}
    for _ in range(rounds):
        for variant, train in trainings.items():
            tnt.barrier()
            with LEFT_OUT.get(variant, nothing)():
                own = train()
            seconds[variant].append(tnt.allreduce(own, op="max"))
    if tnt.is_master_rank():
        print(json.dumps(seconds), flush=True)


def training(tnt: Any, variant: str, steps: int) -> Callable[[], float]:
    """A function that trains for a round, and returns the seconds that a step takes."""
    import keras
    import numpy as np
    import tensorflow as tf

    samples = MICRO_BATCH * (RANKS if tnt else 1)
    x = np.random.default_rng(1).normal(size=(samples, 8)).astype("float32")
    options = tf.data.Options()
    options.autotune.enabled = False  # it can hold the end of an epoch for many steps
    data = tf.data.Dataset.from_tensors((x, x[:, :1])).repeat(steps).with_options(options)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model = tnt.Model(model) if tnt else model
    model.compile("sgd", "mse")
    begun = 0.0
    epochs: list[float] = []

    def begin(epoch: int, logs: Any) -> None:
        nonlocal begun
        begun = time.perf_counter()

    def end(epoch: int, logs: Any) -> None:
        epochs.append((time.perf_counter() - begun) / steps)

    callbacks = [keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_epoch_end=end)]
    if variant != "logs, read by a callback":
        reads = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: logs["loss"])
        callbacks.append(reads)

    def train() -> float:
        epochs.clear()
        model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
        return statistics.median(epochs[1:])

    return train


@contextmanager
def nothing() -> Iterator[None]:
    """Leaves nothing out."""
    yield


@contextmanager
def no_agreement() -> Iterator[None]:
    from tarantella.data.comparison import Comparison, SamplesTaken

    with (
        mock.patch.object(Comparison, "compare"),
        mock.patch.object(SamplesTaken, "add"),
    ):
        yield


@contextmanager
def no_sums() -> Iterator[None]:
    from tarantella.graph.host_channel import HostChannel

    def own(self: Any, tensors: list[Any], buckets: list[Any]) -> dict[int, Any]:
        return dict(enumerate(tensors))

    with mock.patch.object(HostChannel, "_sums", own):
        yield


@contextmanager
def no_synchronization() -> Iterator[None]:
    from tarantella.keras.callback_list import RankCallbacks

    plain = contextmanager(lambda self, event: iter([None]))
    with mock.patch.object(RankCallbacks, "_batch_event", plain):
        yield


# The parts, and how each is left out, on all ranks alike.
LEFT_OUT: dict[str, Callable[[], Any]] = {
    "agreement on the data": no_agreement,
    "sums of gradients and metrics": no_sums,
    "logs, read by a callback": nothing,
    "callbacks and requests to stop": no_synchronization,
}


if __name__ == "__main__":
    main()
