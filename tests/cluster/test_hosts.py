"""The command on several hosts, when all goes well."""

from __future__ import annotations

import json
import os
import re
import sys

import pytest
from commands import COMMAND, Cluster

WHO = """
import os, socket, sys
from tarantella.runtime import world
places = (world.get_rank(), world.get_size(), world.get_local_rank(), world.get_local_size())
print(*places, socket.gethostname(), os.getcwd(), sys.executable)
"""


def test_ranks_are_on_the_hosts_of_the_file(cluster: Cluster) -> None:
    """In its order, whatever the host that the command runs on; comments do no harm."""
    script = cluster.script(WHO)
    hosts = ("# all of them", "node3", "", "node1  # the fastest")
    result = cluster.run("--n-per-node=2", "--output-on-all-devices", "--", script, hosts=hosts)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    place = f"{cluster.folder} {sys.executable}"
    assert sorted(result.stdout.splitlines()) == [
        f"[rank 0 on node3] 0 4 0 2 node3 {place}",
        f"[rank 1 on node3] 1 4 1 2 node3 {place}",
        f"[rank 2 on node1] 2 4 0 2 node1 {place}",
        f"[rank 3 on node1] 3 4 1 2 node1 {place}",
    ]


def test_one_rank_on_each_host_with_a_warning_where_there_is_no_gpu(cluster: Cluster) -> None:
    command = [*COMMAND, "--hostfile", cluster.hostfile("node2", "node3"), "--log-level", "INFO"]
    result = cluster["node1"].run(
        *command, "--", cluster.script(WHO), env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert result.stdout.startswith("0 2 0 1 node2 ")
    assert result.stdout.count("\n") == 1  # of the master rank only
    warnings = [line for line in result.stderr.splitlines() if "WARNING" in line]
    assert [re.findall(r"node\d", line) for line in warnings] == [["node2", "node3"]] * 2
    assert warnings[-1] == result.stderr.splitlines()[-1]
    table = [line.split() for line in result.stderr.splitlines() if "WARNING" not in line]
    assert table[0][:2] == ["host", "state"]
    assert [row[:2] for row in table[1:3]] == [["node2", "ok"], ["node3", "ok"]]


def test_one_host_without_a_gpu_keeps_all_on_the_cpu_or_is_an_error(cluster: Cluster) -> None:
    """The others are those that ssh starts, and find no tool that lists GPUs."""
    tool = cluster.folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho GPU-simulated, 00000000:00:00.0, Simulated\n")
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    environ = {"PATH": path, "CUDA_VISIBLE_DEVICES": "GPU-simulated"}
    command = [*COMMAND, "--hostfile", cluster.hostfile("node1", "node2")]
    script = cluster.script("print('it runs')\n")
    result = cluster["node1"].run(*command, "--", script, env=environ)
    assert result.stdout == "it runs\n"
    assert result.stderr.splitlines()[-1] == (
        "tarantella WARNING: The run used the CPU: no GPU was found on host node2, so 1 GPU on "
        "host node1 stood idle. Use --gpu to make this an error."
    )
    refused = cluster["node1"].run(*command, "--gpu", "--", script, env=environ, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        "tarantella: --gpu needs a GPU for each rank, but no GPU was found on host node2: leave "
        "out that host, or use --no-gpu to run on the CPU.\n"
    )


def test_messages_of_every_rank_are_marked_with_the_host(cluster: Cluster) -> None:
    script = cluster.script(
        "from tarantella.runtime import world\n"
        "from tarantella.runtime.log import LOGGER\n"
        "LOGGER.warning('one line\\nand another')\nprint('printed')\n"
    )
    result = cluster.run("--log-on-all-devices", "--", script)
    assert result.stdout == "printed\n"
    assert sorted(result.stderr.splitlines()) == [
        "[rank 0 on node1] and another",
        "[rank 0 on node1] tarantella WARNING: one line",
        "[rank 1 on node2] and another",
        "[rank 1 on node2] tarantella WARNING: one line",
    ]


ODD = ["a b", "'q' \"d\"", "$(touch run-by-a-shell)", "; touch run-by-a-shell", "`id`", "x=y=z", "",
       "two\nlines\n", "ä€𝄞", " * ", "\\", "%s%d", "~", "!!", "#", "&"]  # fmt: skip


def test_arguments_and_variables_arrive_byte_for_byte(cluster: Cluster) -> None:
    script = cluster.script(
        """
import json, os, sys
from tarantella.runtime import world
if world.get_rank() == 1:
    values = [os.environ[f"V{number}"] for number in range(int(sys.argv[1]))]
    json.dump([values, sys.argv[2:], os.environ["CALLER"]], open("seen.json", "w"))
""",
        name="a script; touch run-by-a-shell.py",
    )
    variables = [f"V{number}={value}" for number, value in enumerate(ODD)]
    arguments = [str(len(ODD)), *ODD, ":", "\\:", "--", "-n", "-x", "-hosts", "-genv"]
    result = cluster.run(
        "-x", *variables, "--", script, *arguments, env={"CALLER": "line\n$(id) 'ü'"}
    )
    assert result.returncode == 0, result.stderr
    seen = json.loads((cluster.folder / "seen.json").read_text())
    assert seen == [ODD, arguments[1:], "line\n$(id) 'ü'"]
    for node in cluster.nodes:
        assert "run-by-a-shell" not in node.run("ls", "/root", str(cluster.folder)).stdout.split()


def test_lines_of_many_ranks_are_never_mixed(cluster: Cluster) -> None:
    script = cluster.script(
        "from tarantella.runtime import world\nimport os\n"
        "for number in range(300):\n"
        "    os.write(1, b'%d:' % world.get_rank()); os.write(1, b'x' * 5000 + b'\\n')\n"
    )
    result = cluster.run("--n-per-node", "2", "--output-on-all-devices", "--", script)
    lines = sorted(result.stdout.splitlines())
    expected = [f"[rank {r} on node{1 + r // 2}] {r}:{'x' * 5000}" for r in range(4)]
    assert lines == [line for line in expected for _ in range(300)]


def test_a_file_with_this_host_only_needs_no_ssh(cluster: Cluster) -> None:
    cluster["node1"].refuse_key()
    try:
        result = cluster.run("--n-per-node", "2", "--", cluster.script(WHO), hosts=("node1",))
    finally:
        cluster["node1"].refuse_key(False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("0 2 0 2 node1")


def test_dry_run_touches_no_network(cluster: Cluster) -> None:
    """64 hosts with 8 GPUs each, that nobody has ever heard of."""
    names = tuple(f"gpu{number:02}.cluster" for number in range(64))
    script = cluster.script(WHO)
    command = [*COMMAND, "--hostfile", cluster.hostfile(*names), "--devices-per-node=8", "--gpu"]
    for interface in ("eth0", "eth1"):
        cluster["node1"].run("ip", "link", "set", interface, "down")
    before = cluster["node1"].run("cat", "/proc/net/snmp").stdout
    try:
        result = cluster["node1"].run(*command, "--dry-run", "--", script)
        assert cluster["node1"].run("cat", "/proc/net/snmp").stdout == before
    finally:
        for interface in ("eth0", "eth1"):
            cluster["node1"].run("ip", "link", "set", interface, "up")
    lines = result.stdout.splitlines()
    assert sum(line.startswith("host gpu") for line in lines) == 64
    assert sum(line.startswith("  rank ") for line in lines) == 512
    assert "  rank 511: GPU 7" in result.stdout
    assert "gpu63.cluster:8" in lines[-1]
    assert "not checked" in result.stdout


def test_hosts_that_do_not_have_the_same_cores(cluster: Cluster) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two cores")
    script = cluster.script(WHO.replace("*places", "os.sched_getaffinity(0)"))
    command = ["taskset", "1", *cluster.command("--n-per-node", "1", "--", script)]
    result = cluster["node1"].run(*command)
    assert "do not have the same number of cores" in result.stderr
