"""NVIDIA's Multi-Process Service (MPS): without it, processes that share a GPU take turns on it.

A turn takes some milliseconds, and a sum between the processes has to wait for several. MPS comes
with the driver, and needs neither root nor settings of the GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import Failed

CONTROL = "nvidia-cuda-mps-control"
OF_CONTAINERS = "/usr/local/nvidia/bin"  # often not on their PATH
TIME_TO_START_OR_END = 30.0  # seconds


def program() -> str | None:
    """The path of the program that starts and ends MPS, if there is one."""
    return shutil.which(CONTROL, path=f"{os.environ.get('PATH', os.defpath)}:{OF_CONTAINERS}")


@contextmanager
def running(control: str) -> Iterator[dict[str, str]]:
    """Runs MPS, and yields the variables that processes have to be started with to use it.

    Args:
        control: The path of the program.
    """
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        variables = {f"CUDA_MPS_{name}_DIRECTORY": f"{folder}/{name}" for name in ("PIPE", "LOG")}
        for path in variables.values():
            Path(path).mkdir()
        _call([control, "-d"], variables, Path(folder))
        try:
            yield variables
        finally:
            try:
                _call([control], variables, Path(folder), "quit\n")
            except Failed as failed:
                print(failed, file=sys.stderr, flush=True)


def _call(words: list[str], variables: dict[str, str], folder: Path, typed: str = "") -> None:
    """Runs the program. What it prints goes to a file: a daemon would keep a pipe open."""
    printed = folder / "printed.txt"
    try:
        with printed.open("a") as output:
            subprocess.run(
                words,
                input=typed,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | variables,
                text=True,
                timeout=TIME_TO_START_OR_END,
                check=True,
            )
    except (OSError, subprocess.SubprocessError) as error:
        raise Failed(f"{printed.read_text(errors='replace')}MPS: {error}") from None
