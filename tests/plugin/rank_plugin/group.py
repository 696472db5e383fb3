"""A number of ranks, started once, that run one test after another."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from .outcome import RankResult, failed_setup, merge
from .protocol import (
    DONE,
    DUMP_SIGNAL,
    STOP,
    Ready,
    Report,
    Run,
    make_plan,
    output_file,
    stack_file,
)

GROUP_VARIABLE = "RANK_PLUGIN_GROUP"  # in the environment of every process of a group
STOP_LIMIT = 30.0  # seconds for the ranks to end after their last test
MAX_OUTPUT = 200_000  # bytes of a rank's output that a report shows


class StartError(Exception):
    """A group of ranks did not start; the message says why."""


class Group:
    """Ranks under one mpiexec, which all run the same tests in the same order.

    Args:
        config: the configuration of the controlling pytest.
        size: the number of ranks.
        items: the tests it may have to run.
        directory: an empty directory for the files of the group.
    """

    def __init__(
        self, config: pytest.Config, size: int, items: list[pytest.Item], directory: Path
    ) -> None:
        self.config = config
        self.size = size
        self.items = items
        self.directory = directory
        self.usable = False
        self._grace = float(config.getini("rank_grace"))
        self._token = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._connections: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._not_collected: dict[int, dict[str, str]] = {}
        self._shown = dict.fromkeys(range(size), 0)
        self._tests = 0

    def start(self) -> None:
        """Start the ranks and wait until all have collected the tests."""
        socket_directory = tempfile.mkdtemp(prefix="ranks-")  # sockets need a short path
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"{socket_directory}/socket")
                listener.listen(self.size)
                self._launch(listener.getsockname())
                self._await_ranks(listener)
        except BaseException:
            self.kill()
            raise
        finally:
            shutil.rmtree(socket_directory)
        self.usable = True

    def _launch(self, address: str) -> None:
        plan = make_plan(self.config, self.items, self.directory, address).save()
        program = Path(__file__).with_name("__main__.py")
        ranks = [sys.executable, "-u", str(program), str(plan)]
        with (self.directory / "mpiexec.txt").open("wb") as output:
            self._process = subprocess.Popen(
                [find_mpiexec(), "-n", str(self.size), *ranks],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, GROUP_VARIABLE: self._token},
                start_new_session=True,
            )

    def _await_ranks(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + float(self.config.getini("rank_start_timeout"))
        try:
            while len(self._not_collected) < self.size:
                if time.monotonic() > deadline:
                    stacks = self._dump_stacks(list(self._pids))
                    raise StartError(self._describe("did not start in time", stacks))
                if self._mpiexec_status() is not None:
                    raise StartError(self._describe("did not start"))
                if wait([listener], 0 if self._connections else 0.1):
                    connection = Connection(listener.accept()[0].detach())
                    hello = connection.recv()
                    self._connections[hello.rank] = connection
                    self._pids[hello.rank] = hello.pid
                for rank in self._speaking(0.1):
                    message = self._connections[rank].recv()
                    assert isinstance(message, Ready)
                    self._not_collected[rank] = message.not_collected
        except (EOFError, OSError):
            self._mpiexec_status(3.0)
            raise StartError(self._describe("did not start")) from None

    def run(
        self, item: pytest.Item, following: pytest.Item | None, limit: float
    ) -> list[pytest.TestReport]:
        """Run a test on all ranks, and return its reports.

        Args:
            item: the test.
            following: the test that this group runs next.
            limit: seconds until it counts as hanging.
        """
        results = {rank: RankResult(rank) for rank in range(self.size)}
        for rank, reasons in self._not_collected.items():
            if reason := reasons.get(item.nodeid):
                results[rank].reports.append(failed_setup(item, reason))
        if any(result.reports for result in results.values()):
            return merge(item, list(results.values()), [])

        self.usable = False
        self._tests += 1
        shared = self.directory / f"shared-{self._tests}"
        shared.mkdir()
        started = time.monotonic()
        self._tell(Run(item.nodeid, following.nodeid if following else None, str(shared)))
        dead, hanging = self._collect(results, started + limit)

        if hanging:
            self._explain_hangs(results, hanging, bool(dead), limit)
        for rank, result in results.items():
            result.output = self._new_output(rank)
        # MPICH's MPI_Abort returns, so a test may finish before its rank is killed.
        aborting = [rank for rank in results if re.search(r"(?m)^Abort\(", results[rank].output)]
        if (dead or aborting) and self._mpiexec_status(3.0) is not None:
            dead |= dict.fromkeys(aborting, 0.0)
        if dead:
            self._explain_deaths(results, dead)
        sections = []
        if dead or hanging:
            self.kill()
            if text := self._mpiexec_output():
                sections.append(("Output of mpiexec", text))
        # Ranks that disagree may have left unreceived messages behind.
        agreed = all(result.outcomes() == results[0].outcomes() for result in results.values())
        self.usable = agreed and not dead and not hanging
        reports = merge(item, list(results.values()), sections)
        if dead or hanging:
            reports[0].duration = time.monotonic() - started
        return reports

    def _collect(
        self, results: dict[int, RankResult], deadline: float
    ) -> tuple[dict[int, float], list[int]]:
        """Receive the reports; return the ranks that died, with the time, and those that run."""
        running = set(results)
        dead: dict[int, float] = {}
        while running and (left := deadline - time.monotonic()) > 0:
            ended = self._mpiexec_status() is not None
            speaking = self._speaking(min(left, 0.2), running)
            now = time.monotonic()
            if ended and not speaking:
                return dict.fromkeys(running, now) | dead, []
            for rank in speaking:
                try:
                    message = self._connections[rank].recv()
                except (EOFError, OSError):
                    dead[rank] = now
                    message = DONE
                if message == DONE:
                    running.remove(rank)
                if isinstance(message, Report):
                    report = self.config.hook.pytest_report_from_serializable(
                        config=self.config, data=message.data
                    )
                    results[rank].reports.append(report)
                if dead or results[rank].outcomes()[-1:] not in ([], ["passed"]):
                    deadline = min(deadline, now + self._grace)
        return dead, sorted(running)

    def _explain_deaths(self, results: dict[int, RankResult], dead: dict[int, float]) -> None:
        """Say how the test ended, and on which rank: mpiexec kills the others soon after.

        That is the rank that mpiexec names, or else the first to die. The patterns match MPICH's
        messages.
        """
        status, output = self._mpiexec_status(), self._mpiexec_output()
        end = f"mpiexec ended with status {status}" if status is not None else "status unknown"
        if found := re.search(r"EXIT STRING: (.+)", output):
            end = found[1]
        pids = re.findall(r"PID (\d+) RUNNING AT", output)
        named = [rank for rank in dead if str(self._pids[rank]) in pids]
        first = [rank for rank in dead if dead[rank] == min(dead.values())]
        for rank in named or first:
            results[rank].trouble = f"died during the test: {end}"
            results[rank].decisive = True

    def _explain_hangs(
        self, results: dict[int, RankResult], hanging: list[int], died: bool, limit: float
    ) -> None:
        failed = died or any(set(r.outcomes()) - {"passed"} for r in results.values())
        since = f"{self._grace:g} s after another rank failed" if failed else f"after {limit:g} s"
        for rank, stacks in self._dump_stacks(hanging).items():
            results[rank].trouble = f"still running {since}, killed; it was here:\n{stacks}"
            results[rank].decisive = not failed

    def _dump_stacks(self, ranks: list[int]) -> dict[int, str]:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], DUMP_SIGNAL)
        time.sleep(0.5)
        return {rank: shorten_stacks(read(stack_file(self.directory, rank))) for rank in ranks}

    def stop(self) -> str:
        """End the group after a test; return a complaint if it does not end well."""
        complaint = ""
        if self.usable:
            self.usable = False
            self._tell(STOP)
            status = self._mpiexec_status(STOP_LIMIT)
            if status is None:
                stacks = self._dump_stacks(list(self._pids))
                complaint = self._describe(f"did not end in {STOP_LIMIT:g} s", stacks)
            elif status != 0:
                complaint = self._describe(f"ended with status {status} after the last test")
        self.kill()
        return complaint

    def kill(self) -> None:
        """Leave no process of the group behind."""
        self.usable = False
        if self._process is None:
            return
        for connection in self._connections.values():
            connection.close()
        for _ in range(100):
            pids = processes_with(f"{GROUP_VARIABLE}={self._token}")
            if self._process.poll() is None:
                pids.add(self._process.pid)
            if not pids:
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _tell(self, message: Run | str) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # a dead rank: `_collect` will notice
                connection.send(message)

    def _speaking(self, seconds: float, ranks: set[int] | None = None) -> list[int]:
        """The ranks that have sent a message, or are dead."""
        candidates = self._connections if ranks is None else sorted(ranks)
        ready = wait([self._connections[rank] for rank in candidates], seconds)
        return [rank for rank in candidates if self._connections[rank] in ready]

    def _describe(self, what: str, stacks: dict[int, str] | None = None) -> str:
        """What happened to the group, with the new output of its processes."""
        parts = [f"The group of {self.size} ranks {what}."]
        if text := self._mpiexec_output():
            parts.append(f"--- output of mpiexec\n{text}")
        for rank in range(self.size):
            if text := self._new_output(rank):
                parts.append(f"--- output of rank {rank}\n{text}")
        parts += [f"--- rank {rank} was here\n{text}" for rank, text in (stacks or {}).items()]
        return "\n".join(parts)

    def _new_output(self, rank: int) -> str:
        """What a rank has written since the last call."""
        path = output_file(self.directory, rank)
        start, self._shown[rank] = self._shown[rank], path.stat().st_size if path.exists() else 0
        return read(path, start)

    def _mpiexec_output(self) -> str:
        return read(self.directory / "mpiexec.txt")

    def _mpiexec_status(self, seconds: float = 0.0) -> int | None:
        """The exit status of mpiexec, after waiting up to `seconds`, or None if it still runs."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None


