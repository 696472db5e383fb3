"""Does what a reader of the documentation does: types a command, and looks at its output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "tests" / "cluster"))
from testbed import Testbed, what_is_missing  # noqa: E402

OF_OTHER_RUNS = ("MAKE", "MFLAGS", "MPI", "PMI", "PYTEST", "TNT_")


@dataclass(frozen=True)
class Finished:
    status: int
    output: str  # of both streams


@pytest.fixture(scope="session")
def reader_environment() -> dict[str, str]:
    """The commands of the tested Python come first; nothing of the test run is inherited.

    Ranks leave the core to other tests while they wait.
    """
    bin_folder = Path(sys.executable).parent
    if not (bin_folder / "tarantella").exists():
        pytest.fail(f"no `tarantella` in {bin_folder}: `make test` installs it", pytrace=False)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(OF_OTHER_RUNS)}
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    return inherited | {"PATH": path, "TEST_SHARED_CORES": "true"}


@pytest.fixture
def shell(reader_environment: dict[str, str], tmp_path: Path) -> Callable[..., Finished]:
    """Runs a command line in bash, by default in a new folder."""

    def run(command: str, cwd: Path = tmp_path, timeout: float = 240, **env: str) -> Finished:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=cwd,
            env=reader_environment | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that its child processes can be ended with it
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"`{command}` did not end within {timeout} s:\n{output}", pytrace=False)
        return Finished(process.returncode, output)

    return run


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """Two hosts, for commands with a hostfile, and for jobs."""
    if what_is_missing():
        pytest.skip(what_is_missing())
    with Testbed(2, shared=[tmp_path_factory.getbasetemp()]) as testbed:
        yield testbed


@pytest.fixture(scope="session")
def printed_on_two_ranks(reader_environment: dict[str, str]) -> Callable[..., str]:
    """Runs a script in a folder, and returns the output of both ranks, with the rank in front."""

    def run(folder: Path, *script: str, timeout: float) -> str:
        command = ["tarantella", "-n", "2", "--no-gpu", "--output-on-all-devices", "--", *script]
        finished = subprocess.run(
            command,
            cwd=folder,
            env=reader_environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        return finished.stdout

    return run
