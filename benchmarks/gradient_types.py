"""What gradients of 16 bits gain on a slow link, and what they change.

Two hosts with a rank each, network namespaces on this machine, with a link of 1 Gbit/s between
them. Models with each type of gradients train in turns, in the same two processes; a round's figure
is the median of its steps on the slower rank, the result is the median of the rounds. A small
classifier of handwritten digits is then trained until it has converged, with each type and several
seeds. Needs root, ssh and iproute2.

    python benchmarks/gradient_types.py
    python benchmarks/gradient_types.py --models lenet5 --gbit 0.1
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import models
from common import bytes_sent, compiled, is_rank, step_times, tarantella_on_ranks
from overlap import hosts_on_slow_link, run_on_hosts

TYPES = ("float32", "bfloat16", "float16")
TARGET = 1.6  # speed over that with float32, for ResNet-50 on 1 Gbit/s
WARM_UP = 3
SEEDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=models.CASES, default=["resnet50"])
    parser.add_argument("--gbit", type=float, default=1.0, help="speed of the link, in Gbit/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps in a round")
    options = parser.parse_args()
    if is_rank():
        rank_main(options)
        return
    program = [__file__, "--models", *options.models, "--steps", str(options.steps)]
    program += ["--rounds", str(options.rounds)]
    with hosts_on_slow_link(options.gbit) as (hosts, hostfile):
        figures = run_on_hosts(hosts, hostfile, [], program)
    print(f"Link of {options.gbit:g} Gbit/s.")
    for model, by_type in figures["steps"].items():
        for gradient_type, of_type in by_type.items():
            ratio = by_type["float32"]["seconds"] / of_type["seconds"]
            print(
                f"{model:12}{gradient_type:10}{1e3 * of_type['seconds']:8.0f} ms a step"
                f"{of_type['bytes'] / 1e6:9.1f} MB sent by the master{ratio:7.2f} times as fast"
            )
    print(f"As fast as float32 is 1. Target for ResNet-50 on 1 Gbit/s: {TARGET} or more.")
    for gradient_type, runs in figures["digits"].items():
        losses = ", ".join(f"{loss:.4f}" for loss, _ in runs)
        accuracies = ", ".join(f"{accuracy:.4f}" for _, accuracy in runs)
        print(f"digits      {gradient_type:10} validation loss {losses}; accuracy {accuracies}")


def rank_main(options: argparse.Namespace) -> None:
    tnt = tarantella_on_ranks()
    figures = {
        "steps": {name: measured(name, options, tnt) for name in options.models},
        "digits": {each: [trained(each, seed, tnt) for seed in range(SEEDS)] for each in TYPES},
    }
    if tnt.is_master_rank():
        print(json.dumps(figures), flush=True)


def measured(name: str, options: argparse.Namespace, tnt: Any) -> dict[str, Any]:
    """Seconds of a step, and bytes that this rank sends for it, by type."""
    import keras
    import tensorflow as tf

    case = models.CASES[name]
    by_type = {
        each: compiled(tnt.Model(case.build(keras), gradient_type=each), momentum=case.momentum)
        for each in TYPES
    }
    steps = WARM_UP + options.steps
    data = tf.data.Dataset.from_tensors(case.data(case.batch)).repeat(steps)
    seconds: dict[str, list[float]] = {each: [] for each in TYPES}
    sent: dict[str, float] = {}
    for _ in range(options.rounds):
        for each, model in by_type.items():
            tnt.barrier()
            before = bytes_sent()
            step = statistics.median(step_times(model, data)[WARM_UP:])
            sent[each] = (bytes_sent() - before) / steps
            seconds[each].append(tnt.allreduce(step, op="max"))
    return {
        each: {"seconds": statistics.median(seconds[each]), "bytes": sent[each]} for each in TYPES
    }


def trained(gradient_type: str, seed: int, tnt: Any) -> tuple[float, float]:
    """Validation loss and accuracy of a classifier of digits, at the end of its training."""
    import keras
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    keras.utils.set_random_seed(seed)
    layers = [
        keras.Input((64,)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
    model = tnt.Model(keras.Sequential(layers), gradient_type=gradient_type)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        *(images[:1400], labels[:1400]),
        batch_size=100,
        epochs=30,
        validation_data=(images[1400:], labels[1400:]),
        verbose=0,
    ).history
    return history["val_loss"][-1], history["val_accuracy"][-1]


if __name__ == "__main__":
    main()
