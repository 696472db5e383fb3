"""Step times of training on GPUs, over those of processes that do not communicate.

keras:   plain Keras in one process, on one GPU, with the whole batch.
limit:   as many processes as there are ranks, on the same GPUs, with their part of the batch each.
         They never communicate: ranks cannot be faster.
barrier: the same, but they wait for each other after each step. Not measured unless you ask.
nccl:    a tnt.Model on the whole batch, with sums by NCCL on the GPUs.
host:    the same with sums by MPI in host memory.

Several ranks share a GPU if there are too few; then all candidates use NVIDIA's MPS, if it is
there. For each model, each candidate has fresh processes, and they take turns in each round. A
round's figure is the median of its steps, on the slowest process; ratios are taken within a round,
and the result is the median of the rounds. The first step is timed from the call of `fit`. A
candidate that fails or takes too long has the reason in its row, and the others go on.

XLA compiles in the first step, which takes long, and candidates take theirs one after the other.
With `--no-first-steps`, all take it at the same time, and it has no figure.

    python benchmarks/gpu.py --output gpu.json
    python benchmarks/gpu.py --models resnet50 mlp --precision float32 mixed_bfloat16 --rounds 3
    python benchmarks/gpu.py --precision float32 --rounds 3 --no-first-steps  # in a hurry
    python benchmarks/gpu.py --precision float32 --sums limit barrier nccl
    python benchmarks/gpu.py --device cpu           # checks only that it runs, without a GPU
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mps
import report
from common import ON_THE_CPU, Failed
from models import GPU_CASES, SIZES
from report import Figure
from turns import GOODBYE, Command, Crew

WORKER = str(Path(__file__).parent / "worker.py")
CANDIDATES = ("limit", "barrier", "nccl", "host", "keras")
BY_DEFAULT = ("limit", "nccl", "host", "keras")
PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")
# The targets: speed over the limit, in float32, and of all models whose step takes long.
TARGETS = {"resnet50": 0.92, "transformer": 0.90, "mlp": 0.35}
LONG_STEP, TARGET_OF_LONG_STEPS = 20.0, 0.7  # milliseconds
FIRST_STEP = 0.83  # the target: speed over that of plain Keras
COLUMNS = ("model", "precision", "", "step", "over limit", "first step", "over Keras's", "")
# GPUs are found in another process: this one leaves their memory to those that are measured.
FIND_GPUS = """
import tensorflow as tf
for gpu in tf.config.list_physical_devices("GPU"):
    print(tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name))
"""


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        gpus: The names of the GPUs; empty: ranks run on the CPU, with tiny models.
        ranks: How many ranks; None: one for each GPU, but two at least.
        models: Keys of `GPU_CASES`.
        sums: The candidates.
        precision: Dtype policies of Keras.
        rounds: How often the candidates take turns.
        steps: Steps of a round that are measured; None: what the model says.
        first_steps: Whether first steps are timed, one after the other.
        time_limit: Seconds for a candidate to start, to take its first step, or for a round.
        mps: Variables for all processes by which they find MPS; empty: they do not use it.
    """

    gpus: Sequence[str]
    ranks: int | None = None
    models: Sequence[str] = tuple(GPU_CASES)
    sums: Sequence[str] = BY_DEFAULT
    precision: Sequence[str] = PRECISIONS
    rounds: int = 5
    steps: int | None = None
    first_steps: bool = True
    time_limit: float = 600.0
    mps: Mapping[str, str] = field(default_factory=dict)

    @property
    def number_of_ranks(self) -> int:
        return self.ranks or max(len(self.gpus), 2)

    @property
    def shares_gpus(self) -> bool:
        return 0 < len(self.gpus) < self.number_of_ranks


