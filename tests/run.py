"""Runs all tests except long ones: those on several ranks, and the others at the same time.

The others come in lots. An idle worker takes the next one.
With arguments, it only runs pytest with them.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO

PYTEST = [sys.executable, "-m", "pytest"]
SEVERAL_RANKS = ["-m", "ranks and not long", "-k", "not 1-ranks"]
LOTS = [
    ["-m", "not ranks and not long", "tests/docs"],
    ["-m", "not ranks and not long", "tests/cluster"],
    ["-m", "not ranks and not long", "tests/ranks"],
    ["-m", "not ranks and not long", "tests/unit"],
    ["-m", "ranks and not long", "-k", "1-ranks"],
]


class Worker(threading.Thread):
    """Runs lots of tests until none are left, and keeps their output."""

    def __init__(self, lots: queue.SimpleQueue[tuple[int, list[str]]], output: IO[str]) -> None:
        super().__init__()
        self._lots = lots
        self._output = output
        self._process: subprocess.Popen[str] | None = None
        self._ended = False
        self.status = 0

    def run(self) -> None:
        while not self._ended:
            try:
                number, lot = self._lots.get_nowait()
            except queue.Empty:
                return
            command = [*PYTEST, *lot, "-o", f"cache_dir=.pytest_cache/lot-{number}"]
            self._process = subprocess.Popen(
                command, stdout=self._output, stderr=subprocess.STDOUT, text=True
            )
            self.status = self._process.wait() or self.status

    def end(self) -> None:
        """Stops the current lot, and takes no more."""
        self._ended = True
        if self._process is not None:
            self._process.terminate()


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: of the tests on several ranks if not 0, or else of the others."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments])
    lots: queue.SimpleQueue[tuple[int, list[str]]] = queue.SimpleQueue()
    for numbered in enumerate(LOTS):
        lots.put(numbered)
    with tempfile.TemporaryFile("w+") as one, tempfile.TemporaryFile("w+") as other:
        workers = [Worker(lots, one), Worker(lots, other)]
        workers[0].start()
        try:
            status = subprocess.call([*PYTEST, *SEVERAL_RANKS])
            workers[1].start()
            for worker in workers:
                worker.join()
        except KeyboardInterrupt:
            status = 130
            for worker in workers:
                worker.end()
                if worker.ident is not None:
                    worker.join()
        for output in (one, other):
            output.seek(0)
            sys.stdout.writelines(output)
    return status or max(worker.status for worker in workers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
