"""What hosts with several ranks send to the network for a sum: no more than they must."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from commands import Cluster
from testbed import ROOT, what_is_missing

WIRE = str(ROOT / "benchmarks" / "wire.py")  # counts the bytes
NUMBERS = 1_000_000


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (3, 1)])
def test_one_sum_of_each_host_crosses_the_network(hosts: int, ranks: int, cluster: Cluster) -> None:
    program = [WIRE, "--types", "float32", "bfloat16", "--numbers", str(NUMBERS)]
    names = tuple(node.name for node in cluster.nodes[:hosts])
    result = cluster.run("--n-per-node", str(ranks), "--", *program, hosts=names)
    assert result.returncode == 0, result.stderr
    sent = json.loads(result.stdout)
    least = 2 * (hosts - 1) / hosts * 4 * NUMBERS
    for whole, half in zip(sent["float32"], sent["bfloat16"], strict=True):
        assert least <= whole <= 1.1 * least
        assert least / 2 <= half <= 0.6 * whole


@pytest.mark.long
@pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing())
def test_one_sum_of_each_of_four_hosts_crosses_the_network() -> None:
    """The table of the benchmark says so."""
    run = subprocess.run(
        [sys.executable, WIRE, "--hosts", "4", "--numbers", str(NUMBERS)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    whole, half = (row.split(" | ") for row in run.stdout.splitlines()[2:])
    assert [row[2] for row in (whole, half)] == ["`float32`", "`bfloat16`"]
    assert all(1 <= float(row[4]) <= 1.1 for row in (whole, half))
