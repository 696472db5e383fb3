"""What is wrong with a cluster is found before the run, with advice that a newcomer can follow.

One table of all hosts, and one line for each host with a problem that says what to do.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import Cluster
from testbed import ROOT, Node

BAD_INPUT = 2
PACKAGE = ROOT / "src" / "tarantella"
HOSTS = ("node1", "node2", "node3")


def check(cluster: Cluster, hosts: tuple[str, ...] = HOSTS) -> tuple[dict[str, str], list[str]]:
    """Runs the command, which must refuse; returns states by host, and the lines of advice."""
    script = cluster.script("open('it-runs', 'w')\n")
    environ = {"TNT_CHECK_TIMEOUT": "5"}
    result = cluster.run("--", script, hosts=hosts, env=environ)
    assert result.returncode == BAD_INPUT
    assert result.stdout == ""
    assert not (cluster.folder / "it-runs").exists()
    first, header, *lines = result.stderr.splitlines()
    assert first.startswith("tarantella: ")
    assert first.endswith(f"of {len(hosts)} hosts cannot take part:")
    assert header.split()[:2] == ["host", "state"]
    columns = header.index("state"), header.index("Tarantella")
    rows, advice = lines[: len(hosts)], lines[len(hosts) :]
    states = {row.split()[0]: row[columns[0] : columns[1]].strip() for row in rows}
    assert list(states) == list(hosts)
    assert len(advice) == sum(state != "ok" for state in states.values())
    return states, advice


@contextmanager
def replaced(node: Node, path: Path, other: Path) -> Iterator[None]:
    node.replace(path, other)
    try:
        yield
    finally:
        node.show(path)


def test_unknown_host(cluster: Cluster) -> None:
    states, [advice] = check(cluster, ("node1", "nod2"))
    assert states == {"node1": "ok", "nod2": "unknown"}
    assert advice.startswith("nod2: ")
    assert "spelling" in advice


def test_several_hosts_with_a_problem_are_found_at_once(cluster: Cluster) -> None:
    """The cable of one is out, another one refuses the key."""
    cluster["node2"].cut()
    cluster["node3"].refuse_key()
    try:
        states, advice = check(cluster)
    finally:
        cluster["node2"].cut(False)
        cluster["node3"].refuse_key(False)
    assert states["node1"] == "ok"
    assert states["node2"] in ("not reached", "no answer")
    assert states["node3"] == "refused"
    assert advice[0].startswith("node2: ")
    assert "is up" in advice[0]
    assert "ssh-copy-id node3" in advice[1]


def test_no_ssh_server(cluster: Cluster) -> None:
    """A host that is there, but on a port where nobody listens."""
    states, [advice] = check(cluster, ("node1", "closed"))
    assert states["closed"] == "no ssh"
    assert "server" in advice


def test_host_that_ssh_does_not_trust(cluster: Cluster) -> None:
    states, [advice] = check(cluster, ("node1", "stranger"))
    assert states["stranger"] == "key unknown"
    assert "`ssh stranger`" in advice


def test_host_without_tarantella(cluster: Cluster) -> None:
    cluster["node2"].hide(PACKAGE)
    try:
        states, [advice] = check(cluster)
    finally:
        cluster["node2"].show(PACKAGE)
    assert states["node2"] == "no Tarantella"
    assert "install" in advice


def test_host_without_python(cluster: Cluster) -> None:
    prefix = Path(sys.prefix)
    cluster["node3"].hide(prefix)
    try:
        states, [advice] = check(cluster)
    finally:
        cluster["node3"].show(prefix)
    assert states["node3"] == "no Python"
    assert sys.executable in advice


def test_other_version_of_tarantella(cluster: Cluster) -> None:
    own = PACKAGE / "__init__.py"
    other = cluster.folder / "other.py"
    other.write_text(own.read_text().replace('__version__ = "', '__version__ = "99.'))
    with replaced(cluster["node2"], own, other):
        states, [advice] = check(cluster)
    assert states["node2"] == "other Tarantella"
    assert "99." in advice


@pytest.mark.parametrize("package", ["tensorflow", "mpich"])
def test_other_version_of_what_it_needs(package: str, cluster: Cluster) -> None:
    """Of TensorFlow there are the notes of its installation, of MPI its launcher."""
    if package == "mpich":
        own = Path(sys.prefix) / "bin" / "mpiexec.hydra"
        other = cluster.folder / "mpiexec"
        other.write_text("#!/bin/sh\necho 'HYDRA build details:'\necho '    Version: 3.9'\n")
        other.chmod(0o755)
        state, named = "other MPI", "MPICH 3.9"
    else:
        site = next(Path(path) for path in sys.path if path.endswith("site-packages"))
        [own] = [*site.glob("tensorflow-*.dist-info"), *site.glob("tensorflow_cpu-*.dist-info")]
        own /= "METADATA"
        other = cluster.folder / "METADATA"
        other.write_text("Metadata-Version: 2.1\nName: tensorflow\nVersion: 2.99.1\n")
        state, named = "other TensorFlow", "TensorFlow 2.99.1"
    with replaced(cluster["node3"], own, other):
        states, [advice] = check(cluster)
    assert states["node3"] == state
    assert named in advice


def test_script_or_directory_that_is_not_there(cluster: Cluster) -> None:
    elsewhere = cluster.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "script.py").write_text("")
    cluster["node2"].hide(elsewhere)
    try:
        command = cluster.command("--", "script.py")
        in_folder = cluster["node1"].run(*command, check=False, cwd=elsewhere)
        from_outside = cluster.run("--", "elsewhere/script.py")
    finally:
        cluster["node2"].show(elsewhere)
    assert (in_folder.returncode, from_outside.returncode) == (BAD_INPUT, BAD_INPUT)
    assert f"node2: does not have the script {elsewhere}/script.py: " in in_folder.stderr
    assert f"node2: does not have the script {elsewhere}/script.py: " in from_outside.stderr


def test_same_host_under_two_names(cluster: Cluster) -> None:
    states, [advice] = check(cluster, ("node1", "node2", "10.78.0.2"))
    assert states["10.78.0.2"] == "same host"
    assert "node2" in advice


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("node1\nnode2\nNode1\n", "names the host Node1 twice, on lines 1 and 3"),
        ("# nothing\n\n", "names no host"),
        ("node1 slots=4\n", "Line 1"),
        ("node1\n-oProxyCommand=id\n", "Line 2"),
        (None, "There is no hostfile"),
    ],
)
def test_hostfile_that_makes_no_sense(content: str | None, named: str, cluster: Cluster) -> None:
    script = cluster.script("")
    command = cluster.command("--", script)
    hostfile = cluster.folder / "hosts"
    if content is None:
        hostfile.unlink()
    else:
        hostfile.write_text(content)
    result = cluster["node1"].run(*command, check=False)
    assert result.returncode == BAD_INPUT
    assert result.stderr.startswith("tarantella: ")
    assert result.stderr.count("\n") == 1
    assert named in result.stderr
    assert "hosts" in result.stderr


def test_full_range_of_ports(cluster: Cluster) -> None:
    script = cluster.script("")
    listen = "[socket.create_server(('', port)) for port in (5000, 5001)]"
    text = f"import socket, time\nservers = {listen}\nprint(flush=True)\ntime.sleep(600)"
    holder = cluster["node1"].start(sys.executable, "-c", text, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        result = cluster.run("--", script, env={"MPIEXEC_PORT_RANGE": "5000:5001"})
    finally:
        cluster["node1"].run("pkill", "-f", "time.sleep.600")
        holder.communicate()
    assert result.returncode not in (0, None)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("tarantella: the run failed: ")
    assert "MPIEXEC_PORT_RANGE" in last


def test_interface_that_a_host_does_not_have(cluster: Cluster) -> None:
    result = cluster.run("--network-interface", "eth7", "--", cluster.script(""))
    assert result.returncode == BAD_INPUT
    assert result.stderr.count("\n") == 1
    assert "eth0, eth1" in result.stderr
