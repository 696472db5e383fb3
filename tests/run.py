"""Runs all tests: those on ranks, and beside them the others, which keep the cores busy.

With arguments, it runs pytest with them, and nothing beside it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence

PYTEST = [sys.executable, "-m", "pytest"]
BESIDE = ["-m", "not ranks", "-o", "cache_dir=.pytest_cache/beside"]


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: that of the tests on ranks, if it is not 0, or of the others."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments])
    with tempfile.TemporaryFile("w+") as output:
        others = subprocess.Popen([*PYTEST, *BESIDE], stdout=output, stderr=subprocess.STDOUT)
        try:
            status = subprocess.call([*PYTEST, "-m", "ranks"])
            status = status or others.wait()
        finally:
            others.terminate()
            others.wait()
            output.seek(0)
            sys.stdout.writelines(output)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
