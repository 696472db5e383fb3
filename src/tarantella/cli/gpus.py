"""The GPUs of this machine, found without TensorFlow, which takes seconds to load."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tarantella.runtime import times

_QUERY = ("nvidia-smi", "--query-gpu=uuid,pci.bus_id,name", "--format=csv,noheader")


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: its model
        uuid: its unique name, if known
        socket: the NUMA domain it is attached to, if known
    """

    name: str
    uuid: str = ""
    socket: int | None = None


def find_gpus(environ: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """The GPUs that a process with this environment may use, in the order it will see them."""
    nvidia = _from_nvidia_smi() or _from_nvidia_driver()
    if nvidia:
        return visible(nvidia, environ.get("CUDA_VISIBLE_DEVICES"))
    amd = _from_amd_driver()
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        amd = visible(amd, environ.get(variable))
    return amd


def visible(gpus: Sequence[Gpu], chosen: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by number or by (the start of) their UUID.

    As in CUDA, the list ends at the first entry that names no GPU.
    """
    if chosen is None:
        return tuple(gpus)
    named: list[Gpu] = []
    for entry in chosen.split(","):
        gpu = _named(gpus, entry.strip())
        if gpu is None:
            break
        named.append(gpu)
    return tuple(named)


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    if not entry.startswith("GPU-"):
        return None
    return next((gpu for gpu in gpus if gpu.uuid.startswith(entry)), None)


def _from_nvidia_smi() -> tuple[Gpu, ...]:
    try:
        answer = subprocess.run(
            _QUERY,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=times.TIME_FOR_NVIDIA_SMI,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_nvidia_smi(answer.stdout) if answer.returncode == 0 else ()


def parse_nvidia_smi(text: str, devices: Path = Path("/sys/bus/pci/devices")) -> tuple[Gpu, ...]:
    """The GPUs in the answer of nvidia-smi."""
    gpus = []
    for line in text.splitlines():
        uuid, _, rest = (part.strip() for part in line.partition(","))
        address, _, name = (part.strip() for part in rest.partition(","))
        if uuid.startswith("GPU-"):
            gpus.append(Gpu(name, uuid, _socket_of(address, devices)))
    return tuple(gpus)


def _from_nvidia_driver(
    driver: Path = Path("/proc/driver/nvidia/gpus"), devices: Path = Path("/sys/bus/pci/devices")
) -> tuple[Gpu, ...]:
    """The GPUs that the driver knows, without its tool."""
    return tuple(
        Gpu("NVIDIA GPU", socket=_socket_of(folder.name, devices))
        for folder in sorted(driver.glob("*:*"))
    )


def _from_amd_driver(
    topology: Path = Path("/sys/class/kfd/kfd/topology/nodes"),
) -> tuple[Gpu, ...]:
    """The GPUs among the nodes that the ROCm driver knows; nodes without SIMD units are CPUs."""
    gpus = []
    for node in sorted(topology.glob("[0-9]*"), key=lambda path: int(path.name)):
        properties = dict(
            line.split(maxsplit=1)
            for line in _read(node / "properties").splitlines()
            if " " in line
        )
        if properties.get("simd_count", "0") != "0":
            gpus.append(Gpu("AMD GPU"))
    return tuple(gpus)


def _socket_of(address: str, devices: Path) -> int | None:
    """The NUMA domain of a PCI device; the tool writes eight digits first, Linux four."""
    domain, _, rest = address.lower().partition(":")
    node = _read(devices / f"{domain[-4:]}:{rest}" / "numa_node").strip()
    return int(node) if node.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
