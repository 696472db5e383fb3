"""The command in jobs of a real Slurm, on hosts without access by ssh."""

from __future__ import annotations

import ast
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm import Job, Slurm, what_is_missing
from testbed import LIMIT, Testbed

COMMAND = f"{shlex.quote(sys.executable)} -m tarantella.cli"
SECONDS_TO_END = 10

# Prints the hosts and the cores of all ranks.
WHERE = """
import os, socket
from mpi4py import MPI
ranks = MPI.COMM_WORLD.gather((socket.gethostname(), sorted(os.sched_getaffinity(0))))
if ranks:
    print(ranks)
"""

# Ranks that have children, and do not end.
WAIT = """
import subprocess
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 0:
    print("started", flush=True)
subprocess.run(["sleep", "600"])
"""


class Cluster:
    """Slurm on the hosts of a testbed, and a folder that they share."""

    def __init__(self, testbed: Testbed, slurm: Slurm, folder: Path) -> None:
        self.testbed = testbed
        self.slurm = slurm
        self.folder = folder

    def script(self, text: str) -> str:
        path = self.folder / "script.py"
        path.write_text(text)
        return str(path)

    def batch(self, script: str, *options: str, **settings: Any) -> Any:
        return self.slurm.batch(script, *options, cwd=self.folder, **settings)

    def ranks(self, script: str, *options: str) -> list[tuple[str, list[int]]]:
        """The hosts and cores of the ranks of `WHERE`."""
        result = self.batch(script, *options)
        assert result.returncode == 0, result.stderr
        ranks: list[tuple[str, list[int]]] = ast.literal_eval(result.stdout)
        return ranks

    def hosts(self, script: str, *options: str) -> list[str]:
        return [host for host, _ in self.ranks(script, *options)]

    def left(self) -> dict[str, list[Any]]:
        """What runs on the hosts, and what was left in their folders for temporary files."""
        found = {
            node.name: [*self.slurm.processes(node), *node.leftovers()]
            for node in self.testbed.nodes
        }
        return {name: each for name, each in found.items() if each}

    def wait_for_end(self, seconds: float) -> None:
        """Until nothing is left, or the time is up."""
        deadline = time.monotonic() + seconds
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.1)


@pytest.fixture(scope="module")
def slurm(testbed: Testbed) -> Iterator[Slurm]:
    missing = what_is_missing()
    if missing:
        pytest.skip(missing)
    for node in testbed.nodes:
        node.refuse_key()
    with Slurm(testbed) as slurm:
        yield slurm
    for node in testbed.nodes:
        node.refuse_key(False)


