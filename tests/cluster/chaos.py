"""Runs on two hosts, each with a fault at a random time, and checks how they end.

    python tests/cluster/chaos.py --runs 100

Each run trains a small model with backups. Meanwhile a rank is killed, stopped or runs out of
memory, a cable is cut, a disk is full, or the command is told to end. Then the run has to end in
time, with the status and the message for the fault. It must leave nothing behind, the backup has to
load, and the training, once restarted, has to end with the weights of an undisturbed run, bit for
bit.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from commands import Cluster
from testbed import Testbed, child_of, what_is_missing

LIMIT = 180  # seconds for a run and its restarts, on a busy machine
SECONDS_TO_END = 30  # for processes on a host that was cut off
DISK = "8m"
HOSTS = ("node1", "node2")
RESTARTS = ("--max-restarts", "2")

SCRIPT = """
import os, resource, sys, time
from pathlib import Path

import keras
import numpy as np
import tarantella as tnt

rank, folder = tnt.get_rank(), Path(sys.argv[1])
keras.utils.set_random_seed(1)
x = np.random.default_rng(2).normal(size=(96, 20)).astype("float32")
layers = [keras.Input((20,)), keras.layers.Dense(200, "tanh"), keras.layers.Dropout(0.2, seed=4)]
model = tnt.Model(keras.Sequential([*layers, keras.layers.Dense(1)]))
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])


class Fault(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.05)
        try:
            fault = (folder / f"fault-{rank}").read_text()
            (folder / f"fault-{rank}").unlink()
        except OSError:
            return
        if fault == "exception":
            raise RuntimeError("a fault of the script")
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
        np.ones(1 << 30)


backup = keras.callbacks.BackupAndRestore(folder / "disk" / "backup", save_freq=3)
options = {"batch_size": 12, "epochs": 4, "verbose": 0, "validation_split": 0.1}
history = model.fit(x, x[:, :1] ** 2, callbacks=[backup, Fault()], **options).history
if rank == 0:
    np.savez(folder / "weights.npz", *model.get_weights(), *map(np.array, history.values()))
"""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        name: its name
        status: the exit status of a run without restarts
        report: the message of the command, with {rank} and {host}
        early: its message if no rank has started yet, with exit status 2
        of_command: whether the command itself is told to end, and does not restart
    """

    name: str
    status: int
    report: str
    early: str = "(?!)"
    of_command: bool = False


_RANK = r"rank {rank} on host {host} failed: "
FAULTS = (
    Fault("kill -9", 137, _RANK + r"it was killed by signal 9 \(SIGKILL"),
    Fault(
        "kill -STOP",
        1,
        _RANK + r"(others have waited for it .*{host} has not arrived: it is|it has been) stopped",
    ),
    Fault("exception", 1, _RANK + r"RuntimeError: a fault of the script"),
    Fault("out of memory", 1, _RANK + r".*(MemoryError|Unable to allocate)"),
    Fault(
        "link cut",
        1,
        r"rank 1 on host node2 failed: (nothing was|others have waited for it|it did not start)",
        early=r"\nnode2: (did not answer|cannot be reached)",
    ),
    Fault("full disk", 1, r"rank 0 on host node1 failed: .*No space left on device"),
    Fault("SIGTERM", 143, r"ended by SIGTERM", of_command=True),
    Fault("Ctrl+C", 130, r"ended by SIGINT", of_command=True),
)


@dataclass
class Result:
    """The result of a run.

    Attributes:
        fault: what went wrong
        when: how many seconds after the start
        restarts: whether the command was to restart it
        took: how many seconds the run took
        late: whether the run had ended before the fault
        problems: what was not as it should be
    """

    fault: Fault
    when: float
    restarts: bool
    took: float = 0.0
    late: bool = False
    problems: list[str] | None = None