@dataclass
class Result:
    """What became of a candidate.

    Attributes:
        rounds: The times of its steps in each round, on the slowest process.
        first_step: The time of its first step, on the slowest process.
        problem: Why there is no more.
    """

    rounds: list[list[float]] = field(default_factory=list)
    first_step: float | None = None
    problem: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--ranks", type=int, metavar="N", help="default: the GPUs, 2 at least")
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--steps", type=int, help="steps of a round that are measured")
    parser.add_argument(
        "--first-steps",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time first steps, one after the other; or take all at the same time",
    )
    parser.add_argument(
        "--mps", choices=("auto", "off"), default="auto", help="auto: if ranks share a GPU"
    )
    parser.add_argument("--time-limit", type=float, default=Plan.time_limit, metavar="SECONDS")
    add = parser.add_argument
    add("--models", nargs="+", choices=GPU_CASES, default=list(GPU_CASES))
    add("--sums", nargs="+", choices=CANDIDATES, default=list(BY_DEFAULT))
    add("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    options = vars(parser.parse_args())
    device, output = options.pop("device"), options.pop("output")
    may_use_mps = options.pop("mps") == "auto"
    gpus = found_gpus() if device == "gpu" else []
    if device == "gpu" and not gpus:
        parser.error("TensorFlow finds no GPU; `--device cpu` checks that this benchmark runs")
    plan = Plan(gpus, **options)
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # ends what it began
    figures: list[Figure] = []
    with with_mps(plan) if may_use_mps else nullcontext(plan) as plan:
        for more in measured(plan, lambda line: print(line, flush=True)):
            figures += more
            if output:  # at once: hosts with GPUs are often lent for a short time
                report.write_json(figures, output, gpus=gpus, mps=bool(plan.mps))


def found_gpus() -> list[str]:
    """The names of the GPUs that TensorFlow finds."""
    command = [sys.executable, "-c", FIND_GPUS]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return run.stdout.splitlines()


@contextmanager
def with_mps(plan: Plan) -> Iterator[Plan]:
    """Runs MPS if ranks share a GPU and it can be started; the plan says how it is found."""
    with ExitStack() as stack:
        if plan.shares_gpus and (control := mps.program()):
            try:
                plan = replace(plan, mps=stack.enter_context(mps.running(control)))
            except Failed as failed:
                print(failed, file=sys.stderr, flush=True)
        yield plan


def measured(plan: Plan, show: Callable[[str], object]) -> Iterator[list[Figure]]:
    """Measures each model in each precision, and shows a row for each candidate."""
    where = ", ".join(plan.gpus) or "the CPU (these figures mean nothing)"
    if plan.shares_gpus:
        where += ", shared with MPS" if plan.mps else ", shared without MPS"
    show(f"{plan.number_of_ranks} ranks on {where}\n")
    show(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for model in plan.models:
        for precision in plan.precision:
            begin = time.monotonic()
            results = _results(plan, model, precision)
            seconds = time.monotonic() - begin
            print(f"{model} {precision}: {seconds:.0f} s", file=sys.stderr, flush=True)
            figures = figures_of(model, precision, results)
            for candidate in plan.sums:
                show(row(model, precision, candidate, figures))
            yield figures


def _results(plan: Plan, model: str, precision: str) -> dict[str, Result]:
    """Trains all candidates in each round, one after the other."""
    size = "gpu" if plan.gpus else "tiny"
    case = SIZES[size][model]
    steps = {"warm_up": case.warm_up, "steps": plan.steps or case.steps}
    with ExitStack() as stack:
        candidates = [stack.enter_context(Candidate(name, plan)) for name in plan.sums]
        with ThreadPoolExecutor() as pool:  # importing TensorFlow takes long
            list(pool.map(Candidate.start, candidates))
        for each in candidates:
            each.tell("build", model=model, size=size, precision=precision)
        for each in candidates:
            each.answers("build")
        _take_first_steps(candidates, plan.first_steps)
        for number in range(plan.rounds):
            for each in candidates:
                if times := each.ask("measure", candidate=each.training, **steps):
                    slowest = max(times, key=statistics.median)
                    each.result.rounds.append(slowest)
                    median = 1e3 * statistics.median(slowest)
                    note = f"{model} {precision} {each.name}, round {number + 1}: {median:.2f} ms"
                    print(note, file=sys.stderr, flush=True)
    return {each.name: each.result for each in candidates}


def _take_first_steps(candidates: Sequence[Candidate], timed: bool) -> None:
    """Takes first steps; one after the other if they are timed, or else at the same time."""
    for each in candidates:
        each.tell("first_step", candidate=each.training)
        if timed and (times := each.answers("first_step")):
            each.result.first_step = max(times)
    if not timed:
        for each in candidates:
            each.answers("first_step")


class Candidate:
    """A candidate and its processes; once it has failed, it answers no more.

    Args:
        name: One of `CANDIDATES`.
        plan: What to measure.
    """

    def __init__(self, name: str, plan: Plan) -> None:
        self.name = name
        self.result = Result()
        self.training = "tarantella" if name in ("nccl", "host") else name  # in worker.py
        self._workers = 1 if name == "keras" else plan.number_of_ranks
        self._plan = plan
        self._crew = Crew(plan.time_limit)

    def start(self) -> None:
        self._try(
            lambda: self._crew.start(
                self.name, [command(self.name, self._plan, self._crew.address)], self._workers
            )
        )

    def ask(self, what: str, **arguments: object) -> list[Any]:
        """The answers of its processes; none if it has failed."""
        self.tell(what, **arguments)
        return self.answers(what)

    def tell(self, what: str, **arguments: object) -> None:
        """Tells its processes what to do; `answers` has to come next."""
        self._try(lambda: self._crew.tell(self.name, what, **arguments))

    def answers(self, what: str) -> list[Any]:
        """What they answer; nothing if it has failed."""
        return self._try(lambda: self._crew.answers(self.name, what)) or []

    def _try(self, do: Callable[[], Any]) -> Any:
        if self.result.problem:
            return None
        try:
            return do()
        except Failed as failed:
            print(failed, file=sys.stderr, flush=True)
            self.result.problem = gist(str(failed))
            self._crew.end()
            return None

    def __enter__(self) -> Candidate:
        return self

    def __exit__(self, *error: object) -> None:
        self._crew.end(0 if self.result.problem or error[0] else GOODBYE)


def command(name: str, plan: Plan, address: str) -> Command:
    """What starts the processes of a candidate.

    The ranks start without the `tarantella` command, which lets no two of them share a GPU.
    """
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true", **plan.mps}
    if name == "keras":
        on_cpu = {} if plan.gpus else ON_THE_CPU
        return Command([sys.executable, WORKER, "plain", address], env | on_cpu)
    if plan.gpus:
        env["TNT_GPUS"] = ",".join(str(number) for number in range(len(plan.gpus)))
        env["TNT_GPU_SUMS"] = "nccl" if name == "nccl" else "host"
    else:
        env |= {**ON_THE_CPU, "TNT_NO_GPU": "true", "TNT_THREADS": "1"}
        env["TNT_GPU_SUMS"] = "ring" if name == "nccl" else "host"
    ranks = [mpiexec(), "-n", str(plan.number_of_ranks), sys.executable, WORKER, "ranks", address]
    return Command(ranks, env)


def mpiexec() -> str:
    """The path of mpiexec, rather the one beside this Python."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    path = shutil.which("mpiexec", path=os.pathsep.join(folders))
    if path is None:
        raise Failed("There is no mpiexec to start ranks with.")
    return path


def gist(error: str) -> str:
    """The line that says what happened: the last one that names an exception, or the last."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt): ", line)]
    return (named or lines or ["no reason is known"])[-1]


