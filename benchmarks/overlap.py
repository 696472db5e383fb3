"""How much of the communication is hidden behind the backward pass, on a slow link.

Two hosts with a rank each, network namespaces on this machine, with a link of 1 Gbit/s between
them. In synchronous training, the limit of a step is its forward pass plus its backward pass or the
communication, whichever takes longer. These are measured separately and together, alternately, in
the same two processes; a round's figure is the median of its steps on the slower rank, the result
is the median of the rounds. Needs root, ssh and iproute2.

    python benchmarks/overlap.py                            # ResNet-50, and a picture of a step
    python benchmarks/overlap.py --thresholds 0 32 256 4096 # fusion thresholds, in kB
    python benchmarks/overlap.py --gbit 0.1 --models lenet5
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
from common import (
    RANKS,
    Failed,
    compiled,
    is_rank,
    simulated_hosts,
    step_times,
    tarantella_on_ranks,
)

RESULTS = Path(__file__).with_name("results")
TARGET = 0.87  # the limit over a step
SHOWN = 6  # the step that is drawn
STEP_HEIGHT = 5  # of the line with the phases of a step, in the picture; those of buckets have 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=models.CASES, default=["resnet50"])
    parser.add_argument("--thresholds", nargs="+", type=int, metavar="KB", default=[None])
    parser.add_argument("--gbit", type=float, default=1.0, help="speed of the link, in Gbit/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="steps in a round")
    parser.add_argument("--no-picture", dest="picture", action="store_false")
    options = parser.parse_args()
    if is_rank():
        rank_main(options)
        return
    RESULTS.mkdir(exist_ok=True)
    results = measure_on_hosts(options)
    (RESULTS / "overlap.json").write_text(json.dumps(results, indent=1) + "\n")
    if options.picture:
        draw(json.loads((RESULTS / "timeline.json").read_text()), RESULTS / "timeline.png")


@contextmanager
def hosts_on_slow_link(gbit: float) -> Iterator[tuple[Any, Path]]:
    """Two hosts with a link of this speed, and the path of their hostfile."""
    with simulated_hosts(RANKS) as (hosts, hostfile):
        for node in hosts.nodes:
            for interface in ("eth0", "eth1"):
                node.run(
                    *("tc", "qdisc", "add", "dev", interface, "root", "tbf"),
                    *("rate", f"{gbit}gbit", "burst", "256kb", "latency", "50ms"),
                )
        yield hosts, hostfile


def measure_on_hosts(options: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    with hosts_on_slow_link(options.gbit) as (hosts, hostfile):
        print(f"Link of {options.gbit:g} Gbit/s. Times in milliseconds.", flush=True)
        print(HEAD, flush=True)
        for model in options.models:
            for threshold in options.thresholds:
                figures = run_on(hosts, hostfile, model, threshold, options)
                results.append(figures | {"gbit": options.gbit})
                print(line(figures), flush=True)
        if options.picture:
            run_on(hosts, hostfile, options.models[0], options.thresholds[0], options, True)
    return results


def run_on_hosts(hosts: Any, hostfile: Path, options: list[str], program: list[str]) -> Any:
    """Runs a program on the hosts, with one rank on each if the options do not say otherwise.

    Returns the JSON in the last line that it prints.
    """
    command = [str(Path(sys.executable).parent / "tarantella"), "--hostfile", str(hostfile)]
    command += ["--no-gpu", "--quiet", "-x", "TNT_THREADS=1", *options, "--", *program]
    run = hosts["node1"].run(*command, check=False, timeout=900)
    if run.returncode != 0:
        raise Failed(run.stdout + run.stderr)
    sys.stderr.write(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def run_on(
    hosts: Any,
    hostfile: Path,
    model: str,
    threshold: int | None,
    options: argparse.Namespace,
    traced: bool = False,
) -> dict[str, Any]:
    """Measures on the hosts, or trains a few steps for a timeline."""
    given = [] if threshold is None else ["--fusion-threshold", str(threshold)]
    if traced:
        given += ["--timeline", str(RESULTS / "timeline.json")]
    program = [__file__, "--models", model, "--steps", str(options.steps)]
    program += ["--rounds", str(0 if traced else options.rounds)]
    figures: dict[str, Any] = run_on_hosts(hosts, hostfile, given, program)
    return figures | {"threshold_kb": threshold}


HEAD = (
    f"{'model':12}{'fusion':>8}{'forward':>9}{'backward':>9}{'update':>8}{'comm.':>8}"
    f"{'limit':>8}{'step':>8}{'ratio':>7}{'hidden':>8}"
)


def line(figures: dict[str, Any]) -> str:
    times = {name: 1e3 * seconds for name, seconds in figures["seconds"].items()}
    threshold = figures["threshold_kb"]
    missed = "" if figures["ratio"] >= TARGET else f"  under {TARGET}"
    return (
        f"{figures['model']:12}{'default' if threshold is None else f'{threshold} kB':>8}"
        f"{times['forward']:9.0f}{times['backward']:9.0f}{times['update']:8.0f}"
        f"{times['communication']:8.0f}{times['limit']:8.0f}{times['step']:8.0f}"
        f"{figures['ratio']:7.2f}{figures['hidden']:8.0%}{missed}"
    )


def rank_main(options: argparse.Namespace) -> None:
    tnt = tarantella_on_ranks()
    (name,) = options.models
    if options.rounds:
        figures = measure(name, options.rounds, options.steps, tnt)
    else:
        step_times(*training(name, tnt, SHOWN + 3))
        figures = {}
    if tnt.is_master_rank():
        print(json.dumps(figures), flush=True)


def measure(name: str, rounds: int, steps: int, tnt: Any) -> dict[str, Any]:
    """Measures the phases of a step separately, and the whole step."""
    phases = phases_of_step(name)
    warm_up = 3

    def alone(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(warm_up + steps):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[warm_up:])

    def whole() -> float:
        return statistics.median(step_times(*training(name, tnt, warm_up + steps))[warm_up:])

    trained = {name: [] for name in (*phases, "step")}
    for _ in range(rounds):
        for phase, work in phases.items():
            tnt.barrier()
            trained[phase].append(tnt.allreduce(alone(work), op="max"))
        tnt.barrier()
        trained["step"].append(tnt.allreduce(whole(), op="max"))
    medians = {phase: statistics.median(times) for phase, times in trained.items()}
    forward, communication = medians["forward"], medians["communication"]
    backward = medians["gradients"] - forward
    update = medians["plain"] - medians["gradients"]
    limit = forward + max(backward, communication)
    return {
        "model": name,
        "seconds": {
            "forward": forward,
            "backward": backward,
            "update": update,
            "communication": communication,
            "limit": limit,
            "step": medians["step"],
        },
        "ratio": limit / medians["step"],
        "hidden": (medians["plain"] + communication - medians["step"]) / communication,
        "rounds": trained,
    }


def phases_of_step(name: str) -> dict[str, Callable[[], Any]]:
    """The phases of a step of one rank: its forward pass, its gradients, and so on."""
    import keras
    import tensorflow as tf

    from tarantella.keras import gradients as of_ranks
    from tarantella.runtime.configuration import configuration

    case = models.CASES[name]
    model = compiled(case.build(keras), momentum=case.momentum)
    x, y = map(tf.constant, case.data(case.batch // RANKS))
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def forward() -> Any:
        return loss_of(y, model(x, training=True))

    @tf.function
    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    @tf.function
    def communication(tensors: Sequence[Any]) -> Any:
        threshold = configuration().fusion_threshold_bytes
        return of_ranks.channel("gradients").allreduce(tensors[::-1], threshold)

    sent = [tf.convert_to_tensor(gradient) for gradient in gradients()]
    return {
        "forward": forward,
        "gradients": gradients,
        "plain": lambda: model.train_on_batch(x, y),
        "communication": lambda: communication(sent),
    }


_trained: dict[str, Any] = {}


def training(name: str, tnt: Any, steps: int) -> tuple[Any, Any]:
    """A model on all ranks, and data for some steps."""
    import keras
    import tensorflow as tf

    case = models.CASES[name]
    if name not in _trained:
        _trained[name] = compiled(tnt.Model(case.build(keras)), momentum=case.momentum)
    return _trained[name], tf.data.Dataset.from_tensors(case.data(case.batch)).repeat(steps)


def draw(trace: dict[str, Any], path: Path) -> None:
    """A picture of one step: what each rank computes, and what it communicates meanwhile."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    lanes = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    ends = [s for s in spans if s["pid"] == 0 and s["name"] == "between steps"]
    begin = ends[SHOWN - 1]["ts"] + ends[SHOWN - 1]["dur"]
    end = ends[SHOWN]["ts"] + ends[SHOWN]["dur"]
    shown = [s for s in spans if s["ts"] < end and s["ts"] + s["dur"] > begin and s["dur"] > 0]
    colors = {
        "input": "#9aa5b1",
        "forward": "#3b82c4",
        "backward": "#8b5fbf",
        "waiting for sums": "#e0a030",
        "update": "#2f9e6e",
        "between steps": "#c7cdd4",
        "waiting": "#f3d9a4",
        "reducing": "#d1495b",
    }
    rows = {}
    for rank in sorted({s["pid"] for s in shown}):
        names = {lanes[s["pid"], s["tid"]] for s in shown if s["pid"] == rank}
        buckets = sorted((n for n in names if n.startswith("gradients")), key=_number)
        for name in ["steps", *buckets]:
            rows[rank, name] = len(rows) + STEP_HEIGHT * (rank + (name != "steps") / 2)
    # Narrow, so that text of 11 points is still legible on a phone.
    figure, axes = pyplot.subplots(figsize=(4.4, 1.8 + 0.045 * len(rows)), layout="constrained")
    for span in shown:
        row = rows.get((span["pid"], lanes[span["pid"], span["tid"]]))
        if row is None or span["name"] not in colors:
            continue
        left, right = max(span["ts"], begin), min(span["ts"] + span["dur"], end)
        is_step = lanes[span["pid"], span["tid"]] == "steps"
        axes.barh(row, (right - left) / 1e3, left=(left - begin) / 1e3,
                  height=STEP_HEIGHT if is_step else 1, color=colors[span["name"]])  # fmt: skip
    axes.invert_yaxis()
    middles = {
        f"rank {rank}": statistics.mean(y for (of, _), y in rows.items() if of == rank)
        for rank in sorted({of for of, _ in rows})
    }
    axes.set_yticks(list(middles.values()), list(middles), rotation=90, va="center", fontsize=11)
    axes.tick_params(left=False)
    axes.tick_params(axis="x", labelsize=11)
    axes.set_xlabel("milliseconds", fontsize=11)
    axes.set_xlim(0, (end - begin) / 1e3)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    figure.legend(handles, colors, ncols=2, loc="outside upper left",
                  frameon=False, fontsize=11, handlelength=1, columnspacing=1)  # fmt: skip
    figure.savefig(path, dpi=150, facecolor="white")


def _number(name: str) -> int:
    return int(name.split()[1])


if __name__ == "__main__":
    main()
