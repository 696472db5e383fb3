"""Runs the tests on GPUs: what `make test-gpu` does.

These are the tests of this folder, and those of tests/ranks that compare training with plain Keras.
Ranks share a GPU if there are too few. With `--device cpu`, the same tests run without a GPU, with
the same sums between processes on the CPU, and Keras compiles by default as on a GPU
(`tests/lean`): it shows that the tests work. Other arguments are for pytest. Any Python that has
Tarantella and pytest will do:

    python tests/gpu/run.py
    python tests/gpu/run.py --device cpu -k "2-ranks and sparse"
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTHING_SELECTED = 5  # a status of pytest
FIND_GPUS = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"
# XLA compiles every model, which takes longer than a test may take on the CPU.
PYTEST = (sys.executable, "-m", "pytest", "-o", "rank_timeout=300", "-o", "rank_grace=15")


@dataclass(frozen=True)
class Shard:
    """Tests that one pytest runs, with variables of their own."""

    selection: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)


def ranks(*names: str) -> tuple[str, ...]:
    """The selection of files in tests/ranks, without tests that use the command: it lets no two
    ranks share a GPU."""
    return ("-m", "ranks and not long", *(f"tests/ranks/test_{name}.py" for name in names))


SHARDS = (
    Shard(("tests/gpu",)),
    Shard(
        ranks(
            "models",
            "losses",
            "metrics",
            "batch_normalization",
            "layer_state",
            "sparse_gradients",
            "optimizers",
            "training_loops",
            "order_of_calls",
            "predict",
            "random_models",
            "steps",
            "transfer_learning",
            "memory",
        )
    ),
    # A resumed run gives the bits of a whole one, if two whole ones agree.
    Shard(ranks("resumption"), {"TF_DETERMINISTIC_OPS": "1"}),
)


def main() -> int:
    """Returns the exit status: 0, or 1 if a test has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    options, arguments = parser.parse_known_args()
    gpus = 0 if options.device == "cpu" else number_of_gpus()
    if options.device == "gpu" and not gpus:
        print("The tests on GPUs are skipped: TensorFlow finds no GPU on this host.")
        return 0
    environ = {**os.environ, **variables(gpus)}
    statuses = [
        subprocess.call(
            [*PYTEST, *shard.selection, *arguments], cwd=ROOT, env={**environ, **shard.variables}
        )
        for shard in SHARDS
    ]
    return 1 if set(statuses) - {0, NOTHING_SELECTED} else 0


def number_of_gpus() -> int:
    """How many GPUs TensorFlow finds, in a process that leaves their memory alone."""
    found = subprocess.run([sys.executable, "-c", FIND_GPUS], capture_output=True, text=True)
    if found.returncode != 0:
        sys.exit(f"{found.stderr}TensorFlow cannot say which GPUs there are.")
    return int(found.stdout)


def variables(gpus: int) -> dict[str, str]:
    """The variables of all ranks; without a GPU, they run on the CPU."""
    if not gpus:
        return {"TEST_DEVICE": "cpu", "TNT_NO_GPU": "true", "TNT_GPU_SUMS": "ring"}
    return {
        "TEST_DEVICE": "gpu",
        "TNT_GPUS": ",".join(map(str, range(gpus))),
        "TNT_GPU_SUMS": "nccl",  # not `auto`, which would hide that NCCL cannot be used
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # also in pytest, and in plain Keras
    }


if __name__ == "__main__":
    sys.exit(main())
