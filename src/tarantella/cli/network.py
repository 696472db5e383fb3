"""The network interfaces of a host, and which of them the ranks should use."""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tarantella.errors import InputError
from tarantella.runtime.interfaces import address_of, is_up_and_not_loopback, mask_of


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
    for _, name in socket.if_nameindex():
        with suppress(OSError):  # it has no such address
            if is_up_and_not_loopback(name):
                length = ipaddress.ip_network(f"0.0.0.0/{mask_of(name)}").prefixlen
                address = f"{address_of(name)}/{length}"
                found.append(Interface(name, address, _speed(devices / name)))
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


def _speed(device: Path) -> int:
    try:
        return max(0, int((device / "speed").read_text()))
    except (OSError, ValueError):
        return 0