class Chaos:
    """Two hosts, and a disk on the first one.

    Args:
        cluster: The hosts.
        seed: Determines when and where faults happen.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._random = random.Random(seed)
        self._script = cluster.script(SCRIPT, "chaos.py")
        self._disk = cluster.folder / "disk"
        self._disk.mkdir()
        cluster["node1"].run("mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(self._disk))
        self._expected: list[np.ndarray] = []
        self._usual = 0.0

    def close(self) -> None:
        """Unmounts the disk."""
        self._cluster["node1"].run("umount", str(self._disk))

    def undisturbed(self) -> None:
        """Trains without a fault, to compare all others with."""
        began = time.monotonic()
        process = self._start()
        _, errors = process.communicate(timeout=LIMIT)
        if process.returncode:
            raise RuntimeError(errors)
        self._usual = time.monotonic() - began
        self._expected = self._weights()

    def run(self, fault: Fault, restarts: bool) -> Result:
        """Trains with a fault."""
        when = self._random.uniform(0.05, 0.85) * self._usual
        rank = self._random.randrange(2)
        result = Result(fault, when, restarts and not fault.of_command, problems=[])
        assert result.problems is not None
        began = time.monotonic()
        process = self._start(*(RESTARTS if restarts else ()))
        heard = _Listener(process, self._repair)
        time.sleep(when)
        try:
            with suppress(FileNotFoundError):  # the run has ended already
                self._cause(fault, rank, process)
            status = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            result.problems.append(f"it did not end within {LIMIT} seconds")
            os.kill(child_of(process.pid), signal.SIGKILL)
            status = process.wait()
        result.took = time.monotonic() - began
        self._repair()
        said = heard.text()
        report = re.search(fault.report.format(rank=rank, host=HOSTS[rank]), said)
        result.late = report is None and status == 0 and "failed" not in said
        expected = 0 if result.restarts or result.late else fault.status
        if status == 2 and re.search(fault.early, said):
            report, expected = re.search(fault.early, said), 2
        if status != expected:
            result.problems.append(f"status {status}, not {expected}: {said}")
        if report is None and not result.late:
            result.problems.append(f"not reported: {said}")
        self._look_for_leftovers(result.problems)
        if status:
            self._resume(result.problems)
        self._compare(result.problems)
        return result

    def _start(self, *options: str) -> subprocess.Popen[str]:
        (self._cluster.folder / "weights.npz").unlink(missing_ok=True)
        arguments = ("--stall-timeout", "2", *options, "--", self._script)
        return self._cluster.start(*arguments, str(self._cluster.folder))

    def _cause(self, fault: Fault, rank: int, process: subprocess.Popen[str]) -> None:
        causes: dict[str, Callable[[], None]] = {
            "kill -9": lambda: self._signal(rank, signal.SIGKILL, process),
            "kill -STOP": lambda: self._signal(rank, signal.SIGSTOP, process),
            "link cut": lambda: self._cluster["node2"].cut(),
            "full disk": lambda: self._fill("dd if=/dev/zero of=filler bs=4k"),
            "SIGTERM": lambda: os.kill(child_of(process.pid), signal.SIGTERM),
            "Ctrl+C": lambda: os.kill(child_of(process.pid), signal.SIGINT),
        }
        tell = self._cluster.folder / f"fault-{rank}"
        causes.get(fault.name, lambda: (tell.write_text(fault.name), None)[1])()

    def _signal(self, rank: int, number: int, process: subprocess.Popen[str]) -> None:
        """Sends a signal to a rank's program, as soon as it runs."""
        while process.poll() is None:
            for each in self._cluster[HOSTS[rank]].processes():
                if "launch.script" in each.command and "supervisor" not in each.command:
                    os.kill(each.outer_pid, number)
                    return
            time.sleep(0.02)

    def _fill(self, command: str) -> None:
        self._cluster["node1"].run("sh", "-c", command, check=False, cwd=self._disk)

    def _repair(self) -> None:
        """Does what a user does before a restart."""
        self._cluster["node2"].cut(False)
        self._fill("rm -f filler")
        for rank in range(2):
            (self._cluster.folder / f"fault-{rank}").unlink(missing_ok=True)

    def _look_for_leftovers(self, problems: list[str]) -> None:
        self._cluster.wait_for_end(SECONDS_TO_END)
        left = self._cluster.left()
        if left:
            problems.append(f"left behind: {left}")
            for node in self._cluster.nodes:
                node.wipe()

    def _resume(self, problems: list[str]) -> None:
        """Restarts a failed run from its backup."""
        files = self._cluster["node1"].run("find", str(self._disk), "-type", "f").stdout.split()
        if [file for file in files if ".saving-" in file]:
            problems.append(f"unfinished files are left: {files}")
        process = self._start()
        _, errors = process.communicate(timeout=LIMIT)
        if process.returncode:
            problems.append(f"cannot resume: {errors}")

    def _compare(self, problems: list[str]) -> None:
        try:
            actual = self._weights()
            np.testing.assert_equal(actual, self._expected)
        except (OSError, AssertionError) as error:
            problems.append(f"the weights differ: {error}")
        files = self._cluster["node1"].run("find", str(self._disk), "-mindepth", "1").stdout
        if files:
            problems.append(f"the backup was not removed: {files}")
            self._fill("rm -rf backup .backup*")

    def _weights(self) -> list[np.ndarray]:
        with np.load(self._cluster.folder / "weights.npz") as arrays:
            return [arrays[name] for name in arrays.files]


class _Listener:
    """Reads the messages of the command, and repairs the damage once it reports the failure."""

    def __init__(self, process: subprocess.Popen[str], repair: Callable[[], None]) -> None:
        self._lines: list[str] = []
        self._process = process
        self._repair = repair
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def text(self) -> str:
        self._thread.join()
        return "".join(self._lines)

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
            if line.startswith("tarantella: rank"):
                self._repair()


def table(results: Sequence[Result]) -> str:
    """The figures for each kind of fault, in Markdown."""
    lines = [
        "| fault | runs | passed | seconds to the end, median (longest) |",
        "| --- | --- | --- | --- |",
    ]
    for fault in FAULTS:
        some = [result for result in results if result.fault is fault]
        if some:
            good = sum(not result.problems for result in some)
            seconds = sorted(result.took for result in some)
            lines.append(
                f"| {fault.name} | {len(some)} | {good} | "
                f"{seconds[len(seconds) // 2]:.0f} ({seconds[-1]:.0f}) |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100, help="number of runs (100)")
    parser.add_argument(
        "--seed", type=int, default=0, help="determines when and where faults happen (0)"
    )
    parser.add_argument("--fault", choices=[fault.name for fault in FAULTS], help="only this one")
    options = parser.parse_args(arguments)
    if missing := what_is_missing():
        print(missing, file=sys.stderr)
        return 2
    faults = [fault for fault in FAULTS if options.fault in (None, fault.name)]
    results = []
    with tempfile.TemporaryDirectory() as folder, Testbed(2, [Path(folder)]) as testbed:
        chaos = Chaos(Cluster(testbed, Path(folder)), options.seed)
        chaos.undisturbed()
        for number in range(options.runs):
            # For each kind, the command restarts half of the runs.
            fault, restarts = faults[number % len(faults)], number // len(faults) % 2 == 0
            result = chaos.run(fault, restarts)
            results.append(result)
            how = " too late" if result.late else " restarted" if result.restarts else ""
            print(f"{number + 1}: {fault.name} after {result.when:.1f} s{how}, {result.took:.1f} s:"
                  f" {'; '.join(result.problems or []) or 'good'}", flush=True)  # fmt: skip
    print(table(results))
    return 1 if any(result.problems for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
