"""Runs all tests but the long ones, in lots: a few at a time, those that take longest first.

The output of a lot is shown when it has ended; at the end, a table says what each lot took.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = [sys.executable, "-m", "pytest"]
# Many tests wait, for a limit to pass or for another rank: one lot more than there are cores
# leaves none of the cores idle; with more, they get in each other's way. Each lot can have three
# ranks in memory: no more than three lots.
AT_A_TIME = min((os.cpu_count() or 1) + 1, 3)


@dataclass(frozen=True)
class Lot:
    """Tests that one pytest runs, one after the other."""

    name: str
    selection: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """What came of a lot.

    Attributes:
        lot: the lot.
        status: the exit status of its pytest.
        tests: how many tests were run or skipped.
        wall: seconds from its start to its end.
        cpu: seconds of computing, by pytest and all that it started and waited for.
    """

    lot: Lot
    status: int
    tests: int
    wall: float
    cpu: float


def lots() -> list[Lot]:
    """All tests, each in one lot; those that take longest come first."""
    folder = ROOT / "tests" / "ranks"
    files = sorted(str(path.relative_to(ROOT)) for path in folder.glob("test_*.py"))
    first = tuple(file for file in files if Path(file).name < "test_m")
    second = tuple(file for file in files if file not in first)
    on_ranks, others = ("-m", "ranks and not long"), ("-m", "not ranks and not long")
    return [
        Lot("2 ranks, second half", (*on_ranks, "-k", "2-ranks", *second, "tests/docs")),
        Lot("2 ranks, first half", (*on_ranks, "-k", "2-ranks", *first)),
        Lot("docs", (*others, "tests/docs")),
        Lot("cluster", (*others, "tests/cluster")),
        Lot("command", (*others, "tests/ranks")),
        Lot("3 ranks and more", (*on_ranks, "-k", "not 1-ranks and not 2-ranks")),
        Lot("1 rank", (*on_ranks, "-k", "1-ranks")),
        Lot("unit", (*others, "tests/unit")),
    ]


class Worker(threading.Thread):
    """Takes lots until there are no more, and runs each.

    Args:
        waiting: the lots that nobody has taken.
        results: takes what came of each.
    """

    def __init__(self, waiting: queue.SimpleQueue[Lot], results: list[Result]) -> None:
        super().__init__()
        self._waiting = waiting
        self._results = results
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def run(self) -> None:
        while not self._ended:
            try:
                lot = self._waiting.get_nowait()
            except queue.Empty:
                return
            with tempfile.TemporaryFile() as output:
                start = time.monotonic()
                status, cpu = self._run(lot, output.fileno())
                wall = time.monotonic() - start
                output.seek(0)
                text = output.read().decode(errors="replace")
            print(f"\n##### {lot.name}\n{text}", end="", flush=True)
            self._results.append(Result(lot, status, number_of_tests(text), wall, cpu))

    def _run(self, lot: Lot, output: int) -> tuple[int, float]:
        """Returns the exit status, and the seconds of computing."""
        cache = f"cache_dir=.pytest_cache/{lot.name.replace(' ', '-')}"
        self._process = subprocess.Popen(
            [*PYTEST, *lot.selection, "-o", cache], cwd=ROOT, stdout=output, stderr=output
        )
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return self._process.returncode, usage.ru_utime + usage.ru_stime

    def end(self) -> None:
        """Does not wait for the rest."""
        self._ended = True
        if self._process is not None:
            self._process.terminate()


def number_of_tests(output: str) -> int:
    """How many tests were run or skipped, by the last line that pytest prints."""
    last = output.rstrip().rpartition("\n")[2]
    return sum(map(int, re.findall(r"(\d+) (?:passed|failed|skipped|error|xfailed)", last)))


def table(results: Sequence[Result]) -> str:
    """A line for each lot, and one for all."""
    rows = [
        (each.lot.name, each.tests, each.wall, each.cpu, "FAILED" if each.status else "passed")
        for each in results
    ]
    rows.append(("all", *(sum(row[column] for row in rows) for column in (1, 2, 3)), ""))
    lines = [f"{'lot':22}{'tests':>7}{'wall':>9}{'CPU':>9}"]
    lines += [f"{lot:22}{n:7}{wall:7.0f} s{cpu:7.0f} s  {end}" for lot, n, wall, cpu, end in rows]
    return "\n".join(line.rstrip() for line in lines)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0, or 1 if a lot failed; with arguments, that of pytest."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments])
    waiting: queue.SimpleQueue[Lot] = queue.SimpleQueue()
    for lot in lots():
        waiting.put(lot)
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
    failed = [result.lot.name for result in results if result.status]
    print(f"\n{table(results)}\n\n{(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    if failed:
        print(f"FAILED: {', '.join(failed)}. The output of each is above.", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
