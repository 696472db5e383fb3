"""Memory that training from an array in memory takes, besides the array itself.

Two ranks hold a NumPy array each and train a tiny model from it. From each rank's peak of
resident memory, that of the same run on a tiny array and the array itself are subtracted.
The rest must be small, however large the array is: no rank copies it.

    python benchmarks/memory.py                     # 4 GiB on each rank
    python benchmarks/memory.py --gib 0.5 --dtype float64
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

RANKS = 2
FEATURES = 4096
BATCH = 256
LIMIT = 300  # MiB
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0, help="size of the array on each rank")
    parser.add_argument("--dtype", choices=["float32", "float64", "uint8"], default="float32")
    parser.add_argument("--validation-split", type=float, default=0.0)
    options = parser.parse_args()
    if "TNT_RUN_ID" in os.environ:  # a rank
        train(options)
        return
    empty, full = launch(options, gib=0.0), launch(options, gib=options.gib)
    array = size(options.gib, options.dtype) / MIB
    overheads = [peak - base - array for peak, base in zip(full, empty, strict=True)]
    for rank, overhead in enumerate(overheads):
        print(
            f"rank {rank}   peak {full[rank]:8.0f} MiB   tiny array {empty[rank]:6.0f} MiB   "
            f"array {array:6.0f} MiB   overhead {overhead:6.0f} MiB"
        )
    if max(overheads) > LIMIT:
        sys.exit(f"The overhead is over {LIMIT} MiB.")


def launch(options: argparse.Namespace, gib: float) -> list[float]:
    """Trains on fresh ranks and returns the peak of each, in MiB."""
    command = [str(Path(sys.executable).parent / "tarantella"), "-n", str(RANKS), "--no-gpu"]
    command += ["--", sys.argv[0], "--gib", str(gib), "--dtype", options.dtype]
    command += ["--validation-split", str(options.validation_split)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if run.returncode != 0:
        sys.exit(run.returncode)
    peaks: list[float] = json.loads(run.stdout.splitlines()[-1])
    return peaks


def train(options: argparse.Namespace) -> None:
    """Trains an epoch and prints the peaks of all ranks."""
    import keras
    import numpy as np

    import tarantella as tnt

    x = make(rows(options.gib, options.dtype), options.dtype)
    y = np.arange(len(x)) % 10
    model = tnt.Model(keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(10)]))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=BATCH, validation_split=options.validation_split, verbose=0)
    peaks = tnt.allgather(np.float64(peak()))
    if tnt.is_master_rank():
        print(json.dumps([float(one) for one in peaks]), flush=True)


def rows(gib: float, dtype: str) -> int:
    """The number of samples; at least two batches."""
    import numpy as np

    return max(int(gib * 2**30) // (FEATURES * np.dtype(dtype).itemsize), 2 * BATCH)


def size(gib: float, dtype: str) -> int:
    """Bytes by which the array is larger than the tiny one."""
    import numpy as np

    more = rows(gib, dtype) - rows(0.0, dtype)
    return more * FEATURES * np.dtype(dtype).itemsize


def make(samples: int, dtype: str) -> Any:
    """An array that is all resident, filled in place."""
    import numpy as np

    x = np.empty((samples, FEATURES), dtype)
    x[:] = np.arange(FEATURES) % 7 / 8
    return x


def peak() -> float:
    """The highest resident memory of this process so far, in MiB."""
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest / (MIB if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
