"""The mpiexec of the MPI library that the ranks will load, and how to talk to it."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tarantella.errors import InputError

# Variables that describe the run we are in ourselves, if any, and would confuse the new one.
_OF_ANOTHER_RUN = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "HYDI_", "MPI_LOCAL", "TNT_RANK_PROCESS")


@dataclass(frozen=True)
class Mpiexec:
    """A launcher of one MPI implementation.

    Attributes:
        path: where it is
        local: its options for ranks on this machine only, wherever a scheduler has put us, and
            with all of its cores open to each of them
    """

    path: Path
    local: tuple[str, ...]

    def command(self, ranks: int, program: list[str]) -> list[str]:
        return [str(self.path), *self.local, "-n", str(ranks), *program]


def find_mpiexec(environ: Mapping[str, str] = os.environ) -> Path:
    """The mpiexec beside the library that mpi4py loads, looked for in the same order."""
    for folder in _library_folders(environ):
        mpiexec = folder.parent / "bin" / "mpiexec"
        if any(folder.glob("libmpi.*")) and os.access(mpiexec, os.X_OK):
            return mpiexec
    found = shutil.which("mpiexec", path=environ.get("PATH"))
    if found is None:
        raise InputError(
            "There is no mpiexec to start the ranks with: install an MPI library into this Python "
            "environment, for example with `pip install mpich`, or put that of your cluster on "
            "the PATH."
        )
    return Path(found)


def describe_mpiexec(path: Path) -> Mpiexec:
    """The launcher at this path, with the options that its kind understands."""
    try:
        answer = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"The launcher {path} does not work: {error}.") from None
    text = answer.stdout + answer.stderr
    if "HYDRA" in text or "Intel(R) MPI" in text:
        return Mpiexec(path, ("-rmk", "user", "-launcher", "fork"))
    if "Open MPI" in text or "OpenRTE" in text:
        return Mpiexec(path, ("--oversubscribe", "--bind-to", "none"))
    return Mpiexec(path, ())


def environment_without_run(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment, without what an MPI run that we are part of has put there."""
    return {name: value for name, value in environ.items() if not name.startswith(_OF_ANOTHER_RUN)}


def _library_folders(environ: Mapping[str, str]) -> list[Path]:
    chosen = environ.get("MPI4PY_LIBMPI")
    if chosen:
        path = Path(chosen)
        return [path if path.is_dir() else path.parent]
    prefixes = [sys.exec_prefix]
    if site.ENABLE_USER_SITE and site.USER_BASE:
        prefixes.append(site.USER_BASE)
    prefixes.append(sys.base_exec_prefix)
    return [Path(prefix, "lib") for prefix in prefixes if prefix != "/usr"]
