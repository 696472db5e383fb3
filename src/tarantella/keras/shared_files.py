"""Files that every rank asks Keras for at the same time.

A script runs on all ranks, so all of them download the same dataset into the same cache, and make
the same folder for a checkpoint. Keras expects to be alone there.
"""

from __future__ import annotations

import fcntl
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tarantella.internals import keras as internals


def install() -> None:
    """Has Keras share its files with the other ranks; does nothing the second time."""
    internals.wrap_function("get_file", _one_after_the_other)
    internals.wrap_function("makedirs", _if_it_is_not_there)


def _one_after_the_other(get_file: Callable[..., Any]) -> Callable[..., Any]:
    """Lets one rank download a file; the others find it in the cache."""

    @functools.wraps(get_file)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with _lock():
            return get_file(*args, **kwargs)

    return locked


def _if_it_is_not_there(makedirs: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a folder that another rank may just have made."""

    @functools.wraps(makedirs)
    def tolerant(path: Any) -> Any:
        try:
            return makedirs(path)
        except FileExistsError:
            if not Path(path).is_dir():
                raise
        return None

    return tolerant


@contextmanager
def _lock() -> Iterator[None]:
    with _locked_file():  # closing it unlocks it, as does the end of the process
        yield


def _locked_file() -> IO[bytes]:
    """A locked file that ranks on all hosts share if they share Keras's cache."""
    folder = Path(os.environ.get("KERAS_HOME") or "~/.keras").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _locked(folder / ".tarantella.lock")
    except OSError:  # it cannot be written, or its file system knows no locks: one of the host
        return _locked(Path(tempfile.gettempdir(), f"tarantella-{os.getuid()}.lock"))


def _locked(path: Path) -> IO[bytes]:
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        file.close()
        raise
    return file
