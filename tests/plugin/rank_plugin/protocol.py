"""The messages between a group and its ranks.

The group writes a `Plan` to a file and listens on a socket. Each rank connects and says `Hello`,
then `Ready` once it has collected its tests. For each test the group sends `Run` to all ranks, and
each answers with a `Report` for every phase and with DONE. STOP ends the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

DONE, STOP = "done", "stop"
DUMP_SIGNAL = signal.SIGUSR2  # makes a rank write its stacks
# These options are for the controlling pytest; a rank runs what it is told.
OPTIONS_OF_RANKS = {
    "cacheclear": False,
    "capture": "no",
    "failedfirst": False,
    "lf": False,
    "newfirst": False,
    "stepwise": False,
    "trace": False,
    "usepdb": False,
}
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


@dataclass(frozen=True)
class Plan:
    """What every rank of a group needs to know before it can connect."""

    directory: str
    socket: str
    arguments: list[str]
    nodeids: list[str]
    options: dict[str, Any]
    sys_path: list[str]
    preload: list[str]

    def save(self) -> Path:
        path = Path(self.directory, "plan.json")
        path.write_text(json.dumps(asdict(self), indent=1))
        return path

    @staticmethod
    def load(path: Path) -> Plan:
        return Plan(**json.loads(path.read_text()))


def make_plan(
    config: pytest.Config, items: list[pytest.Item], directory: Path, address: str
) -> Plan:
    """The plan for ranks that run these tests as this pytest would.

    Only what a rank must know early is on its command line. All other options, of any plugin,
    are passed as values.
    """
    arguments = ["-p", "rank_plugin", "--capture=no", f"--rootdir={config.rootpath}"]
    arguments.append(f"--import-mode={config.getoption('importmode')}")
    if config.inipath is not None:
        arguments.append(f"--config-file={config.inipath}")
    if config.getoption("confcutdir"):
        arguments.append(f"--confcutdir={config.getoption('confcutdir')}")
    for plugin in config.getoption("plugins"):
        arguments += ["-p", plugin]
    for setting in config.getoption("override_ini") or []:
        arguments += ["-o", setting]

    plain = (bool, int, float, str, type(None))
    options = {
        name: value
        for name, value in vars(config.option).items()
        if isinstance(value, plain)
        or (isinstance(value, list) and all(isinstance(part, plain) for part in value))
    }
    return Plan(
        directory=str(directory),
        socket=address,
        arguments=arguments + list(dict.fromkeys(str(item.path) for item in items)),
        nodeids=[item.nodeid for item in items],
        options=options | OPTIONS_OF_RANKS,
        sys_path=sys.path,
        preload=list(dict.fromkeys(config.getini("rank_preload"))),
    )


@dataclass(frozen=True)
class Hello:
    rank: int
    pid: int


@dataclass(frozen=True)
class Ready:
    not_collected: dict[str, str]  # why, by node id


@dataclass(frozen=True)
class Run:
    nodeid: str
    next_nodeid: str | None
    shared_directory: str


@dataclass(frozen=True)
class Report:
    data: dict[str, Any]


def output_file(directory: Path, rank: int) -> Path:
    """Where a rank's stdout and stderr go."""
    return directory / f"rank-{rank}.txt"


def stack_file(directory: Path, rank: int) -> Path:
    """Where a rank writes its stacks."""
    return directory / f"rank-{rank}-stacks.txt"


def rank_of_this_process() -> int:
    """The rank that mpiexec gave to this process, known before MPI starts."""
    for name in RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    raise RuntimeError(f"not started by mpiexec: none of {', '.join(RANK_VARIABLES)} is set")
