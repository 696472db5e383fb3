"""A small Slurm cluster on the hosts of a testbed.

The first host runs the controller, every host runs a daemon for its jobs, and all are in one
partition. Nothing is installed on the machine, and everything disappears with the testbed. It
needs root, and Debian's packages slurmctld, slurmd, slurm-client and munge.

    python tests/cluster/slurm.py 3

opens a shell on the first of three hosts.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from testbed import LIMIT, ROOT, Node, Process, Testbed
from testbed import what_is_missing as what_testbed_misses

DAEMONS = ("munged", "slurmctld", "slurmd")
PROGRAMS = (*DAEMONS, "salloc", "sbatch", "scancel", "scontrol", "sinfo", "srun")

# The hosts of a testbed have no cgroups: Slurm tracks processes by their parents, and binds them to
# cores by the affinity they start with.
CONFIGURATION = """\
ClusterName=testbed
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin={task_plugin}
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/run/slurm/slurmctld.log
SlurmdLogFile=/run/slurm/slurmd.log
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
NodeName={nodes} Sockets=1 CoresPerSocket={cores} ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes={nodes} Default=YES MaxTime=30 OverSubscribe=NO State=UP
"""


def what_is_missing() -> str:
    """Why Slurm cannot run here; empty if it can."""
    missing = [program for program in PROGRAMS if _which(program) is None]
    return what_testbed_misses() or (f"Slurm needs {', '.join(missing)}" if missing else "")


@dataclass(frozen=True)
class Job:
    """A batch job.

    Attributes:
        number: Slurm's job number
        folder: where its script and its output are
        front: a host with Slurm's commands
    """

    number: str
    folder: Path
    front: Node

    @property
    def output(self) -> str:
        """Its output so far."""
        return _read(self.folder / "output")

    def cancel(self) -> None:
        self.front.run("scancel", self.number)

    def wait(self, limit: int = LIMIT) -> subprocess.CompletedProcess[str]:
        """Waits for its end; returns its exit status, above 128 for a signal, and its output.

        Args:
            limit: How many seconds to wait.
        """
        status = self._status(limit)
        return subprocess.CompletedProcess(
            ["sbatch"], status, self.output, _read(self.folder / "errors")
        )

    def _status(self, limit: int) -> int:
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            shown = self.front.run("scontrol", "--oneliner", "show", "job", self.number).stdout
            if not re.search(r"\bJobState=(PENDING|CONFIGURING|RUNNING|COMPLETING)\b", shown):
                status, number = re.findall(r"\bExitCode=(\d+):(\d+)", shown)[0]
                return int(status) or (128 + int(number) if int(number) else 0)
            time.sleep(0.1)
        self.cancel()
        raise RuntimeError(
            f"The job is not done after {limit} seconds: {shown}{_read(self.folder / 'errors')}"
        )


class Slurm:
    """Slurm on the hosts of a testbed, while the context lasts.

    Args:
        testbed: The hosts.
        task_plugin: What binds processes to cores; with `task/none`, they may use all cores.

    Example:
        >>> with Testbed(2) as testbed, Slurm(testbed) as slurm:
        ...     slurm.batch("srun hostname", "--nodes=2")
    """

    def __init__(self, testbed: Testbed, task_plugin: str = "task/affinity") -> None:
        self._testbed = testbed
        self._task_plugin = task_plugin
        self._stack = ExitStack()

    def __enter__(self) -> Slurm:
        with ExitStack() as stack:
            self.folder = self._testbed.folder / "slurm"
            self.folder.mkdir()
            self._write_files()
            for node in self._testbed.nodes:
                self._start(node)
                stack.callback(self._end, node)
            self._wait_until_idle()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def front(self) -> Node:
        """The host from which jobs are submitted; its `run` has srun, salloc and all the rest."""
        return self._testbed.nodes[0]

    def batch(
        self, script: str, *options: str, limit: int = LIMIT, **settings: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a batch script, and waits for its end.

        Args:
            script: What the first host of the allocation runs with bash.
            options: Options of sbatch, like `--nodes=2`.
            limit: How many seconds to wait.
            settings: Arguments of `Node.run`, like `env` and `cwd`.

        Returns:
            The exit status, standard output and standard error of the job.
        """
        return self.submit(script, *options, **settings).wait(limit)

    def submit(self, script: str, *options: str, **settings: Any) -> Job:
        """Starts a batch script; the arguments are those of `batch`."""
        folder = Path(tempfile.mkdtemp(dir=self.folder, prefix="job-"))
        (folder / "script").write_text(f"#!/bin/bash\n{script}\n")
        files = [f"--output={folder}/output", f"--error={folder}/errors"]
        command = ["sbatch", "--parsable", *files, *options, str(folder / "script")]
        return Job(self.front.run(*command, **settings).stdout.strip(), folder, self.front)

    def processes(self, node: Node) -> list[Process]:
        """The processes on a host, except those of the testbed and of Slurm itself."""
        own = (*DAEMONS, "slurmstepd")
        return [each for each in node.processes() if not any(name in each.command for name in own)]

    def _write_files(self) -> None:
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(64))
        (self.folder / "etc").mkdir()
        # Unless it is told which, a daemon looks for cgroups, even if nothing uses them.
        (self.folder / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "etc" / "slurm.conf").write_text(
            CONFIGURATION.format(
                controller=self._testbed.names[0],
                nodes=",".join(self._testbed.names),
                cores=os.cpu_count(),
                task_plugin=self._task_plugin,
            )
        )

    def _start(self, node: Node) -> None:
        node.replace(Path("/etc/slurm"), self.folder / "etc")
        node.run("mkdir", "-p", "/run/munge", "/run/slurm/state", "/run/slurm/spool")
        own = ["--pid-file=/run/munge/munged.pid", "--log-file=/run/munge/munged.log"]
        key = f"--key-file={self.folder}/munge.key"
        self._run_daemon(node, "munged", key, "--seed-file=/run/munge/seed", *own)
        if node is self.front:
            self._run_daemon(node, "slurmctld")
        self._run_daemon(node, "slurmd")

    def _run_daemon(self, node: Node, program: str, *options: str) -> None:
        node.run(_which(program) or program, *options)

    def _end(self, node: Node) -> None:
        for name in ("slurm/slurmd", "slurm/slurmctld", "munge/munged"):
            node.run("pkill", "--pidfile", f"/run/{name}.pid", check=False)
        node.show(Path("/etc/slurm"))

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + LIMIT
        states: list[str] = []
        while time.monotonic() < deadline:
            answer = self.front.run("sinfo", "--noheader", "--Node", "--format=%t", check=False)
            states = answer.stdout.split()
            if states == ["idle"] * len(self._testbed.names):
                return
            time.sleep(0.2)
        raise RuntimeError(f"Slurm's hosts are {', '.join(states) or 'not there'}.")


def _which(program: str) -> str | None:
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def main(arguments: Sequence[str]) -> int:
    missing = what_is_missing()
    if missing:
        print(missing, file=sys.stderr)
        return 2
    with Testbed(int(arguments[0]) if arguments else 2) as testbed, Slurm(testbed) as slurm:
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        shell = ["env", f"--chdir={ROOT}", f"PATH={path}", r"PS1=\h:\w\$ ", "bash", "--norc"]
        print("`exit` ends all hosts. Try:  salloc --nodes=2")
        return subprocess.call(slurm.front.command(*shell))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
