"""The network interfaces of hosts, and which of them ranks should use."""

from __future__ import annotations

import socket
import sys

import pytest

from tarantella.cli.network import Interface, common_interfaces, find_interfaces
from tarantella.runtime.interfaces import address_of, is_up_and_not_loopback, mask_of

OFFICE = Interface("eno1", "192.168.0.11/24", 1000)
FAST = Interface("ib0", "10.0.0.11/16", 100_000)
CONTAINERS = Interface("docker0", "172.17.0.1/16", 10_000)


def like(interface: Interface, address: str, name: str = "") -> Interface:
    return Interface(name or interface.name, address, interface.speed)


def test_the_fastest_network_that_all_hosts_share() -> None:
    hosts = {
        "a": (OFFICE, CONTAINERS, FAST),
        "b": (like(OFFICE, "192.168.0.12/24"), like(FAST, "10.0.7.12/16", "ib1"), CONTAINERS),
    }
    chosen = common_interfaces(hosts)
    assert chosen is not None
    assert {host: each.name for host, each in chosen.items()} == {"a": "ib0", "b": "ib1"}


def test_a_host_without_the_fast_network() -> None:
    hosts = {"a": (OFFICE, FAST), "b": (like(OFFICE, "192.168.0.12/24"),)}
    chosen = common_interfaces(hosts)
    assert chosen is not None
    assert chosen["a"] == OFFICE


def test_the_first_of_equally_fast_networks() -> None:
    second = Interface("eno2", "192.168.5.11/24", 1000)
    hosts = {
        "a": (OFFICE, second),
        "b": (like(OFFICE, "192.168.0.12/24"), like(second, "192.168.5.12/24")),
    }
    chosen = common_interfaces(hosts)
    assert chosen is not None
    assert chosen["a"] == OFFICE


def test_hosts_that_share_no_network() -> None:
    """An address that both have does not count."""
    assert common_interfaces({"a": (OFFICE, CONTAINERS), "b": (FAST, CONTAINERS)}) is None


def test_interfaces_of_this_machine() -> None:
    names = {name for _, name in socket.if_nameindex()}
    for interface in find_interfaces():
        assert interface.name in names
        assert interface.host != "127.0.0.1"
        assert interface.network.count(".") == 3
        assert interface.host == address_of(interface.name)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_what_linux_says_of_the_loopback() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert mask_of("lo") == "255.0.0.0"
    assert not is_up_and_not_loopback("lo")
    with pytest.raises(OSError, match="No such device"):
        address_of("no such one")
