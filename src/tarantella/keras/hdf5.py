"""HDF5 files on a disk that may be full.

The HDF5 library does not survive a write that fails: it keeps the data, tries again later and
crashes, or h5py only prints the error. So Keras saves into files that never fail. The error is
raised when Keras is done.

Keras gets such files in place of `h5py.File` while `tnt.Model` saves in this thread. `h5py` itself
stays as it is.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

import h5py

from tarantella.internals import keras as internals

_problems: ContextVar[list[OSError] | None] = ContextVar("problems", default=None)


@contextmanager
def checked_writes() -> Iterator[None]:
    """Makes HDF5 files that Keras cannot write raise an error, and do no other harm.

    Raises:
        OSError: At the end, if one could not be written.
    """
    internals.install_hdf5_files(_file_class)
    problems: list[OSError] = []
    token = _problems.set(problems)
    try:
        yield
    finally:
        _problems.reset(token)
        if problems:
            raise problems[0]


def _file_class() -> type[h5py.File]:
    return h5py.File if _problems.get() is None else _CheckedFile


class _CheckedFile(h5py.File):
    """An `h5py.File` that notes in `_problems` what it could not write."""

    _disk: _Disk | None = None
    _path = ""

    def __init__(self, name: Any, mode: str = "r", **options: Any) -> None:
        problems = _problems.get()
        if problems is not None and mode in ("w", "a") and isinstance(name, (str, Path)):
            opened = "r+b" if mode == "a" and Path(name).exists() else "w+b"
            self._disk, self._path = _Disk(Path(name), opened, problems), str(name)
            name = self._disk
        super().__init__(name, mode, **options)

    @property
    def filename(self) -> str:
        return self._path or str(super().filename)

    def close(self) -> None:
        super().close()
        if self._disk is not None:
            self._disk.close()


class _Disk(io.RawIOBase):
    """A file that continues in memory when the disk does not take any more.

    Args:
        path: The path.
        mode: The mode to open it with.
        problems: Gets the error when writing fails.
    """

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
        position = self._file.tell()
        try:
            return action(self._file)
        except OSError as error:
            self._problems.append(OSError(error.errno, error.strerror, str(self._path)))
            self._file.close()
            self._file = io.BytesIO(self._path.read_bytes())
            self._file.seek(position)
            return action(self._file)
