"""The file of a report: written at the start of a run, at times during it, and at its end."""

from __future__ import annotations

import errno
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tarantella.cli.report.page import page
from tarantella.cli.run_record import RunRecord
from tarantella.errors import InputError
from tarantella.runtime import times
from tarantella.runtime.atomic_write import atomic_write


class ReportFile:
    """Writes what is known about a run to a file, of which readers always find a whole version.

    Args:
        path: the name of the file
        record: the run
        warn: shows a warning

    Raises:
        InputError: Plotly is not installed.
    """

    def __init__(self, path: str, record: RunRecord, warn: Callable[[str], None]) -> None:
        self._path = path
        self._record = record
        self._warn = warn
        self._plotly = _plotly()
        self._is_written = self._has_warned = False
        self._began = time.monotonic()
        self._due = self._began

    def check(self) -> None:
        """Raises an InputError if it could not be written, and writes nothing."""
        target = Path(os.path.realpath(self._path))
        try:
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            tempfile.TemporaryFile(dir=target.parent).close()
        except OSError as error:
            raise self._refusal(error) from None

    def update(self) -> None:
        """Write it again, if it is time to."""
        if time.monotonic() >= self._due:
            self.write()

    def finish(self) -> None:
        """Write it for the last time, if the run has got as far as that."""
        if self._is_written:
            self.write()

    def write(self) -> None:
        """Write it now. The first time an InputError if that is not possible, and then a warning.

        A run that has started is worth more than its report, whatever is wrong with that.
        """
        try:
            self._write()
        except Exception as error:
            reason = error.strerror if isinstance(error, OSError) else repr(error)
            if not self._is_written and isinstance(error, OSError):
                raise self._refusal(error) from None
            if not self._is_written:
                raise
            if not self._has_warned:
                self._has_warned = True
                self._warn(
                    f"The report {self._path} cannot be written ({reason}): the run continues, and "
                    "the report may stay as it is."
                )
        self._is_written = True

    def _refusal(self, error: OSError) -> InputError:
        return InputError(
            f"--report {self._path} cannot be written ({error.strerror}): name a file in a folder "
            "that you can write to."
        )

    def _write(self) -> None:
        start = time.monotonic()
        try:
            with atomic_write(self._path) as unfinished, Path(unfinished).open("wb") as file:
                for part in page(self._record, self._plotly):
                    file.write(part)
        finally:
            end = time.monotonic()
            self._due = end + max(
                times.SHORTEST_TIME_BETWEEN_PAGES,
                min(
                    times.PART_OF_AGE_BETWEEN_PAGES * (end - self._began),
                    times.LONGEST_TIME_BETWEEN_PAGES,
                ),
                times.WRITINGS_BETWEEN_PAGES * (end - start),
            )


def _plotly() -> bytes:
    """The JavaScript that draws the figures."""
    if importlib.util.find_spec("plotly") is None:
        raise InputError(
            "--report needs Plotly, which is not installed: install it with `pip install plotly`."
        )
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().encode()
