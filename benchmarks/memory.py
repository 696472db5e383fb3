"""Memory that training on an array takes, besides the array itself.

Two ranks hold a NumPy array each and train a tiny model on it. From each rank's peak resident
memory, that of the same run on a tiny array and the array itself are subtracted. The rest must be
small, however large the array is: no rank copies it.

    python benchmarks/memory.py                     # 4 GiB on each rank
    python benchmarks/memory.py --gib 0.5 --dtype float64
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from typing import Any

import report
from common import RANKS, is_rank, last_line, on_ranks
from report import Figure

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
    if is_rank():
        train(options)
        return
    figures = measured(options.gib, options.dtype, options.validation_split)
    print(report.table(figures))
    if report.missed(figures):
        sys.exit(f"The overhead is more than {LIMIT} MiB.")


def measured(gib: float, dtype: str = "float32", validation_split: float = 0.0) -> list[Figure]:
    """Trains on an array of this size, and on a tiny one."""
    print("memory of arrays ...", file=sys.stderr, flush=True)
    empty, full = (launch(one, dtype, validation_split) for one in (0.0, gib))
    array = size(gib, dtype) / MIB
    overheads = [peak - base - array for peak, base in zip(full, empty, strict=True)]
    return [
        Figure("memory", "array", "the array", [array], "MiB"),
        Figure("memory", "array", "rank's peak", full, "MiB"),
        Figure("memory", "array", "rank's peak, tiny array", empty, "MiB"),
        Figure("memory", "array", "highest overhead", [max(overheads)], "MiB", at_most=LIMIT),
    ]


def launch(gib: float, dtype: str, validation_split: float) -> list[float]:
    """Trains on fresh ranks and returns the peak of each, in MiB."""
    arguments = ["--gib", str(gib), "--dtype", dtype]
    arguments += ["--validation-split", str(validation_split)]
    peaks: list[float] = last_line([*on_ranks(RANKS), __file__, *arguments])
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
    """How many bytes the array is larger than the tiny one."""
    import numpy as np

    more = rows(gib, dtype) - rows(0.0, dtype)
    return more * FEATURES * np.dtype(dtype).itemsize


def make(samples: int, dtype: str) -> Any:
    """An array that is fully resident, filled in place."""
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
