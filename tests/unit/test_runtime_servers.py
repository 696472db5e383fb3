"""The addresses of TensorFlow's servers, and who can reach them."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from tarantella.runtime import servers, world
from tarantella.runtime.configuration import Configuration
from tarantella.runtime.socket_filter import accept_only


def can_connect(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=0.3).close()
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("dual", [False, True], ids=["IPv4", "IPv6 too"])
def test_connections_at_another_address_are_not_heard(dual: bool) -> None:
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual) as listening:
        port = listening.getsockname()[1]
        accept_only(listening, "127.0.0.2")
        assert can_connect("127.0.0.2", port)
        assert not can_connect("127.0.0.3", port)
        assert not (dual and can_connect("::1", port))


def test_a_server_that_starts_late_is_limited_and_no_descriptor_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world, "get_rank", lambda: 0)
    monkeypatch.setattr(world, "has_several_hosts", lambda: False)
    monkeypatch.setattr(servers, "configuration", Configuration)
    held, where = servers._hold_port()
    address, port = where.rsplit(":")
    monkeypatch.setattr(servers, "_held", held)
    monkeypatch.setattr(servers, "_addresses", (f"{address}:{port}",))
    before = set(Path("/proc/self/fd").iterdir())
    servers.release_port()
    time.sleep(0.3)
    with socket.create_server(("", int(port))):
        for thread in threading.enumerate():
            if thread.name == "tnt-servers":
                thread.join(30)
        assert can_connect(address, int(port))
        assert not can_connect("127.0.0.3", int(port))
    assert set(Path("/proc/self/fd").iterdir()) <= before


def test_only_a_host_with_a_gpu_needs_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not servers.has_gpu(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert servers.has_gpu(tmp_path)
    monkeypatch.setattr(servers, "has_gpu", lambda: True)
    for settings, wanted in (
        (Configuration(), True),
        (Configuration(no_gpu=True), False),
        (Configuration(gpu_sums="host"), False),
        (Configuration(gpu_sums="nccl", no_gpu=True), True),  # which is an error, in better words
    ):
        monkeypatch.setattr(servers, "configuration", lambda settings=settings: settings)
        assert servers._wants_server() is wanted


def test_nccl_uses_the_interface_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "get_rank", lambda: 1)
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_MULTI_RANK_GPU_ENABLE"):
        monkeypatch.setenv(name, "")  # so that it is removed again
        monkeypatch.delenv(name)
    servers._set_up_nccl(Configuration(network_interfaces=("eth0", "eth1")))
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    servers._set_up_nccl(Configuration(network_interfaces=("eth0", "eth2")))
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth1"  # as the user has set it
