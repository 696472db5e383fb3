"""What the benchmarks share: ranks and hosts on this machine, a model, and its step times."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models

RANKS = 2
MOMENTUM = 0.9
ON_THE_CPU = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}


class Failed(SystemExit):
    """Ends a benchmark with a message that says why."""


def is_rank() -> bool:
    """Whether this process was started by `tarantella`."""
    return "TNT_RUN_ID" in os.environ


def check_cores(parser: argparse.ArgumentParser, ranks: Sequence[int], quick: bool) -> None:
    """Ends with a message if ranks would share cores, unless their figures mean nothing anyway."""
    most, cores = max(ranks), len(os.sched_getaffinity(0))
    if most > cores and not quick:
        parser.error(
            f"figures of {most} ranks would mean nothing here, as each needs a core and there are "
            f"{cores}: use fewer ranks, or --quick to check only that it runs"
        )


def on_ranks(ranks: int, *options: str) -> list[str]:
    """The start of a command line that runs a script on ranks of this machine, without GPUs."""
    command = Path(sys.executable).parent / "tarantella"
    return [str(command), "-n", str(ranks), "--no-gpu", "--quiet", *options, "--"]


@contextmanager
def simulated_hosts(count: int) -> Iterator[tuple[Any, Path]]:
    """Hosts that are network namespaces on this machine, and the path of their hostfile."""
    sys.path.append(str(Path(__file__).parents[1] / "tests/cluster"))
    from testbed import Testbed, what_is_missing

    if missing := what_is_missing():
        raise Failed(missing)
    with tempfile.TemporaryDirectory() as folder, Testbed(count, shared=[Path(folder)]) as hosts:
        hostfile = Path(folder) / "hosts"
        hostfile.write_text("".join(f"{node.name}\n" for node in hosts.nodes))
        yield hosts, hostfile


def bytes_sent() -> int:
    """What the host of this process has sent to networks so far."""
    files = Path("/sys/class/net").glob("eth*/statistics/tx_bytes")
    return sum(int(file.read_text()) for file in files)


def tarantella_on_ranks() -> Any:
    """Tarantella, if this process is a rank. Call it before TensorFlow's first operation."""
    return importlib.import_module("tarantella") if is_rank() else None


def printed(command: Sequence[str], **env: str) -> str:
    """Runs a command, and returns its output; of its errors, shows only Tarantella's."""
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | env)
    if run.returncode != 0:
        words = " ".join(command)
        raise Failed(f"{run.stdout}{run.stderr}{words} failed with status {run.returncode}.")
    warnings = [line for line in run.stderr.splitlines(True) if line.startswith("tarantella")]
    sys.stderr.writelines(warnings)
    return run.stdout


def last_line(command: Sequence[str], **env: str) -> Any:
    """Runs a command, and parses the last line of its output as JSON."""
    return json.loads(printed(command, **env).splitlines()[-1])


def step_times(model: Any, *data: Any, keras: Any = None, **options: Any) -> list[float]:
    """Trains, and returns the time of each step after the first.

    Args:
        model: A compiled model.
        data: Positional arguments of `fit`.
        keras: The module that the model was built with, if it is not Keras 3.
        options: Keyword arguments of `fit`.
    """
    return all_step_times(model, *data, keras=keras, **options)[1:]


def all_step_times(
    model: Any,
    *data: Any,
    keras: Any = None,
    after_step: Callable[[], object] | None = None,
    **options: Any,
) -> list[float]:
    """The same with the first step, which begins when `fit` does.

    `after_step` is called at the end of each step, and belongs to it.
    """
    ends = [time.perf_counter()]

    def end(batch: int, logs: Any) -> None:
        if after_step is not None:
            after_step()
        ends.append(time.perf_counter())

    clock = _or_keras_3(keras).callbacks.LambdaCallback(on_train_batch_end=end)
    model.fit(*data, verbose=0, callbacks=[clock], **options)
    return [end - begin for begin, end in itertools.pairwise(ends)]


def compiled(model: Any, keras: Any = None, momentum: float = MOMENTUM) -> Any:
    optimizer = _or_keras_3(keras).optimizers.SGD(0.01, momentum=momentum)
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


def lenet5() -> Any:
    return models.lenet5(_or_keras_3(None))


def _or_keras_3(keras: Any) -> Any:
    return keras or importlib.import_module("keras")
