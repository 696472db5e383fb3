"""The job scripts of the documentation, run as the schedulers would run them.

Slurm is real. PBS and LSF are simulated by the files and variables that they give to a job, and
by a `blaunch` that uses ssh.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from slurm import Slurm
from slurm import what_is_missing as what_slurm_misses
from testbed import Testbed

REPOSITORY = Path(__file__).parents[2]

PAGE = (REPOSITORY / "docs" / "jobs.md").read_text()
SCRIPTS = re.findall(r"^```bash\n(#!.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

TRAIN = """
import socket
import keras, numpy as np
import tarantella as tnt
model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=8, verbose=0)
print("hosts:", *tnt.allgather(socket.gethostname()))
"""
RESULT = "hosts: node1 node2\n"

# We call `blaunch -z HOST -no-shell COMMAND`; MPI's launcher, which needs a shell on the host,
# calls `blaunch -n HOST COMMAND`.
BLAUNCH = """#!/bin/bash
if [[ $1 == -z && $3 == -no-shell ]]; then
    exec ssh -o BatchMode=yes "$2" "$(printf '%q ' "${@:4}")"
fi
[[ $1 == -n ]] && exec ssh -o BatchMode=yes "${@:2}"
"""


def script_with(directive: str) -> str:
    """The script on the page that has these directives."""
    [script] = [script for script in SCRIPTS if f"\n#{directive} " in script]
    return script


def test_there_is_a_script_for_each_scheduler() -> None:
    assert len(SCRIPTS) == 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working directory of the job."""
    (tmp_path / "train.py").write_text(TRAIN)
    bin_folder = Path(sys.executable).parent
    path = f"{shlex.quote(str(bin_folder))}:{shlex.quote(str(tmp_path))}"
    (tmp_path / "environment.sh").write_text(f"export PATH={path}:$PATH\n")
    (tmp_path / "nodes").write_text("node1\nnode1\nnode2\nnode2\n")
    return tmp_path


def test_slurm(hosts: Testbed, folder: Path) -> None:
    if what_slurm_misses():
        pytest.skip(what_slurm_misses())
    script = script_with("SBATCH")
    for node in hosts.nodes:
        node.refuse_key()  # no ssh is needed
    try:
        with Slurm(hosts) as slurm:
            result = slurm.batch(script.removeprefix("#!/bin/bash\n"), cwd=folder)
    finally:
        for node in hosts.nodes:
            node.refuse_key(False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert RESULT in result.stdout


@pytest.mark.parametrize(
    ("directive", "variables"),
    [
        ("PBS", {"PBS_NODEFILE": "{folder}/nodes", "PBS_O_WORKDIR": "{folder}"}),
        ("BSUB", {"LSB_DJOB_HOSTFILE": "{folder}/nodes"}),
    ],
)
def test_variables_of_a_job(
    directive: str, variables: dict[str, str], hosts: Testbed, folder: Path
) -> None:
    (folder / "job").write_text(script_with(directive))
    (folder / "blaunch").write_text(BLAUNCH)
    (folder / "blaunch").chmod(0o755)
    settings = [f"{name}={value.format(folder=folder)}" for name, value in variables.items()]
    result = hosts.nodes[0].run("env", *settings, "bash", "job", cwd=folder, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert RESULT in result.stdout
