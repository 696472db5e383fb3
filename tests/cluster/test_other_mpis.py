"""The command with other MPIs than MPICH: Open MPI and Intel MPI, here and on two hosts."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sysconfig
import time
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import Cluster
from testbed import LIMIT, ROOT, Testbed, child_of

PACKAGES = {"openmpi": "openmpi", "intelmpi": "impi-rt"}

TRAIN = """
import keras
import numpy as np
import tarantella as tnt
from mpi4py import MPI
model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
model.compile("sgd", "mse")
model.fit(np.ones((8, 4)), np.ones((8, 2)), batch_size=4, epochs=2, verbose=0)
same = np.array_equal(*tnt.allgather(model.get_weights()[0]))
print(tnt.get_rank(), MPI.Get_library_version().split()[0], same)
"""
SHOW = """
import os, sys
import numpy as np
import tarantella as tnt
total = tnt.allreduce(np.arange(3.0) + tnt.get_rank())
print(total.tolist(), list(map(os.fsencode, sys.argv[1:])), os.environb[b"VALUE"])
print("x" * 100000)
"""
FAIL = """
import tarantella as tnt
tnt.barrier()
if tnt.get_rank() == 3:
    raise ValueError("no such luck")
tnt.barrier()
"""
SLEEP = """
import time
import tarantella as tnt
tnt.barrier()
print("running", flush=True)
time.sleep(600)
"""
VERSION = """
from mpi4py import MPI
print(MPI.COMM_WORLD.size, MPI.Get_library_version().split()[0])
"""


class OtherCluster(Cluster):
    """Hosts that have another MPI.

    Args:
        testbed: The hosts.
        folder: What they share.
        python: The Python that has it.
    """

    def __init__(self, testbed: Testbed, folder: Path, python: str) -> None:
        super().__init__(testbed, folder)
        self._python = python

    def command(self, *arguments: str, hosts: tuple[str, ...] = ("node1", "node2")) -> list[str]:
        return [self._python, *super().command(*arguments, hosts=hosts)[1:]]


def make_python(folder: Path, packages: Sequence[str]) -> str:
    """A Python that has these packages, and all others from the one that runs the tests."""
    venv.create(folder, symlinks=True)
    python = str(folder / "bin/python")
    [own] = folder.glob("lib/python*/site-packages")
    others = sysconfig.get_path("purelib")
    (own / "others.pth").write_text(f"import site; site.addsitedir({others!r})\n")
    for package in packages:  # one after the other: both have files of the same names
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        apart = ["--ignore-installed", "--no-deps", "--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([*install, *apart, package], check=True, timeout=LIMIT)
    return python


@pytest.fixture(scope="session", params=PACKAGES)
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "intelmpi" and platform.machine() != "x86_64":
        pytest.skip("there is no Intel MPI for this machine")
    return make_python(tmp_path_factory.mktemp(request.param), [PACKAGES[request.param]])


@pytest.fixture
def cluster(cluster: Cluster, python: str) -> Cluster:
    return OtherCluster(cluster.testbed, cluster.folder, python)


def run_here(python: str, script: Path, **variables: str) -> str:
    """What a script prints on two ranks of this machine."""
    command = [python, "-m", "tarantella.cli", "-n", "2", "--no-gpu", "--output-on-all-devices"]
    environ = {**os.environ, **variables}
    result = subprocess.run(
        [*command, "--", str(script)], env=environ, capture_output=True, text=True, timeout=LIMIT
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_training_on_this_machine(python: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    name = "Open" if "openmpi" in python else "Intel(R)"
    lines = sorted(run_here(python, script).splitlines())
    assert lines == [f"[rank {rank}] {rank} {name} True" for rank in range(2)]


def test_ranks_on_two_hosts_get_everything_and_are_heard(cluster: Cluster) -> None:
    words = ["two words", "'\"", "line\nline", "$(id)", ";", "ä€", ":", "\\:", "", "*", "-x"]
    value = """ it's "$(id)";\nä:"""
    script = cluster.script(SHOW)
    options = ["--n-per-node", "2", "--output-on-all-devices", "-x", f"VALUE={value}"]
    result = cluster.run(*options, "--", script, *words)
    assert (result.returncode, result.stderr) == (0, "")
    shown = f"[6.0, 10.0, 14.0] {list(map(os.fsencode, words))} {os.fsencode(value)}"
    marks = [f"[rank {rank} on node{rank // 2 + 1}] " for rank in range(4)]
    expected = [mark + line for mark in marks for line in (shown, "x" * 100000)]
    assert sorted(result.stdout.splitlines()) == sorted(expected)


def test_exception_on_another_host(cluster: Cluster) -> None:
    result = cluster.run("--n-per-node", "2", "--", cluster.script(FAIL))
    assert result.returncode == 1
    assert result.stdout == ""
    *traceback, message = result.stderr.splitlines()
    assert all(line.startswith("[rank 3 on node2] ") for line in traceback), result.stderr
    assert message.startswith(
        "tarantella: rank 3 on host node2 failed: ValueError: no such luck (exit status 1); "
        "the other ranks were ended ("
    )


@pytest.mark.parametrize(
    ("number", "while_starting"),
    [(signal.SIGTERM, True), (signal.SIGINT, False)],
    ids=["starting", "running"],
)
def test_signal_ends_all_ranks(number: int, while_starting: bool, cluster: Cluster) -> None:
    process = cluster.start("--n-per-node", "2", "--", cluster.script(SLEEP))
    if while_starting:
        wait_for_launcher(cluster)
        time.sleep(0.3)
    else:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
    os.kill(child_of(process.pid), number)
    sent = time.monotonic()
    _, errors = process.communicate(timeout=LIMIT)
    assert time.monotonic() - sent < 30  # ten are promised, on a machine that is idle otherwise
    assert process.returncode == 128 + number
    name = signal.Signals(number).name
    # A launcher that is disturbed while it starts may have something to say, too.
    assert errors.endswith(f"tarantella: ended by {name}; all ranks were ended.\n")


def wait_for_launcher(cluster: Cluster) -> None:
    deadline = time.monotonic() + LIMIT
    launcher = re.compile(r"\S*/(mpiexec\S*|prterun) .*launch\.supervisor ")
    while not any(launcher.match(each.command) for each in cluster["node1"].processes()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_library_that_is_asked_for_among_several(tmp_path: Path) -> None:
    python = make_python(tmp_path / "python", ["openmpi", "mpich"])
    script = tmp_path / "version.py"
    script.write_text(VERSION)
    chosen = str(tmp_path / "python/lib/libmpi.so.40")
    assert "2 Open" in run_here(python, script, MPI4PY_LIBMPI=chosen)
    assert "2 MPICH" in run_here(python, script)
