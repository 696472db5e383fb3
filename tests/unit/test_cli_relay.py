"""What the command passes on of the launcher's output."""

from __future__ import annotations

import subprocess

import pytest

from tarantella.cli.mpiexec_command import MpiexecCommand
from tarantella.cli.outcome import Outcome
from tarantella.cli.relay import OutputRelay
from tarantella.cli.run_record import RunRecord
from tarantella.cli.stalls import Stalls

LOST_PEER = """\
[{host}:00000] *** An error occurred in Socket closed
[{host}:00000] *** on a NULL communicator
[{host}:00000] ***    and MPI will try to terminate your MPI job as well)
"""


@pytest.mark.parametrize("host", ["node1", "node2"])
def test_launcher_on_any_host_says_nothing_of_its_own(
    host: str, capfd: pytest.CaptureFixture[str]
) -> None:
    text = f"before\n{LOST_PEER.format(host=host)}after\n"
    program = ["sh", "-c", 'printf %s "$0" >&2', text]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as mpiexec:
        command = MpiexecCommand((), {}, {}, ("node1", "node2"), "train.py")
        OutputRelay(mpiexec, Outcome(2), "run", command, Stalls({}, 0), RunRecord()).relay()
    assert capfd.readouterr().err == "before\nafter\n"
