"""The mpiexec of the MPI library that the ranks will load, and the options that it needs."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tarantella.cli.processes import RUN_VARIABLES
from tarantella.cli.schedulers import Allocation, Ssh
from tarantella.errors import InputError
from tarantella.launch import entry
from tarantella.runtime import times
from tarantella.runtime.announce import ONE_BY_ONE, RUN_ID
from tarantella.runtime.configuration import Configuration
from tarantella.runtime.launcher import RANK_PROCESS
from tarantella.runtime.settings import settings_of

# The names of the libraries, in the order in which mpi4py tries them: MPICH and those that are
# compatible with it, as Intel MPI; Open MPI.
_SONAMES = ("libmpi.so.12", "libmpi.so.40", "libmpi.12.dylib", "libmpi.40.dylib")
_MPICH, _OPEN_MPI = r"\.12\b", r"\.40\b"
# Open MPI has this name, too, in case mpiexec is that of another MPI.
_OPEN_MPI_BESIDE = "ompirun_wrapper"

# Variables of a run that we are part of ourselves, if any: they would confuse the new one.
_OF_ANOTHER_RUN = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "HYDI_", "MPI_LOCAL")
# The same for a run of ours: what identifies it, and what its command planned for its ranks.
_OURS = (*RUN_VARIABLES, RANK_PROCESS, ONE_BY_ONE)
_PLANNED = (
    *(row.variable for row in settings_of(Configuration).values() if row.planned),
    "HYDRA_LAUNCHER_EXTRA_ARGS",
)


@dataclass(frozen=True)
class Placement:
    """Where the ranks run, and the networks between them.

    Attributes:
        allocation: the hosts, and how to start something there; None: this machine only
        counts: the number of ranks on each host
        interfaces: the network interface that the ranks of each host communicate through; empty:
            the MPI library chooses
        interface: that of this machine, if it matters
        address: the address by which other hosts know this machine, if known
    """

    allocation: Allocation | None
    counts: Mapping[str, int]
    interfaces: Mapping[str, str] = field(default_factory=dict)
    interface: str | None = None
    address: str = ""

    @property
    def hosts(self) -> str:
        """The hosts and their numbers of ranks, as every launcher expects them."""
        return ",".join(f"{host}:{count}" for host, count in self.counts.items())


@dataclass(frozen=True)
class Mpiexec(ABC):
    """A launcher of one MPI implementation.

    Attributes:
        path: where it is
    """

    path: Path

    def command(
        self, placement: Placement, variables: Iterable[str], program: list[str]
    ) -> list[str]:
        """The command line that starts a program on all ranks.

        Args:
            placement: the hosts
            variables: the names of the variables that the ranks must have
            program: what runs there
        """
        ranks = ["-n", str(sum(placement.counts.values()))]
        return [str(self.path), *self.options(placement, variables), *ranks, *program]

    @abstractmethod
    def options(self, placement: Placement, variables: Iterable[str]) -> list[str]:
        """Its options for ranks on these hosts and no others, whatever a scheduler says, host by
        host, and with all cores of a host available to each of its ranks."""

    def environment(self, placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
        """The additional variables that it, or its library, needs."""
        return {}


class Hydra(Mpiexec):
    """The launcher of MPICH. It passes all variables on to the ranks."""

    def options(self, placement: Placement, variables: Iterable[str]) -> list[str]:
        if placement.allocation is None:
            return ["-rmk", "user", "-launcher", "fork"]
        # Without an address, hosts must know this machine by its own host name.
        back = self._return_address(placement)
        launcher = placement.allocation.launcher
        return ["-rmk", "user", "-launcher", launcher, *back, "-hosts", placement.hosts]

    def _return_address(self, placement: Placement) -> list[str]:
        return ["-localhost", placement.address] if placement.address else []


class IntelHydra(Hydra):
    """The launcher of Intel MPI, which is derived from MPICH's."""

    def environment(self, placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
        # We bind ranks to cores, and a rank that is killed at once cannot tell why. The others are
        # its names for what MPICH's reads.
        names = {"EXEC": "HYDRA_LAUNCHER_EXEC", "EXEC_EXTRA_ARGS": "HYDRA_LAUNCHER_EXTRA_ARGS"}
        added = {"I_MPI_PIN": "0", "I_MPI_JOB_ABORT_SIGNAL": "15", ONE_BY_ONE: "true"}
        return added | {
            f"I_MPI_HYDRA_BOOTSTRAP_{own}": environ[name]
            for own, name in names.items()
            if environ.get(name) and f"I_MPI_HYDRA_BOOTSTRAP_{own}" not in environ
        }

    def _return_address(self, placement: Placement) -> list[str]:
        return ["-iface", placement.interface] if placement.interface else []


class OpenMpi(Mpiexec):
    """The launcher of Open MPI. It passes on only the variables that are named."""

    # Each host, or Open MPI itself, sets these.
    _not_passed_on = re.compile(r"(OMPI|OPAL|PMIX|PRTE|SSH)_.*|HOSTNAME|PWD")

    def options(self, placement: Placement, variables: Iterable[str]) -> list[str]:
        # Output comes at once, not line by line.
        options = ["--oversubscribe", "--bind-to", "none", "--stream-buffering", "0"]
        if os.geteuid() == 0:
            options.append("--allow-run-as-root")
        if placement.allocation is None:
            return options
        names = [name for name in variables if not self._not_passed_on.fullmatch(name)]
        passed_on = [word for name in names for word in ("-x", name)]
        return [*options, "--map-by", "slot", "--host", placement.hosts, *passed_on]

    def environment(self, placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
        library = str(self.path.parent.parent / "lib")
        paths = [path for path in environ.get("LD_LIBRARY_PATH", "").split(":") if path]
        added = {
            # In a job, it would start the ranks that the scheduler has in mind. The names before
            # and since version 5.
            "OMPI_MCA_ras": "^slurm,tm,lsf,gridengine",
            "OMPI_MCA_plm": "rsh",
            "PRTE_MCA_ras": "^slurm,pbs,lsf,gridengine",
            "PRTE_MCA_plm": "ssh",
            **_agent(placement.allocation, environ),
            ONE_BY_ONE: "true",
            "LD_LIBRARY_PATH": ":".join([*(path for path in paths if path != library), library]),
            **prefix_of(self.path),
        }
        if placement.allocation is not None and placement.interface:
            added |= {"PRTE_MCA_prte_if_include": placement.interface}
            added |= {"OMPI_MCA_oob_tcp_if_include": placement.interface}
        return added


class AnyMpiexec(Mpiexec):
    """A launcher that we do not know: it runs on this machine only."""

    def options(self, placement: Placement, variables: Iterable[str]) -> list[str]:
        if placement.allocation is not None:
            raise InputError(
                f"Tarantella does not know how to start ranks on several hosts with the launcher "
                f"{self.path}: use that of MPICH, Intel MPI or Open MPI, or start the ranks "
                "yourself, as in `mpiexec -n 4 python script.py`."
            )
        return []


def find_mpiexec(environ: Mapping[str, str] = os.environ) -> Mpiexec:
    """The launcher of the library that mpi4py loads, found by searching in the same order."""
    for folder, soname in _libraries(environ):
        found = _launcher_of(folder.parent / "bin", soname)
        if found is not None:
            return found
    path = shutil.which("mpiexec", path=environ.get("PATH"))
    if path is None:
        raise InputError(
            "There is no mpiexec to start the ranks with: install an MPI library in this Python "
            "environment, for example with `pip install mpich`, or put the mpiexec of your cluster "
            "on the PATH."
        )
    return describe_mpiexec(Path(path))


def describe_mpiexec(path: Path) -> Mpiexec:
    """The launcher at this path, as one of the kinds that we know."""
    try:
        answer = subprocess.run(
            [path, "--version"],
            env={**os.environ, **prefix_of(path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=times.TIME_FOR_MPIEXEC_VERSION,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(
            f"The launcher {path} does not work ({error}): reinstall its MPI library, or name "
            "another one with MPI4PY_LIBMPI."
        ) from None
    text = answer.stdout + answer.stderr
    if "Intel(R) MPI" in text:
        return IntelHydra(path)
    if "HYDRA" in text:
        return Hydra(path)
    if "Open MPI" in text or "OpenRTE" in text:
        return OpenMpi(path)
    return AnyMpiexec(path)


def _launcher_of(folder: Path, soname: str) -> Mpiexec | None:
    """The launcher in a folder for a library; several MPIs may be installed side by side there."""
    of_mpich, of_open_mpi = (re.search(number, soname) for number in (_MPICH, _OPEN_MPI))
    for path in (folder / name for name in ("mpiexec.hydra", "mpiexec", _OPEN_MPI_BESIDE)):
        if os.access(path, os.X_OK):
            found = describe_mpiexec(path)
            if not (of_mpich if isinstance(found, OpenMpi) else of_open_mpi):
                return found
    return None


def environment_without_run(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of a run that we are part of."""
    ours = (*_OURS, *_PLANNED) if RUN_ID in environ else _OURS
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_OF_ANOTHER_RUN) and name not in ours
    }


def prefix_of(path: Path) -> dict[str, str]:
    """Tells Open MPI where it is, if its launcher cannot find out by itself."""
    return {"OPAL_PREFIX": str(path.parent.parent)} if path.name == _OPEN_MPI_BESIDE else {}


def _agent(allocation: Allocation | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Tells Open MPI how to reach hosts, if the user has not. The names are those above."""
    if allocation is None:
        return {}
    if isinstance(allocation, Ssh):
        agent = [allocation.program, *allocation.launcher_options]
        added = {}
    else:
        agent = [sys.executable, "-I", "-S", entry.__file__, "cli.agent"]
        # A scheduler ends what stays in the background there.
        stay = ("OMPI_MCA_orte_leave_session_attached", "PRTE_MCA_prte_leave_session_attached")
        added = dict.fromkeys(stay, "1")
    names = ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent")
    return added | {name: " ".join(agent) for name in names if name not in environ}


def _libraries(environ: Mapping[str, str]) -> list[tuple[Path, str]]:
    """The folders and names of the libraries that mpi4py would try to load."""
    chosen = environ.get("MPI4PY_LIBMPI")
    if chosen and not Path(chosen).is_dir():
        path = Path(chosen)
        return [(path.parent, path.resolve().name if path.suffix == ".so" else path.name)]
    prefixes = [sys.exec_prefix]
    if site.ENABLE_USER_SITE and site.USER_BASE:
        prefixes.append(site.USER_BASE)
    prefixes.append(sys.base_exec_prefix)
    folders = [Path(prefix, "lib") for prefix in prefixes if prefix != "/usr"]
    return [
        (folder, soname)
        for folder in ([Path(chosen)] if chosen else folders)
        for soname in _SONAMES
        if (folder / soname).exists()
    ]
