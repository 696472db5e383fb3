"""Which network the ranks use, where hosts have several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from commands import Cluster
from testbed import Node

MEGABYTES = 20
SCRIPT = f"""
import numpy as np
from tarantella.runtime import world
values = np.ones({MEGABYTES} * 2**17)
world.communicator("gradients").Allreduce(values.copy(), values)
print(values[0])
"""


@pytest.fixture
def decoys(cluster: Cluster) -> Iterator[None]:
    """A network inside of each host, with the same address everywhere, as containers have it."""
    for node in cluster.nodes:
        node.run("ip", "link", "add", "aaa0", "type", "veth", "peer", "name", "aaa1")
        node.run("ip", "address", "add", "172.17.0.1/16", "dev", "aaa0")
        for interface in ("aaa0", "aaa1"):
            node.run("ip", "link", "set", interface, "up")
    yield
    for node in cluster.nodes:
        node.run("ip", "link", "delete", "aaa0")


def sent(node: Node, interface: str) -> float:
    """Megabytes that a host has sent by an interface."""
    return int(node.run("cat", f"/sys/class/net/{interface}/statistics/tx_bytes").stdout) / 2**20


@pytest.mark.usefixtures("decoys")
@pytest.mark.parametrize(
    ("options", "used"),
    [([], "eth0"), (["--network-interface", "eth1"], "eth1")],
    ids=["by-itself", "by-name"],
)
def test_ranks_use_a_network_that_all_hosts_share(
    options: list[str], used: str, cluster: Cluster
) -> None:
    node = cluster["node1"]
    before = {name: sent(node, name) for name in ("eth0", "eth1")}
    result = cluster.run(*options, "--", cluster.script(SCRIPT))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "2.0\n"
    moved = {name: sent(node, name) - amount for name, amount in before.items()}
    other = "eth0" if used == "eth1" else "eth1"
    assert moved[used] > MEGABYTES / 2
    assert moved[other] < 1  # ssh has its own mind


def test_other_hosts_need_not_know_the_name_of_this_one(cluster: Cluster) -> None:
    """The command runs on a host that is not in the file, under a name that is its secret."""
    cluster["node3"].run("hostname", "nobody-knows-me")
    try:
        result = cluster.run("--", cluster.script(SCRIPT), on="node3")
    finally:
        cluster["node3"].run("hostname", "node3")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "2.0\n"


def test_ranges_of_ports(cluster: Cluster) -> None:
    """All connections are in the ranges that are given; the first one of ssh has port 22."""
    ports = {"MPIEXEC_PORT_RANGE": "50000:50010", "UCX_TCP_PORT_RANGE": "51000-51010"}
    script = cluster.script(
        SCRIPT + "if world.get_rank() == 0:\n    from pathlib import Path\n"
        "    Path('tcp').write_text(Path('/proc/net/tcp').read_text())\n"
    )
    result = cluster.run("--", script, env=ports)
    assert result.returncode == 0, result.stderr
    lines = (cluster.folder / "tcp").read_text().splitlines()[1:]
    listening = {int(line.split()[1].partition(":")[2], 16) for line in lines if " 0A " in line}
    assert listening
    assert all(port == 22 or port // 100 in (500, 510) for port in listening), listening


def test_localhost_is_this_host(cluster: Cluster) -> None:
    result = cluster.run("--", cluster.script(SCRIPT), hosts=("localhost", "node2"))
    assert result.returncode == 0, result.stderr


SERVERS = """
import socket
import tensorflow as tf
import tarantella as tnt
from tarantella.runtime import messages, servers, world
from tarantella.runtime.interfaces import address_of

tf.ones(1) + 1  # starts the server
tnt.allreduce(1.0)
interfaces = {name: address_of(name) for name in ("eth0", "eth1")}
everyones = messages.allgather(interfaces, world.communicator("control"))
other = 1 - tnt.get_rank()
port = int(servers.addresses()[other].rpartition(":")[2])


def can_connect(address):
    try:
        socket.create_connection((address, port), timeout=3).close()
    except OSError:
        return False
    return True


print([name for name, address in everyones[other].items() if can_connect(address)])
tnt.barrier()
"""


def test_servers_of_tensorflow_are_reached_at_one_address_only(cluster: Cluster) -> None:
    options = ["--network-interface", "eth1", "-x", "TNT_GPU_SUMS=ring"]
    result = cluster.run(*options, "--output-on-all-devices", "--", cluster.script(SERVERS))
    assert result.returncode == 0, result.stderr
    lines = [line.partition("] ")[2] for line in result.stdout.splitlines()]
    assert lines == ["['eth1']"] * 2, result.stdout
