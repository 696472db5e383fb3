"""All benchmarks, with one table at the end: what `make bench` runs.

It takes about 20 minutes on two otherwise idle cores, and more if there are GPUs. The figures are
written to results/results.json next to this file; results/results.png shows how close each way of
training comes to the limit. With --quick, nothing is written unless you pass --output.

    python benchmarks/bench.py
    python benchmarks/bench.py --only step --models lenet5 --candidates limit tarantella
    python benchmarks/bench.py --quick              # checks only that it runs
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import allreduce
import memory
import rank_memory
import report
import startup
import step_cost
import step_time
from common import ON_THE_CPU, RANKS, printed
from input import COST, GAIN
from report import Figure

import gpu

HERE = Path(__file__).parent
GIB, QUICK_GIB = 4.0, 0.1  # size of the array to train on


def main() -> None:
    options = parsed()
    figures: list[Figure] = []
    try:
        for part in options.only:
            figures += PARTS[part](options)
    finally:  # even if a part has failed
        if figures:
            print(report.table(figures))
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        report.write_json(figures, options.output / "results.json")
        report.picture(figures, options.output / "results.png")
        print(f"\nwritten: {options.output}/results.json and results.png")
    missed = report.missed(figures)
    asked = [figure for figure in figures if figure.verdict]
    print(f"\n{len(asked) - len(missed)} of {len(asked)} targets are met.")
    if options.quick:
        print("With --quick, the figures mean nothing.")
    sys.exit(1 if options.strict and missed else 0)


def parsed() -> Namespace:
    """The options, checked at once: an error should not come at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of a few steps")
    parser.add_argument("--strict", action="store_true", help="status 1 if a target is missed")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where to write results")
    step_time.add_options(parser)
    options = parser.parse_args()
    if options.output is None and not options.quick:
        options.output = HERE / "results"
    if options.output and find_spec("matplotlib") is None:
        parser.error("the picture needs matplotlib: `make bench` installs it")
    if len(os.sched_getaffinity(0)) < RANKS:
        parser.error(f"this needs {RANKS} cores")
    return options


def of_steps(options: Namespace) -> list[Figure]:
    return step_time.measured(
        step_time.Plan(options.models, options.candidates, options.rounds, options.quick)
    )


def of_many_ranks(options: Namespace) -> list[Figure]:
    models = [model for model in step_time.OF_MANY_RANKS if model in options.models]
    if not models:
        known = " and ".join(step_time.OF_MANY_RANKS)
        print(f"ranks: left out, as it is about {known} only", file=sys.stderr, flush=True)
        return []
    plan = step_time.Plan(models, ("limit", "barrier", "tarantella"), options.rounds, options.quick)
    cores = len(os.sched_getaffinity(0))
    numbers = [ranks for ranks in step_time.MANY_RANKS if ranks <= cores]
    return [figure for n in numbers for figure in step_time.measured(replace(plan, ranks=n))]


def of_step_cost(options: Namespace) -> list[Figure]:
    return step_cost.measured(options.rounds, options.quick)


def of_allreduce(options: Namespace) -> list[Figure]:
    return allreduce.measured(options.rounds, options.quick)


def of_startup(options: Namespace) -> list[Figure]:
    return startup.measured(options.rounds, options.quick)


def of_memory(options: Namespace) -> list[Figure]:
    arrays = memory.measured(QUICK_GIB if options.quick else GIB)
    return [*rank_memory.measured(options.quick), *arrays]


def of_input(options: Namespace) -> list[Figure]:
    print("input ...", file=sys.stderr, flush=True)
    arguments = ["--rounds", str(options.rounds), *(["--quick"] if options.quick else [])]
    return read_input(printed([sys.executable, str(HERE / "input.py"), *arguments], **ON_THE_CPU))


def read_input(text: str) -> list[Figure]:
    """The figures in the output of input.py."""
    number = r"([-+]?[\d.]+)%?"
    line = rf"(jpeg|memory) +(\S.*?) +over (.+?) +{number} \({number} to {number}\)"
    figures = []
    for subject, what, over, *numbers in re.findall(rf"^{line}$", text, re.MULTILINE):
        scale, unit = (1.0, "") if subject == "jpeg" else (100.0, "%")
        gain = GAIN if what == "2 ranks" else None
        cost = COST if what in ("arrays", "dataset") else None
        rounds = [float(one) / scale for one in numbers]
        figures.append(
            Figure("input", subject, what, rounds, unit, over, at_least=gain, at_most=cost)
        )
    return figures


def of_gpus(options: Namespace) -> list[Figure]:
    gpus = gpu.found_gpus()
    if not gpus:
        print("gpu: left out, as TensorFlow finds no GPU", file=sys.stderr, flush=True)
        return []
    print("step times on GPUs ...", file=sys.stderr, flush=True)
    few = {"rounds": 1, "steps": 3} if options.quick else {"rounds": options.rounds}
    with gpu.with_mps(gpu.Plan(gpus, models=options.models, **few)) as plan:
        parts = gpu.measured(plan, lambda line: print(line, file=sys.stderr, flush=True))
        return [figure for part in parts for figure in part]


PARTS: dict[str, Callable[[Namespace], list[Figure]]] = {
    "step": of_steps,
    "ranks": of_many_ranks,
    "cost": of_step_cost,
    "allreduce": of_allreduce,
    "startup": of_startup,
    "memory": of_memory,
    "input": of_input,
    "gpu": of_gpus,
}


if __name__ == "__main__":
    main()
