"""The device of these tests: GPUs, or the CPU with the same sums, to try the tests without a GPU.

`make test-gpu` chooses it, with the variable TEST_DEVICE, and sets the variables of ranks. A module
that imports this one is skipped elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEVICE = os.environ.get("TEST_DEVICE", "")
HINTS = {"gpu": "nccl", "cpu": "ring"}
if DEVICE not in HINTS:
    pytest.skip("`make test-gpu` runs this, on a host with a GPU", allow_module_level=True)

HINT = HINTS[DEVICE]  # what TensorFlow's collectives are to use
WAITS_IN = "in a sum by NCCL" if DEVICE == "gpu" else "in a sum by TensorFlow's collectives"
LIMIT = 300  # seconds for a run of a script; XLA takes its time, and a hang is what this catches
needs_gpu = pytest.mark.skipif(DEVICE != "gpu", reason="only a GPU tells")
# The command gives no GPU to two ranks. What `-x` says comes last, and counts.
_ON_DEVICE = {
    "gpu": ("-x", "TNT_NO_GPU=false", "-x", f"TNT_GPUS={os.environ.get('TNT_GPUS', '0')}"),
    "cpu": (),
}


def run(
    script: Path,
    *arguments: str,
    ranks: int,
    sums: str = HINT,
    options: tuple[str, ...] = (),
    limit: float = LIMIT,
) -> subprocess.CompletedProcess[str]:
    """Runs a script on ranks that share the GPUs.

    Args:
        script: The script.
        arguments: What the script is given.
        ranks: The number of ranks.
        sums: The value of TNT_GPU_SUMS.
        options: More options of the command.
        limit: How many seconds it may take.
    """
    command = [sys.executable, "-m", "tarantella.cli", "-n", str(ranks), "--no-gpu", *options]
    command += [*_ON_DEVICE[DEVICE], "-x", f"TNT_GPU_SUMS={sums}", "--", str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit)