def find_mpiexec() -> str:
    beside_python = Path(sys.executable).with_name("mpiexec")
    found = str(beside_python) if beside_python.exists() else shutil.which("mpiexec")
    if found is None:
        raise StartError("There is no mpiexec, neither next to this Python nor in PATH.")
    return found


def processes_with(setting: str) -> set[int]:
    """The processes that were started with a setting (`NAME=value`) in their environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if setting.encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    return found


def shorten_stacks(text: str) -> str:
    """Remove the frames of pytest and the thread that listens to the controller."""
    threads = [thread for thread in text.split("\n\n") if "in _listen\n" not in thread]
    lines = "\n\n".join(threads).strip().splitlines()
    hidden = re.compile(r"/(_pytest|pluggy|rank_plugin)/")
    return "\n".join(line for line in lines if not hidden.search(line)) or "(it wrote no stack)"


def read(path: Path, start: int = 0) -> str:
    """The text of a file from a position on; only the end if it is long."""
    if not path.exists():
        return ""
    with path.open("rb") as stream:
        end = stream.seek(0, os.SEEK_END)
        skipped = max(0, end - start - MAX_OUTPUT)
        stream.seek(start + skipped)
        text = stream.read().decode(errors="replace")
    return f"[{skipped} bytes before this are in {path}]\n{text}" if skipped else text