def figures_of(model: str, precision: str, results: Mapping[str, Result]) -> list[Figure]:
    """Step times and first steps of all candidates, and their ratios."""
    subject = f"{model} {precision}"
    steps, firsts = {}, {}
    for name, result in results.items():
        medians = [1e3 * statistics.median(times) for times in result.rounds]
        steps[name] = Figure("gpu", subject, name, medians, "ms", problem=result.problem)
        first = [] if result.first_step is None else [result.first_step]
        what = f"{name}, first step"
        firsts[name] = Figure("gpu", subject, what, first, "s", problem=result.problem)

    are_timed = any(result.first_step is not None for result in results.values())
    figures = [*steps.values(), *(firsts.values() if are_timed else ())]
    for name in results:
        of_nccl = name == "nccl"
        if name != "limit" and "limit" in results:
            target = _target(model, precision, steps["limit"].median) if of_nccl else None
            figures.append(_ratio(steps["limit"], steps[name], name, "limit", at_least=target))
        if of_nccl and "host" in results:
            figures.append(_ratio(steps["host"], steps[name], name, "host", at_least=1.0))
        if are_timed and name in ("nccl", "host") and "keras" in results:
            target = FIRST_STEP if of_nccl else None
            what = firsts[name].what
            figures.append(_ratio(firsts["keras"], firsts[name], what, "keras", at_least=target))
    return figures


def _target(model: str, precision: str, limit: float | None) -> float | None:
    """The speed over the limit that we want; None if any will do."""
    if precision == "float32" and model in TARGETS:
        return TARGETS[model]
    return TARGET_OF_LONG_STEPS if limit is not None and limit > LONG_STEP else None


def _ratio(one: Figure, other: Figure, what: str, over: str, **target: float | None) -> Figure:
    """One's time over the other's, so the other's speed over one's, in each round of both."""
    ratios = [a / b for a, b in zip(one.rounds, other.rounds, strict=False)]
    problem = "" if ratios else one.problem or other.problem
    return Figure("gpu", one.subject, what, ratios, over=over, problem=problem, **target)


def row(model: str, precision: str, candidate: str, figures: Sequence[Figure]) -> str:
    """A candidate's row of the table."""
    first = f"{candidate}, first step"
    own = {(figure.what, figure.over): figure for figure in figures}
    shown = [
        own.get(key)
        for key in ((candidate, ""), (candidate, "limit"), (first, ""), (first, "keras"))
    ]
    problem = own[candidate, ""].problem
    remarks = [problem.replace("|", "/")] if problem else []
    for figure in figures:
        if figure.what in (candidate, first) and figure.verdict == "MISSED":
            remarks.append(f"MISSED: {figure.what} over {figure.over} >= {figure.at_least}")
    return (
        f"| {' | '.join([model, precision, candidate, *map(_cell, shown), '; '.join(remarks)])} |"
    )


def _cell(figure: Figure | None) -> str:
    """Median, and lowest and highest round."""
    if figure is None:
        return ""
    if figure.median is None:
        return "-"
    form = report.FORMS[figure.unit].format
    low, high = figure.low_and_high
    return form(figure.median) + (
        f" ({form(low)} to {form(high)})" if len(figure.rounds) > 1 else ""
    )


if __name__ == "__main__":
    main()
