"""Speed from the command to the end of the first training step, over that of plain Keras.

LeNet-5, as `python script.py` in one process with all cores, and as `tarantella -n 2` on the
same cores. Both take turns, with a fresh start each time; the result is the median of the ratios.

    python benchmarks/startup.py
    python benchmarks/startup.py --quick            # checks only that it runs
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import report
from common import ON_THE_CPU, RANKS, compiled, last_line, lenet5, on_ranks, tarantella_on_ranks
from models import CASES
from report import Figure

RATIO = 0.77  # the target, at least
TRAIN = "--train"  # for the processes that are timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument(TRAIN, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train()
    else:
        print(report.table(measured(options.rounds, options.quick)))


def measured(rounds: int, quick: bool) -> list[Figure]:
    """Starts both in turn."""
    print("start-up ...", file=sys.stderr, flush=True)
    script = [__file__, TRAIN]
    commands = {"keras": [sys.executable, *script], "tarantella": [*on_ranks(RANKS), *script]}
    if not quick:
        for command in commands.values():  # files are slow when they are read for the first time
            until_first_step(command)
    times = [
        {name: until_first_step(command) for name, command in commands.items()}
        for _ in range(1 if quick else rounds)
    ]
    ratios = [one["keras"] / one["tarantella"] for one in times]
    return [
        *(
            Figure("startup", "lenet5", name, [one[name] for one in times], "s")
            for name in commands
        ),
        Figure("startup", "lenet5", "tarantella", ratios, over="keras", at_least=RATIO),
    ]


def until_first_step(command: list[str]) -> float:
    """Seconds from the start of a command; all processes of a machine have the same clock."""
    begin = time.monotonic()
    end: float = last_line(command, **ON_THE_CPU)
    return end - begin


def train() -> None:
    """Takes one step, and prints when it ended."""
    tnt = tarantella_on_ranks()
    import keras
    import tensorflow as tf

    ends: list[float] = []
    case = CASES["lenet5"]
    model = tnt.Model(lenet5()) if tnt else lenet5()
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(time.monotonic())
    )
    dataset = tf.data.Dataset.from_tensors(case.data(case.batch))
    compiled(model).fit(dataset, shuffle=False, verbose=0, callbacks=[clock])
    if tnt:
        ends = [float(tnt.allreduce(ends[0], op="max"))]
        if not tnt.is_master_rank():
            return
    print(json.dumps(ends[0]), flush=True)


if __name__ == "__main__":
    main()
