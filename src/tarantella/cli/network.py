"""The network interfaces of a host, and which of them the ranks should use."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tarantella.errors import InputError

# Requests and flags of Linux, from its header files if.h and sockios.h.
_GET_FLAGS, _GET_ADDRESS, _GET_MASK = 0x8913, 0x8915, 0x891B
_UP, _LOOPBACK = 0x1, 0x8


@dataclass(frozen=True)
class Interface:
    """A network interface that is up.

    Attributes:
        name: as the system calls it
        address: its address, and the length of the network's part of it, as in `10.0.0.7/24`
        speed: in Mbit/s; 0 if unknown
    """

    name: str
    address: str
    speed: int = 0

    @property
    def host(self) -> str:
        """The address alone."""
        return self.address.partition("/")[0]

    @property
    def network(self) -> str:
        return str(ipaddress.ip_interface(self.address).network)


def find_interfaces(devices: Path = Path("/sys/class/net")) -> tuple[Interface, ...]:
    """The interfaces of this host with an IPv4 address, except the loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                flags = struct.unpack("H", _ask(asked, name, _GET_FLAGS)[:2])[0]
                if not flags & _UP or flags & _LOOPBACK:
                    continue
                address = socket.inet_ntoa(_ask(asked, name, _GET_ADDRESS)[4:8])
                mask = socket.inet_ntoa(_ask(asked, name, _GET_MASK)[4:8])
                length = ipaddress.ip_network(f"0.0.0.0/{mask}").prefixlen
                found.append(Interface(name, f"{address}/{length}", _speed(devices / name)))
    return tuple(found)


def find_rdma_devices(devices: Path = Path("/sys/class/infiniband")) -> tuple[str, ...]:
    """The devices of this host for InfiniBand, RoCE and the like."""
    return tuple(sorted(device.name for device in devices.glob("*")))


def check_interface(
    host: str, interfaces: Sequence[Interface], rdma_devices: Sequence[str], wanted: str
) -> None:
    """Raise an InputError if a host has no such interface."""
    ports = [f"{device}:1" for device in rdma_devices]
    names = [*(each.name for each in interfaces), *ports]
    if wanted not in names and wanted.partition(":")[0] not in rdma_devices:
        raise InputError(
            f"{host} has no network interface {wanted} that is up: "
            f"give --network-interface one of {', '.join(names) or 'none'}, or leave it out."
        )


def common_interfaces(hosts: Mapping[str, tuple[Interface, ...]]) -> dict[str, Interface] | None:
    """The interface of each host in the fastest network that all of them are in.

    An address that several hosts have does not lead from one to the other: many systems use the
    same internal networks for their containers.

    Returns:
        None if there is no such network.
    """
    counts = Counter(each.address for interfaces in hosts.values() for each in interfaces)
    by_network: dict[str, dict[str, Interface]] = {}
    for host, interfaces in hosts.items():
        for each in interfaces:
            if counts[each.address] == 1:
                by_network.setdefault(each.network, {}).setdefault(host, each)
    shared = [chosen for chosen in by_network.values() if len(chosen) == len(hosts)]
    # The first of equally fast ones: systems number interfaces by importance.
    return max(shared, key=lambda chosen: min(each.speed for each in chosen.values()), default=None)


def _ask(asked: socket.socket, name: str, request: int) -> bytes:
    """The answer about an interface, without its name in front."""
    return fcntl.ioctl(asked, request, struct.pack("256s", name.encode()))[16:]


def _speed(device: Path) -> int:
    try:
        return max(0, int((device / "speed").read_text()))
    except (OSError, ValueError):
        return 0
