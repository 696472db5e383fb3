"""Reports what a host has; the command runs this on each host before a run.

It also reports whether what the ranks need is there. It sees everything as a rank would: with the
environment and the working directory of the command. Standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tarantella.cli.host import this_host
from tarantella.cli.mpi import prefix_of
from tarantella.cli.network import find_interfaces, find_rdma_devices
from tarantella.cli.remote import answer
from tarantella.cli.schedulers import ADDRESS_VARIABLES

# Finds out what is installed without loading it, which would take seconds.
_VERSIONS = """
import json, importlib.metadata as metadata
def version(*names):
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return ""
tensorflow = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tf-nightly")
print(json.dumps({"TensorFlow": version(*tensorflow), "Keras": version("keras")}))
"""


def main(arguments: list[str]) -> int:
    return answer(report)


def report(question: dict[str, Any]) -> dict[str, Any]:
    """What this host has, and what is missing here.

    Args:
        question: the `environ`, the `cwd`, the `script`, the `mpiexec` and the `programs` that the
            ranks will need
    """
    environ = {**os.environ, **dict(question["environ"])}
    missing = []
    try:
        os.chdir(question["cwd"])
    except OSError:
        missing.append(["directory", question["cwd"]])
    kinds = [("script", question["script"]), ("mpi", question["mpiexec"])]
    missing += [[kind, path] for kind, path in kinds if path and not os.access(path, os.R_OK)]
    missing += [
        ["program", program]
        for program in question["programs"]
        if shutil.which(program, path=environ.get("PATH")) is None
    ]
    host = this_host(environ)
    return {
        "host": asdict(host),
        "system": _read("/proc/sys/kernel/random/boot_id"),
        "versions": versions(question["mpiexec"], environ),
        "interfaces": [asdict(each) for each in find_interfaces()],
        "rdma_devices": find_rdma_devices(),
        "asked_from": _asked_from(),
        "missing": missing,
        "name": socket.gethostname(),
    }


def versions(mpiexec: str, environ: dict[str, str]) -> dict[str, str]:
    """What is installed here, for a process with this environment."""
    return {
        "Tarantella": _own_version(),
        "Python": ".".join(map(str, sys.version_info[:3])),
        "MPI": mpi_version(mpiexec, environ),
        **_installed(environ),
    }


def mpi_version(mpiexec: str, environ: dict[str, str]) -> str:
    """Name and number of the MPI that a launcher belongs to; empty if it does not work."""
    text = _output([mpiexec, "--version"], {**environ, **prefix_of(Path(mpiexec))})
    for line in text.splitlines():
        if line.strip().startswith("Version:"):
            return "MPICH " + line.split()[-1]
        if "Intel(R) MPI" in line and "Version" in line:
            return "Intel MPI " + line.split("Version", 1)[1].strip()
        if "Open MPI" in line or "OpenRTE" in line:
            return "Open MPI " + line.split()[-1]
    return text.partition("\n")[0].strip()


def _asked_from() -> str:
    """The address from which this program was started; empty if unknown."""
    told = (os.environ.get(name, "") for name in ADDRESS_VARIABLES)
    return next((text.partition(" ")[0] for text in told if text), "")


def _own_version() -> str:
    """The version of the package, which must not be imported here."""
    text = _read(str(Path(__file__).parent.parent / "__init__.py"))
    lines = [line for line in text.splitlines() if line.startswith("__version__")]
    return lines[0].partition("=")[2].strip(" \"'") if lines else "?"


def _installed(environ: dict[str, str]) -> dict[str, str]:
    """The versions of the packages that a rank will find."""
    try:
        found: dict[str, str] = json.loads(_output([sys.executable, "-c", _VERSIONS], environ))
    except ValueError:
        return {}
    return found


def _output(command: list[str], environ: dict[str, str]) -> str:
    try:
        result = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True)
    except OSError:
        return ""
    return result.stdout.decode(errors="replace")


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
