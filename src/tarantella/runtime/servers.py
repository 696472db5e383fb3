"""The addresses of TensorFlow's servers, one for each rank.

TensorFlow's collectives, which sum on GPUs, find the other ranks through a server that TensorFlow
runs in each of them. It has to know all addresses before its first operation, so the ranks exchange
them when MPI starts. No rank waits for another when it imports TensorFlow.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tarantella.errors import InputError
from tarantella.runtime import messages, times, world
from tarantella.runtime.configuration import Configuration, configuration, of_rank
from tarantella.runtime.interfaces import address_of
from tarantella.runtime.log import LOGGER
from tarantella.runtime.socket_filter import accept_only

# What a driver shows to programs: of NVIDIA, of AMD, and of Windows to Linux in it.
_GPU_DEVICES = ("nvidiactl", "nvidia0", "kfd", "dxg")

_addresses: tuple[str, ...] = ()
_problem = ""
_held: socket.socket | None = None
_nccl_root = ""
_held_for_nccl: socket.socket | None = None


def addresses() -> tuple[str, ...]:
    """The address of the server of each rank; empty if there are to be none."""
    return _addresses


def nccl_root() -> str:
    """Where the ranks find each other for NCCL in functions that XLA compiles: at the master."""
    return _nccl_root


def words_for_collectives() -> str:
    """What TensorFlow's collectives use, in words."""
    return "TensorFlow's ring" if configuration().gpu_sums == "ring" else "NCCL"


def problem() -> str:
    """Why there are no addresses; empty if no rank has a GPU, or wants them."""
    return _problem


def exchange_addresses() -> None:
    """Finds a free port on every rank, if all of them may sum by TensorFlow's collectives."""
    global _addresses, _problem, _held, _nccl_root, _held_for_nccl
    communicator = world.shared_communicator("engine")
    wishes = messages.allgather(_wants_server(), communicator)
    if not all(wishes):
        if any(wishes):
            without = wishes.index(False)
            _problem = f"rank {without} on host {world.get_host_names()[without]} has no GPU"
        return
    _set_up_nccl(configuration())
    try:
        _held, address = _hold_port()
        if world.is_master_rank():
            # NCCL listens there for a moment, and sets SO_REUSEPORT, too.
            _held_for_nccl, _nccl_root = _hold_port()
        problem = ""
    except OSError as error:
        address, problem = "", f"host {world.get_host_names()[world.get_rank()]}: {error}"
    everyones = messages.allgather([address, _nccl_root, problem], communicator)
    problems = [each for _, _, each in everyones if each]
    if problems:
        _problem = f"no port for TensorFlow's server ({problems[0]})"
    else:
        _addresses = tuple(each for each, _, _ in everyones)
        _nccl_root = everyones[world.get_master_rank()][1]


def release_port() -> None:
    """Leaves the port of this rank to TensorFlow, whose server is about to listen there.

    The server would take connections at all addresses of this host, and it does not authenticate
    them. So a filter is put on its socket as soon as it listens.
    """
    global _held
    if _held is None:
        return
    address, port = _addresses[world.get_rank()].rsplit(":", 1)
    _held.close()
    _held = None
    threading.Thread(
        target=_limit, args=(int(port), address), daemon=True, name="tnt-servers"
    ).start()


def _limit(port: int, address: str) -> None:
    """Limits what this process listens to on a port to connections at an address."""
    end = time.monotonic() + times.TIME_TO_START_SERVER
    limited = False
    try:
        while time.monotonic() < end:
            listening = _listening(port)
            for each in listening:
                with each:
                    accept_only(each, address)
            if listening and not limited:
                limited = True
                end = time.monotonic() + times.TIME_FOR_MORE_SOCKETS
            time.sleep(times.LOOK_FOR_SERVER)
    except OSError as error:
        LOGGER.warning(
            "TensorFlow's server on port %d accepts connections at all addresses of this host, as "
            "it could not be limited to %s: %s. `--gpu-sums host` does without servers.",
            port,
            address,
            error.strerror,
        )


def _listening(port: int) -> list[socket.socket]:
    """The sockets of this process that listen on a port, as copies."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed by now
            if not str(descriptor.readlink()).startswith("socket:"):
                continue
            candidate = socket.socket(fileno=os.dup(int(descriptor.name)))
            if _listens(candidate, port):
                found.append(candidate)
            else:
                candidate.close()
    return found


def _listens(candidate: socket.socket, port: int) -> bool:
    is_tcp = candidate.family in (socket.AF_INET, socket.AF_INET6)
    return (
        is_tcp
        and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        and candidate.getsockname()[1] == port
    )


def _wants_server() -> bool:
    try:
        settings = configuration()
    except InputError:
        return False  # the run is about to end with this error
    if settings.gpu_sums in ("nccl", "ring"):
        return True
    if settings.gpu_sums == "host" or settings.no_gpu:
        return False
    return settings.gpus is not None or has_gpu()


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether this host has a GPU of NVIDIA or AMD, found without TensorFlow."""
    return any((devices / name).exists() for name in _GPU_DEVICES)


def _set_up_nccl(settings: Configuration) -> None:
    """Gives NCCL the settings that follow from those of the run; the user's own come first."""
    # Without effect unless ranks share a GPU.
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    interface = of_rank(settings.network_interfaces, world.get_rank())
    if interface and ":" not in interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _hold_port() -> tuple[socket.socket, str]:
    """A socket that keeps a free port for who listens there later, and the address."""
    address = _own_address(configuration())
    held = socket.socket()
    # TensorFlow's server sets this, too: it gets the port although this socket still holds it.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("", 0))
    return held, f"{address}:{held.getsockname()[1]}"


def _own_address(settings: Configuration) -> str:
    """The address at which the other ranks reach this one."""
    if not world.has_several_hosts():
        return "127.0.0.1"
    interface = of_rank(settings.network_interfaces, world.get_rank())
    if interface and ":" not in interface:  # not a port of InfiniBand, which has no such address
        return address_of(interface)
    return _address_towards(world.get_host_names())


def _address_towards(hosts: Sequence[str]) -> str:
    """The address that packets to another host come from."""
    mine = hosts[world.get_rank()]
    other = next(host for host in hosts if host != mine)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((other, 9))  # sends nothing
        address: str = asked.getsockname()[0]
        return address
