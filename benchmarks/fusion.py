"""Step times with several fusion thresholds, on one host and on a slow link.

Two ranks train the same model with each threshold in turns, in the same two processes: on this
machine, and on two hosts, network namespaces with a link between them (this part needs root, ssh
and iproute2). A round's figure is the median of its steps on the slower rank; speeds are relative
to the round's fastest threshold, and the results are the medians of the rounds.

    python benchmarks/fusion.py
    python benchmarks/fusion.py --models lenet5 --gbit 0.1 --thresholds auto 256 1024
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import models
from common import RANKS, compiled, is_rank, last_line, on_ranks, step_times, tarantella_on_ranks
from overlap import hosts_on_slow_link, run_on_hosts

AUTO = "auto"
THRESHOLDS = [AUTO, "32", "128", "256", "512", "1024", "4096", "1000000"]
MODELS = ["lenet5", "resnet50", "transformer"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=models.CASES, default=MODELS)
    parser.add_argument("--thresholds", nargs="+", type=threshold, metavar="KB", default=THRESHOLDS)
    parser.add_argument(
        "--gbit", type=float, nargs="+", default=[1.0], help="speeds of the link, in Gbit/s"
    )
    parser.add_argument("--where", nargs="+", choices=("host", "link"), default=["host", "link"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if is_rank():
        rank_main(options)
        return
    program = [__file__, "--thresholds", *options.thresholds, "--rounds", str(options.rounds)]
    for model in options.models:
        arguments = [*program, "--models", model]
        if "host" in options.where:
            show("one host", last_line([*on_ranks(RANKS, "-x", "TNT_THREADS=1"), *arguments]))
        for gbit in options.gbit if "link" in options.where else []:
            with hosts_on_slow_link(gbit) as (hosts, hostfile):
                show(f"{gbit:g} Gbit/s", run_on_hosts(hosts, hostfile, [], arguments))


def threshold(text: str) -> str:
    """A threshold, checked at once: an error should not come after the first model."""
    if text != AUTO and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of kilobytes nor {AUTO}")
    return text


def show(where: str, found: dict[str, dict[str, list[float]]]) -> None:
    for model, by_threshold in found.items():
        fastest = [min(one) for one in zip(*by_threshold.values(), strict=True)]
        for kb, seconds in by_threshold.items():
            ratios = [one / own for one, own in zip(fastest, seconds, strict=True)]
            print(
                f"{model:12}{where:12}{kb:>8} kB{1e3 * statistics.median(seconds):9.1f} ms"
                f"{statistics.median(ratios):7.3f}  ({min(ratios):.3f} to {max(ratios):.3f})",
                flush=True,
            )


def rank_main(options: argparse.Namespace) -> None:
    tnt = tarantella_on_ranks()
    figures = {name: measured(name, options, tnt) for name in options.models}
    if tnt.is_master_rank():
        print(json.dumps(figures), flush=True)


def measured(name: str, options: argparse.Namespace, tnt: Any) -> dict[str, list[float]]:
    """Seconds of a step in each round, by threshold."""
    import keras
    import tensorflow as tf

    case = models.CASES[name]
    trained = {
        kb: compiled(tnt.Model(case.build(keras)), momentum=case.momentum)
        for kb in options.thresholds
    }
    data = tf.data.Dataset.from_tensors(case.data(case.batch)).repeat(case.warm_up + case.steps)
    seconds: dict[str, list[float]] = {kb: [] for kb in trained}
    for _ in range(options.rounds):
        for kb, model in trained.items():
            with fusion_threshold(kb):
                tnt.barrier()
                step = statistics.median(step_times(model, data)[case.warm_up :])
            seconds[kb].append(tnt.allreduce(step, op="max"))
    return seconds


@contextmanager
def fusion_threshold(kb: str) -> Iterator[None]:
    """Steps that are traced in here use this threshold."""
    from tarantella.keras import gradients
    from tarantella.runtime.configuration import configuration

    number = None if kb == AUTO else int(kb)
    changed = replace(configuration(), fusion_threshold_kb=number)
    with mock.patch.object(gradients, "configuration", return_value=changed):
        yield


if __name__ == "__main__":
    main()
