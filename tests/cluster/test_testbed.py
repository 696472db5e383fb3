"""The testbed itself: hosts of their own, of which nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from testbed import LIMIT, Testbed, what_is_missing

pytestmark = pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing())

BY_HAND = [sys.executable, str(Path(__file__).with_name("testbed.py"))]


def files() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("testbed-*")}


def namespaces() -> set[str]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(str((process / "ns" / "net").readlink()))
        except OSError:
            continue
    return found


def test_hosts_have_what_a_host_has(testbed: Testbed) -> None:
    names = [node.run("hostname").stdout.strip() for node in testbed.nodes]
    assert names == ["node1", "node2", "node3"]
    node = testbed["node2"]
    node.run("touch", "/tmp/mine", "/dev/shm/mine")
    assert node.leftovers() == ["/tmp/mine", "/dev/shm/mine"]
    node.run("rm", "/tmp/mine", "/dev/shm/mine")
    assert testbed["node1"].leftovers() == []
    assert testbed["node1"].run("ssh", "node2", "hostname").stdout == "node2\n"
    testbed["node2"].cut()
    assert node.run("ssh", "-o", "ConnectTimeout=2", "node1", "true", check=False).returncode
    testbed["node2"].cut(False)


def test_a_shell_by_hand() -> None:
    before = files(), len(namespaces()), Path("/proc/mounts").read_text()
    result = subprocess.run(
        [*BY_HAND, "2"],
        input="hostname\nssh -n node2 hostname\ntarantella --version\nexit 3\n",
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert result.returncode == 3, result.stderr
    lines = result.stdout.splitlines()
    assert {"node1", "node2"} <= set(lines)
    assert any(line.startswith("tarantella ") for line in lines)
    _wait_until(lambda: (files(), len(namespaces()), Path("/proc/mounts").read_text()) == before)


def test_nothing_is_left_of_one_that_is_killed() -> None:
    before = files(), len(namespaces())
    process = subprocess.Popen(
        [*BY_HAND, "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("ssh -n node2 sleep 600 &\necho up\n")
    process.stdin.flush()
    while process.stdout.readline() != "up\n":
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.stdin.close()
    process.wait()
    _wait_until(lambda: (files(), len(namespaces())) == before)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