@pytest.fixture
def cluster(testbed: Testbed, slurm: Slurm, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(testbed, slurm, tmp_path)
    yield cluster
    cluster.wait_for_end(SECONDS_TO_END)
    assert cluster.left() == {}


def test_there_is_a_rank_on_each_host_of_the_job(cluster: Cluster) -> None:
    command = f"{COMMAND} --no-gpu --log-level INFO -- {cluster.script(WHERE)}"
    result = cluster.batch(command, "--nodes=3")
    assert [host for host, _ in ast.literal_eval(result.stdout)] == ["node1", "node2", "node3"]
    table = [line.split()[:2] for line in result.stderr.splitlines() if " ok " in line]
    assert table == [["node1", "ok"], ["node2", "ok"], ["node3", "ok"]]
    assert "WARNING" not in result.stderr


def test_without_gpus_there_is_a_warning_and_a_rank_on_the_cpu(cluster: Cluster) -> None:
    result = cluster.batch(f"{COMMAND} -- {cluster.script(WHERE)}", "--nodes=2")
    assert [host for host, _ in ast.literal_eval(result.stdout)] == ["node1", "node2"]
    assert "tarantella WARNING: No GPU was found on hosts node1, node2: " in result.stderr


@pytest.mark.skipif(os.cpu_count() == 1, reason="it needs two cores")
def test_ranks_share_all_cores_also_beside_a_step_that_holds_them(cluster: Cluster) -> None:
    job = f"""
        srun --exact --ntasks=2 --cpus-per-task=2 sh -c 'touch held-$SLURM_PROCID; sleep 600' &
        until [ -e held-0 ] && [ -e held-1 ]; do sleep 0.1; done
        {COMMAND} --no-gpu --n-per-node 2 -- {cluster.script(WHERE)} && kill %1
    """
    ranks = cluster.ranks(job, "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2")
    assert [host for host, _ in ranks] == ["node1", "node1", "node2", "node2"]
    for (_, cores), (_, others) in (ranks[:2], ranks[2:]):
        assert len(cores) == len(others) == 1
        assert cores != others


def test_a_number_of_ranks_is_for_the_first_host(cluster: Cluster) -> None:
    command = f"{COMMAND} --no-gpu -n 2 -- {cluster.script(WHERE)}"
    assert cluster.hosts(command, "--nodelist=node2,node3") == ["node2", "node2"]


@pytest.mark.parametrize(
    ("named", "used"), [("node3", ["node3"]), ("node3 node1", ["node1", "node3"])]
)
def test_hosts_of_the_job_in_a_hostfile_are_used_in_the_order_of_the_job(
    cluster: Cluster, named: str, used: list[str]
) -> None:
    (cluster.folder / "hosts").write_text("\n".join(named.split()))
    command = f"{COMMAND} --no-gpu --hostfile hosts --log-level INFO -- {cluster.script(WHERE)}"
    result = cluster.batch(command, "--nodes=3")
    assert [host for host, _ in ast.literal_eval(result.stdout)] == used
    table = [line.split()[0] for line in result.stderr.splitlines() if " ok " in line]
    assert table == used


def test_the_command_may_run_on_a_host_that_is_not_in_the_job(cluster: Cluster) -> None:
    """As on a login node, and its user has come there from an address that no host knows."""
    command = f"{COMMAND} --no-gpu -- {cluster.script(WHERE)}"
    result = cluster.slurm.front.run(
        *["salloc", "--quiet", "--nodelist=node2,node3", *shlex.split(command)],
        env={"SSH_CONNECTION": "192.0.2.1 50000 10.77.0.1 22"},
        cwd=cluster.folder,
    )
    assert [host for host, _ in ast.literal_eval(result.stdout)] == ["node2", "node3"]


def test_values_and_arguments_come_byte_for_byte(cluster: Cluster) -> None:
    script = cluster.script("""
import os, sys
from mpi4py import MPI
mine = os.environb[b"INHERITED"], os.environb[b"GIVEN"], [*map(os.fsencode, sys.argv[1:])]
ranks = MPI.COMM_WORLD.gather(mine)
if ranks:
    print(ranks)
""")
    value = "line\nline \"double\" 'single' $(touch bad) ; `touch bad` \\ é %t , : = * "
    job = f'{COMMAND} --no-gpu -x GIVEN="$INHERITED" -- {script} "$INHERITED" "" : -n %t'
    result = cluster.batch(job, "--nodes=2", env={"INHERITED": value})
    sent = value.encode()
    arguments = [sent, b"", b":", b"-n", b"%t"]
    assert ast.literal_eval(result.stdout) == [(sent, sent, arguments)] * 2
    assert not (cluster.folder / "bad").exists()


def test_a_rank_that_fails_ends_the_run_and_is_named(cluster: Cluster) -> None:
    script = cluster.script("""
import time
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    raise ValueError("not with me")
time.sleep(600)
""")
    result = cluster.batch(f"{COMMAND} --no-gpu -- {script}; exit $?", "--nodes=2")
    assert result.returncode == 1
    assert "tarantella: rank 1 on host node2 failed: ValueError: not with me" in result.stderr
    assert result.stderr.count("Traceback") == 1
    assert "srun:" not in result.stderr


def cancel(cluster: Cluster, job: Job) -> str:
    job.cancel()
    return "tarantella: ended by SIGTERM; all ranks were ended.\n"


def send_sigterm(cluster: Cluster, job: Job) -> str:
    cluster.testbed["node1"].run("kill", (cluster.folder / "pid").read_text().strip())
    return "tarantella: ended by SIGTERM; all ranks were ended.\n"


def clean_up(cluster: Cluster, job: Job) -> str:
    second_shell = ["srun", "--overlap", f"--jobid={job.number}", "--nodes=1", "--ntasks=1"]
    command = [*second_shell, *shlex.split(COMMAND), "--cleanup", "--", "script.py"]
    result = cluster.testbed["node3"].run(*command, cwd=cluster.folder)
    for host in ("node1", "node2"):
        assert f"processes of {cluster.folder}/script.py on host {host}.\n" in result.stderr
    return "tarantella: "


@pytest.mark.parametrize("end", [cancel, send_sigterm, clean_up])
def test_a_run_that_is_ended_is_gone_from_all_hosts(
    cluster: Cluster, end: Callable[[Cluster, Job], str]
) -> None:
    command = f"{COMMAND} --no-gpu --n-per-node 2 -- {cluster.script(WAIT)}"
    script = f"{command} & echo $! > pid; wait $!"
    job = cluster.slurm.submit(script, "--nodes=2", cwd=cluster.folder)
    deadline = time.monotonic() + LIMIT
    while "started" not in job.output and time.monotonic() < deadline:
        time.sleep(0.1)
    started = time.monotonic()
    says = end(cluster, job)
    cluster.wait_for_end(SECONDS_TO_END)
    assert time.monotonic() - started < SECONDS_TO_END
    assert cluster.left() == {}
    result = job.wait()
    assert result.returncode != 0
    assert says in result.stderr
    assert "may still be running" not in result.stderr


def test_ranks_that_srun_has_started_are_ranks(cluster: Cluster) -> None:
    script = cluster.script("import tarantella as tnt\nprint(tnt.get_rank(), tnt.get_size())\n")
    srun = f"srun --ntasks=2 --mpi=%s {shlex.quote(sys.executable)} {script}"
    result = cluster.batch(srun % "pmi2", "--nodes=2")
    assert sorted(result.stdout.splitlines()) == ["0 2", "1 2"]
    without_mpi = cluster.batch(srun % "none", "--nodes=2")
    assert without_mpi.returncode != 0
    assert "start them with `srun --mpi=pmi2`" in without_mpi.stderr
