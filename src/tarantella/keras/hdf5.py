"""HDF5 files on a disk that may be full.

The HDF5 library does not survive a write that fails: it keeps what it could not write, tries again
when it is asked for something else, and crashes. So it is given files that never fail. What
happened is raised when it is done with them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import h5py

from tarantella.internals import keras as internals


class _Disk(io.RawIOBase):
    """A file that goes on in memory when the disk does not take any more."""

    def __init__(self, path: Path, mode: str, problems: list[OSError]) -> None:
        self._path = path
        self._problems = problems
        self._file: IO[Any] = path.open(mode)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)

    def write(self, data: Any) -> int:
        return int(self._try(lambda file: file.write(data)))

    def truncate(self, size: int | None = None) -> int:
        return int(self._try(lambda file: file.truncate(size)))

    def flush(self) -> None:
        if not self.closed:
            self._try(lambda file: file.flush())

    def close(self) -> None:
        super().close()
        self._file.close()

    def _try(self, action: Callable[[IO[Any]], Any]) -> Any:
        place = self._file.tell()
        try:
            return action(self._file)
        except OSError as error:
            self._problems.append(OSError(error.errno, error.strerror, str(self._path)))
            self._file.close()
            self._file = io.BytesIO(self._path.read_bytes())
            self._file.seek(place)
            return action(self._file)


@contextmanager
def checked_writes() -> Iterator[None]:
    """While it lasts, HDF5 files that cannot be written raise an error, and do no other harm.

    Raises:
        OSError: At the end, if one could not be written.
    """
    problems: list[OSError] = []

    class File(h5py.File):
        """As that of h5py, but for how it writes."""

        _disk: _Disk | None = None
        _path = ""

        def __init__(self, name: Any, mode: str = "r", **options: Any) -> None:
            if mode in ("w", "a") and isinstance(name, (str, Path)):
                begin = "r+b" if mode == "a" and Path(name).exists() else "w+b"
                self._disk, self._path = _Disk(Path(name), begin, problems), str(name)
                name = self._disk
            super().__init__(name, mode, **options)

        @property
        def filename(self) -> str:
            return self._path or str(super().filename)

        def close(self) -> None:
            super().close()
            if self._disk is not None:
                self._disk.close()

    try:
        with internals.replaced([(h5py, "File", File)]):
            yield
    finally:
        if problems:
            raise problems[0]
