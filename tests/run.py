"""Runs all tests: those on several ranks, and beside them the others, on cores that are free.

With arguments, it runs pytest with them, and nothing beside it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO

PYTEST = [sys.executable, "-m", "pytest"]
SEVERAL_RANKS = ["-m", "ranks", "-k", "not 1-ranks"]
BESIDE = [["-m", "not ranks"], ["-m", "ranks", "-k", "1-ranks"]]


class Beside(threading.Thread):
    """Runs tests one lot after the other, and keeps what they print."""

    def __init__(self, output: IO[str]) -> None:
        super().__init__()
        self._output = output
        self._process: subprocess.Popen[str] | None = None
        self._ended = False
        self.status = 0

    def run(self) -> None:
        for lot in BESIDE:
            if self._ended:
                return
            command = [*PYTEST, *lot, "-o", "cache_dir=.pytest_cache/beside"]
            self._process = subprocess.Popen(
                command, stdout=self._output, stderr=subprocess.STDOUT, text=True
            )
            self.status = self._process.wait() or self.status

    def end(self) -> None:
        """Does not wait for the rest."""
        self._ended = True
        if self._process is not None:
            self._process.terminate()


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: that of the tests on ranks, if it is not 0, or of the others."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments])
    with tempfile.TemporaryFile("w+") as output:
        beside = Beside(output)
        beside.start()
        try:
            status = subprocess.call([*PYTEST, *SEVERAL_RANKS])
            beside.join()
        except KeyboardInterrupt:
            status = 130
            beside.end()
            beside.join()
        output.seek(0)
        sys.stdout.writelines(output)
    return status or beside.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
