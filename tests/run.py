"""Runs all tests except the long ones, in shards, a few at a time.

The output of a shard is shown when it has ended. A table at the end lists the time of each.
With arguments, it runs pytest with them, and nothing else.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = [sys.executable, "-m", "pytest"]
SHOW_SLOW_TESTS = ["--durations=15", "--durations-min=4"]
# Many tests wait, for a timeout or for another rank, so one shard more than there are cores keeps
# all cores busy; more would slow each other down. A shard can have three ranks in memory, so there
# are at most three.
AT_A_TIME = min((os.cpu_count() or 1) + 1, 3)
# Tests that need variables of their own.
DEVICE_SUMS = "test_device_sums"


@dataclass(frozen=True)
class Shard:
    """Tests that one pytest runs, one after the other.

    Attributes:
        name: what it is called.
        selection: the arguments that select its tests.
        variables: environment variables that it needs.
    """

    name: str
    selection: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The result of a shard.

    Attributes:
        shard: the shard.
        status: the exit status of its pytest.
        tests: how many tests were run or skipped.
        wall: seconds from its start to its end.
        cpu: seconds of computing, by pytest and all that it started and waited for.
    """

    shard: Shard
    status: int
    tests: int
    wall: float
    cpu: float


def shards() -> list[Shard]:
    """All tests, each in one shard.

    The slowest come first, and those that mostly wait run beside those that mostly compute.
    """
    folder = ROOT / "tests" / "ranks"
    files = sorted(
        str(path.relative_to(ROOT)) for path in folder.glob("test_*.py") if path.stem != DEVICE_SUMS
    )
    first = tuple(file for file in files if Path(file).name < "test_m")
    second = tuple(file for file in files if file not in first)
    on_ranks, others = ("-m", "ranks and not long"), ("-m", "not ranks and not long")
    return [
        Shard("2 ranks, second half", (*on_ranks, "-k", "2-ranks", *second, "tests/docs")),
        Shard("2 ranks, first half", (*on_ranks, "-k", "2-ranks", *first)),
        Shard("cluster", (*others, "tests/cluster")),
        Shard("command", (*others, "tests/ranks")),
        Shard("docs", (*others, "tests/docs")),
        Shard("3 ranks and more", (*on_ranks, "-k", "not 1-ranks and not 2-ranks")),
        Shard("unit", (*others, "tests/unit")),
        Shard(
            "2 ranks, TensorFlow's collectives",
            ("-m", "device_sums and not long", "-k", "2-ranks", "tests/ranks"),
            {"TNT_GPU_SUMS": "ring"},
        ),
        Shard("1 rank", (*on_ranks, "-k", "1-ranks")),
    ]


class Worker(threading.Thread):
    """Takes shards until there are no more, and runs each.

    Args:
        waiting: the shards that have not been started.
        results: takes the result of each.
    """

    def __init__(self, waiting: queue.SimpleQueue[Shard], results: list[Result]) -> None:
        super().__init__()
        self._waiting = waiting
        self._results = results
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def run(self) -> None:
        while not self._ended:
            try:
                shard = self._waiting.get_nowait()
            except queue.Empty:
                return
            with tempfile.TemporaryFile() as output:
                start = time.monotonic()
                status, cpu = self._run(shard, output.fileno())
                wall = time.monotonic() - start
                output.seek(0)
                text = output.read().decode(errors="replace")
            print(f"\n##### {shard.name}\n{text}", end="", flush=True)
            self._results.append(Result(shard, status, number_of_tests(text), wall, cpu))

    def _run(self, shard: Shard, output: int) -> tuple[int, float]:
        """Returns the exit status, and the seconds of computing."""
        cache = f"cache_dir=.pytest_cache/{shard.name.replace(' ', '-')}"
        self._process = subprocess.Popen(
            [*PYTEST, *shard.selection, "-o", cache, *SHOW_SLOW_TESTS],
            cwd=ROOT,
            env={**os.environ, **shard.variables},
            stdout=output,
            stderr=output,
        )
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return self._process.returncode, usage.ru_utime + usage.ru_stime

    def end(self) -> None:
        """Ends the shard that is running, and starts no other."""
        self._ended = True
        if self._process is not None:
            self._process.terminate()


def number_of_tests(output: str) -> int:
    """How many tests were run or skipped, by the last line that pytest prints."""
    last = output.rstrip().rpartition("\n")[2]
    return sum(map(int, re.findall(r"(\d+) (?:passed|failed|skipped|error|xfailed)", last)))


def table(results: Sequence[Result]) -> str:
    """A line for each shard, and one for all."""
    rows = [
        (each.shard.name, each.tests, each.wall, each.cpu, "FAILED" if each.status else "passed")
        for each in results
    ]
    rows.append(("all", *(sum(row[column] for row in rows) for column in (1, 2, 3)), ""))
    lines = [f"{'shard':22}{'tests':>7}{'wall':>9}{'CPU':>9}"]
    lines += [
        f"{shard:22}{n:7}{wall:7.0f} s{cpu:7.0f} s  {end}" for shard, n, wall, cpu, end in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0, or 1 if a shard failed; with arguments, that of pytest."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments])
    waiting: queue.SimpleQueue[Shard] = queue.SimpleQueue()
    for shard in shards():
        waiting.put(shard)
    results: list[Result] = []
    workers = [Worker(waiting, results) for _ in range(AT_A_TIME)]
    start = time.monotonic()
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except KeyboardInterrupt:
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.join()
        return 130
    failed = [result.shard.name for result in results if result.status]
    print(f"\n{table(results)}\n\n{(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    if failed:
        print(f"FAILED: {', '.join(failed)}. The output of each is above.", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
