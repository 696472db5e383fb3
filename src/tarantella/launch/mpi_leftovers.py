"""Removes the files that an MPI library leaves behind when its processes are killed."""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from tarantella.runtime import times

_SHARED_MEMORY = ("mpich_shm_*", "sm_segment.*", "Intel_MPI_*")
_TOPOLOGY = "hydra_hwloc_xmlfile_*"  # written for the ranks by MPICH's launcher
_LAUNCHER = "hydra_pmi_proxy"
# Folders of Open MPI's launchers, with the number of their process.
_SESSION = re.compile(r"(?:ompi|prte|prted|prterun)\.(\d+)")


def remove_leftovers(
    seconds: float,
    memory: Path = Path("/dev/shm"),
    temporary: Path = Path("/tmp"),
    proc: Path = Path("/proc"),
) -> None:
    """Remove such files of this user that are not older than this, and not in use.

    Args:
        seconds: the age of the run that left them
        memory: where shared memory is
        temporary: where temporary files are
        proc: where the kernel shows processes
    """
    if not proc.is_dir():
        return  # there is no telling what is in use
    found = [file for pattern in _SHARED_MEMORY for file in memory.glob(pattern)]
    topologies = list(temporary.glob(_TOPOLOGY))
    used, launchers = _in_use(str(memory), proc) if found or topologies else (set(), 0)
    leftovers = [file for file in found if str(file) not in used]
    if not launchers:  # they do not keep theirs open while they run
        leftovers += topologies
    for folder in temporary.glob("*.[0-9]*"):
        session = _SESSION.fullmatch(folder.name)
        if session and not (proc / session[1]).exists():
            leftovers.append(folder)
    since = time.time() - seconds - times.CLOCK_ERROR_OF_FILES
    for file in leftovers:
        with suppress(OSError):  # of another user, or gone
            about = file.lstat()
            if about.st_uid == os.getuid() and about.st_mtime >= since:
                shutil.rmtree(file) if file.is_dir() else file.unlink()


def _in_use(memory: str, proc: Path) -> tuple[set[str], int]:
    """The shared memory that processes of this user use, and the number of launchers."""
    used = set()
    launchers = 0
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            name, _, state = (folder / "stat").read_text(errors="replace").rpartition(")")
            launchers += _LAUNCHER in name and state.split()[0] != "Z"
            for line in (folder / "maps").read_text(errors="replace").splitlines():
                if memory in line:
                    used.add(line[line.index(memory) :])
            for descriptor in (folder / "fd").iterdir():
                with suppress(OSError):
                    used.add(str(descriptor.readlink()))
    return used, launchers
