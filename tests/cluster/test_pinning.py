"""Ranks that are bound to NUMA domains, and to their memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Cluster

NODES = Path("/sys/devices/system/node")
WHERE = """
import os, subprocess
from tarantella.runtime import world
print(*sorted(os.sched_getaffinity(0)))
"""


@pytest.fixture
def two_domains(cluster: Cluster) -> Iterator[None]:
    """Two hosts whose first two cores are said to be in different NUMA domains."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    tree = cluster.folder / "node"
    for number, core in enumerate(sorted(os.sched_getaffinity(0))[:2]):
        (tree / f"node{number}").mkdir(parents=True)
        (tree / f"node{number}" / "cpulist").write_text(f"{core}\n")
    nodes = [cluster["node1"], cluster["node2"]]
    for node in nodes:
        node.replace(NODES, tree)
    yield
    for node in nodes:
        node.show(NODES)


@pytest.mark.usefixtures("two_domains")
def test_each_rank_has_a_domain(cluster: Cluster) -> None:
    command = ["taskset", "3", *cluster.command("--n-per-node", "2", "--pin-to-socket")]
    options = ["--output-on-all-devices", "--", cluster.script(WHERE)]
    result = cluster["node1"].run(*command, *options)
    assert sorted(result.stdout.splitlines()) == [
        "[rank 0 on node1] 0",
        "[rank 1 on node1] 1",
        "[rank 2 on node2] 0",
        "[rank 3 on node2] 1",
    ]


@pytest.mark.usefixtures("two_domains")
def test_too_few_cores_in_a_domain(cluster: Cluster) -> None:
    result = cluster.run("--n-per-node", "4", "--pin-to-socket", "--", cluster.script(WHERE))
    assert result.returncode == 2
    assert "has 1 core in NUMA domain 0 for 2 ranks" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["--pin-to-socket", "--pin-memory-to-socket"])
def test_machine_without_domains(option: str, cluster: Cluster) -> None:
    if len(list(NODES.glob("node[0-9]*"))) > 1:
        pytest.skip("needs a machine with one NUMA domain at most")
    result = cluster.run(option, "--", cluster.script(WHERE))
    assert result.returncode == 2
    assert result.stderr.startswith(
        "tarantella: Host node1 does not have several NUMA domains to pin ranks to"
    )
    assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("two_domains")
def test_host_without_numactl(cluster: Cluster) -> None:
    program = shutil.which("numactl")
    if program is None:
        pytest.skip("needs numactl")
    nothing = cluster.folder / "nothing"
    nothing.touch(0o644)
    cluster["node2"].replace(Path(program), nothing)
    try:
        result = cluster.run("--pin-memory-to-socket", "--", cluster.script(WHERE))
    finally:
        cluster["node2"].show(Path(program))
    assert result.returncode == 2
    assert "node2: does not have the program numactl: install it there." in result.stderr


def test_memory_is_bound_by_numactl(cluster: Cluster) -> None:
    """To the one domain that every machine has, as the plan would have it on a larger one."""
    if shutil.which("numactl") is None or not (NODES / "node0").exists():
        pytest.skip("needs numactl, and a kernel that knows NUMA domains")
    script = cluster.script(WHERE + "subprocess.run(['numactl', '--show'], check=True)\n")
    free, bound = (
        cluster.run(*options, "--", script).stdout for options in ([], ["-x", "TNT_MEMORY=0"])
    )
    assert "policy: default" in free
    assert "policy: bind" in bound
