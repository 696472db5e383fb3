"""Files that all ranks ask Keras for at the same time.

A script runs on all ranks, so all of them download the same dataset into the same cache, and make
the same folder for a checkpoint. Keras expects to be the only process there.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tarantella.keras import hooks
from tarantella.keras.hooks import Handler


def install() -> None:
    """Makes Keras share its files with the other ranks; does nothing the second time."""
    hooks.handle_always({hooks.GET_FILE: _get_file, hooks.MAKE_FOLDERS: _makedirs})


def _get_file(get_file: Handler, *args: Any, **kwargs: Any) -> Any:
    """Lets one rank download a file; the others find it in the cache."""
    with _lock():
        return get_file(*args, **kwargs)


def _makedirs(makedirs: Handler, path: Any) -> Any:
    """Makes a folder that another rank may just have made."""
    try:
        return makedirs(path)
    except FileExistsError:
        if not Path(path).is_dir():
            raise
    return None


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
    except OSError:  # not writeable, or a file system without locks: lock on this host only
        return _locked(Path(tempfile.gettempdir(), f"tarantella-{os.getuid()}.lock"))


def _locked(path: Path) -> IO[bytes]:
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        file.close()
        raise
    return file
