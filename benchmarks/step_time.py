"""Step times of training on two ranks or more, and of other ways to train on the same cores.

keras:      plain Keras in one process, with all cores and the whole batch.
limit:      as many processes as ranks, with one compute thread and a micro-batch each, which never
            communicate. Ranks cannot be faster.
barrier:    the same processes, which wait for each other after each step. They are as fast as the
            slowest of them, like ranks whose sums cost nothing. Not measured unless you ask.
tarantella: ranks with one compute thread each, and a tnt.Model on the whole batch. These are the
            same processes.
mirrored:   two workers of tf.distribute.MultiWorkerMirroredStrategy on legacy Keras, with one
            compute thread and a core each, in a separate environment (legacy.py).

A micro-batch is the same for any number of ranks, so the batch grows with it (weak scaling).

All processes live as long as the benchmark, and the candidates take turns in each round. A
round's figure is the median of its steps, on the slower process; ratios are taken within a
round, and the result is the median of the rounds.

    python benchmarks/step_time.py                  # all models and candidates
    python benchmarks/step_time.py --models lenet5 --candidates limit tarantella --rounds 9
    python benchmarks/step_time.py --ranks 8 16 --candidates limit barrier tarantella
    python benchmarks/step_time.py --quick          # checks only that it runs
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import report
from common import ON_THE_CPU, RANKS, check_cores, on_ranks
from legacy import UnavailableError, legacy_python
from models import CASES
from report import Figure
from turns import Command, Crew

WORKER = str(Path(__file__).parent / "worker.py")
# Candidate: the processes it runs in.
CANDIDATES = {
    "keras": "plain",
    "limit": "ranks",
    "barrier": "ranks",
    "tarantella": "ranks",
    "mirrored": "mirrored",
}
BY_DEFAULT = [candidate for candidate in CANDIDATES if candidate != "barrier"]
QUICK = (1, 3)  # steps to warm up with, steps to measure
# The targets: Tarantella's speed over that of another candidate.
TARGETS = {
    "lenet5": {"limit": 0.95, "keras": 1.0, "mirrored": 1.8},
    "resnet50": {"limit": 0.95, "keras": 1.0, "mirrored": 1.8},
    "transformer": {"limit": 0.95, "mirrored": 1.8},
    "mlp": {"mirrored": 2.0},
    "embedding": {"mirrored": 2.0},
}
# Tarantella's speed over the limit, by the number of ranks, for the models of `OF_MANY_RANKS`.
MANY_RANKS = {4: None, 8: 0.92, 16: 0.90}
OF_MANY_RANKS = ("lenet5", "resnet50")

Round = dict[str, list[float]]  # candidate: the times of its steps, on the slower process


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    models: Sequence[str] = tuple(CASES)
    candidates: Sequence[str] = tuple(BY_DEFAULT)
    rounds: int = 5
    quick: bool = False
    fusion_threshold: str | None = None
    ranks: int = RANKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--quick", action="store_true", help="one round of a few steps")
    parser.add_argument("--fusion-threshold", metavar="KB")
    parser.add_argument("--ranks", nargs="+", type=int, default=[RANKS])
    add_options(parser)
    options = parser.parse_args()
    check_cores(parser, options.ranks, options.quick)
    plan = Plan(**vars(options))
    figures = [one for ranks in options.ranks for one in measured(replace(plan, ranks=ranks))]
    print(report.table(figures))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select models and candidates."""
    add = parser.add_argument
    add("--models", nargs="+", choices=CASES, default=list(CASES))
    add("--candidates", nargs="+", choices=CANDIDATES, default=BY_DEFAULT)


def measured(plan: Plan) -> list[Figure]:
    """Measures all models, each with all candidates in turn."""
    figures: list[Figure] = []
    with ExitStack() as stack:
        crew = stack.enter_context(Crew())
        candidates, problem = _start(crew, plan)
        for model in plan.models:
            print(f"{_part(plan.ranks)} of {model} ...", file=sys.stderr, flush=True)
            rounds = list(_rounds(crew, model, candidates, plan))
            figures += figures_of(model, rounds, plan.candidates, problem, plan.ranks)
    return figures


