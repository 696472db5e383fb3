"""Peak resident memory of a rank, compared with plain Keras on the same micro-batch.

Each trains in fresh processes, with one compute thread and as many others as a rank has. A rank
needs more for the sums of gradients, for MPI, and for everything else it has loaded.

    python benchmarks/rank_memory.py
    python benchmarks/rank_memory.py --quick        # checks only that it runs
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import report
from common import ON_THE_CPU, RANKS, compiled, last_line, on_ranks, tarantella_on_ranks
from memory import MIB, peak
from models import CASES
from report import Figure

MODELS = ("resnet50", "mlp")
STEPS, QUICK_STEPS = 12, 2
# The target: at most so many times the gradients, plus so many MiB.
TIMES, MORE = 1.5, 60 * 1e6 / MIB
TRAIN = "--train"  # for the processes that are measured
THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "7"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=MODELS)
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument(TRAIN, choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, QUICK_STEPS if options.quick else STEPS)
    else:
        print(report.table(measured(options.quick, options.models)))


def measured(quick: bool, models: Sequence[str] = MODELS) -> list[Figure]:
    """Trains each model on fresh ranks, and in a process without Tarantella."""
    figures = []
    for model in models:
        print(f"memory of {model} ...", file=sys.stderr, flush=True)
        script = [__file__, TRAIN, model, *(["--quick"] if quick else [])]
        alone = last_line([sys.executable, *script], **ON_THE_CPU, **THREADS)
        rank = last_line([*on_ranks(RANKS), *script], **ON_THE_CPU, **THREADS)
        gradients = alone["gradients"]
        extra = rank["peak"] - alone["peak"]
        asked = TIMES * gradients + MORE
        figures += [
            Figure("memory", model, "keras, a micro-batch", [alone["peak"]], "MiB"),
            Figure("memory", model, "gradients", [gradients], "MiB"),
            Figure("memory", model, "a rank, more than keras", [extra], "MiB", at_most=asked),
        ]
    return figures


def train(name: str, steps: int) -> None:
    """Trains on data in memory, and prints the highest peak of all processes, in MiB."""
    tnt = tarantella_on_ranks()
    import keras
    import tensorflow as tf

    case = CASES[name]
    model = case.build(keras)
    gradients = sum(w.numpy().nbytes for w in model.trainable_variables) / MIB
    batch = case.batch if tnt else case.batch // RANKS
    model = tnt.Model(model) if tnt else model
    dataset = tf.data.Dataset.from_tensors(case.data(batch)).repeat(steps)
    compiled(model, momentum=case.momentum).fit(dataset, shuffle=False, verbose=0)
    highest = peak()
    if tnt:
        highest = float(tnt.allreduce(highest, op="max"))
        if not tnt.is_master_rank():
            return
    print(json.dumps({"peak": highest, "gradients": gradients}), flush=True)


if __name__ == "__main__":
    main()