def _start(crew: Crew, plan: Plan) -> tuple[list[str], str]:
    """Starts the processes; returns the available candidates, and why others are missing."""
    kinds = {CANDIDATES[candidate] for candidate in plan.candidates}
    problem = ""
    worker = [sys.executable, WORKER]
    if "mirrored" in kinds and plan.ranks != RANKS:
        problem = f"it is measured with {RANKS} workers only"
    elif "mirrored" in kinds:
        try:
            commands = _mirrored_workers(legacy_python(), crew.address)
            crew.start("mirrored", commands, RANKS)
        except UnavailableError as error:
            problem = " ".join(str(error).split())
    if "plain" in kinds:
        crew.start("plain", [Command([*worker, "plain", crew.address], ON_THE_CPU)], 1)
    if "ranks" in kinds:
        fusion = plan.fusion_threshold
        options = [] if fusion is None else ["--fusion-threshold", fusion]
        ranks = on_ranks(plan.ranks, *options, "-x", "TNT_THREADS=1")
        command = Command([*ranks, WORKER, "ranks", crew.address], ON_THE_CPU)
        crew.start("ranks", [command], plan.ranks)
    there = [c for c in plan.candidates if not (problem and CANDIDATES[c] == "mirrored")]
    return there, problem


def _mirrored_workers(python: Path, address: str) -> list[Command]:
    """Two workers that find each other, without a proxy between them."""
    hosts = [f"localhost:{port}" for port in _free_ports(RANKS)]
    env = {**ON_THE_CPU, "TF_USE_LEGACY_KERAS": "1", "no_grpc_proxy": "localhost"}
    return [
        Command(
            [str(python), WORKER, "mirrored", address],
            env | {"TF_CONFIG": json.dumps(_task(hosts, index))},
        )
        for index in range(RANKS)
    ]


def _task(hosts: list[str], index: int) -> dict[str, object]:
    return {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}}


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("localhost", 0))
        return [one.getsockname()[1] for one in sockets]


def _rounds(crew: Crew, model: str, candidates: Sequence[str], plan: Plan) -> Iterator[Round]:
    """Trains all candidates in each round, one after the other."""
    case = CASES[model]
    warm_up, steps = QUICK if plan.quick else (case.warm_up, case.steps)
    kinds = list(dict.fromkeys(CANDIDATES[candidate] for candidate in candidates))
    for kind in kinds:
        crew.ask(kind, "build", model=model, ranks=plan.ranks)
    for candidate in candidates:  # traces the step
        crew.ask(CANDIDATES[candidate], "measure", candidate=candidate, warm_up=0, steps=1)
    for _ in range(1 if plan.quick else plan.rounds):
        yield {
            candidate: max(
                crew.ask(
                    CANDIDATES[candidate],
                    "measure",
                    candidate=candidate,
                    warm_up=warm_up,
                    steps=steps,
                ),
                key=statistics.median,
            )
            for candidate in candidates
        }
    for kind in kinds:
        crew.ask(kind, "drop")


def figures_of(
    model: str,
    rounds: Sequence[Round],
    candidates: Sequence[str],
    problem: str = "",
    ranks: int = RANKS,
) -> list[Figure]:
    """Step times, their ratios to the limit, and Tarantella's other ratios."""

    def ratio(one: str, other: str, at_least: float | None) -> Figure:
        speeds = [
            statistics.median(times[other]) / statistics.median(times[one])
            for times in rounds
            if one in times and other in times
        ]
        why = "" if speeds else problem
        return Figure(part, model, one, speeds, over=other, at_least=at_least, problem=why)

    part = _part(ranks)
    figures = []
    for candidate in candidates:
        steps = sorted(1e3 * time for times in rounds for time in times.get(candidate, ()))
        medians = [
            1e3 * statistics.median(times[candidate]) for times in rounds if candidate in times
        ]
        spread = (steps[len(steps) // 10], steps[-1 - len(steps) // 10]) if steps else None
        why = "" if steps else problem
        figures.append(Figure(part, model, candidate, medians, "ms", spread=spread, problem=why))
    targets = _targets(model, ranks)
    if "limit" in candidates:
        for candidate in (c for c in candidates if c != "limit"):
            asked = targets.get("limit") if candidate == "tarantella" else None
            figures.append(ratio(candidate, "limit", asked))
    if "tarantella" in candidates:
        for other in (c for c in candidates if c in ("keras", "mirrored")):
            figures.append(ratio("tarantella", other, targets.get(other)))
    return figures


def _part(ranks: int) -> str:
    return "step" if ranks == RANKS else f"step, {ranks} ranks"


def _targets(model: str, ranks: int) -> dict[str, float | None]:
    if ranks == RANKS:
        return dict(TARGETS[model])
    return {"limit": MANY_RANKS.get(ranks)} if model in OF_MANY_RANKS else {}


if __name__ == "__main__":
    main()
