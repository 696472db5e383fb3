"""Files and folders that appear under their name whole, or not at all.

They are written in a folder next to it, and then renamed. A reader, even after a killed process,
finds the old version or the new one. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MARK = ".saving-"
_REPLACED = "replaced"

# From the C library's headers.
_FROM_HERE = -100
_RENAME_EXCHANGE = 2


@contextmanager
def atomic_write(path: str | Path, writer: int = 0, alone: bool = True) -> Iterator[Path]:
    """Gives a path to write to; what is there at the end replaces `path`.

    Files that were written next to it, such as the parts of a large one, are put next to `path`
    first. A folder replaces another one; if that holds files of other names, it keeps them, and
    the new ones are put there one by one.

    Args:
        path: The file or folder; the folder it is in must exist.
        writer: A number of this process's own, if others write `path` at the same time.
        alone: Whether no other does. What killed processes left is then removed, too.

    Raises:
        OSError: What writing raises, with `path` in place of the name that was written to.

    Example:
        >>> with atomic_write("model.json") as unfinished:
        ...     unfinished.write_text("{}")
    """
    target = Path(os.path.realpath(path))  # what a link points to, not the link
    folder = target.parent / f".{target.name}{_MARK}{writer}"
    try:
        for leftover in _leftovers(target) if alone else [folder]:
            _remove(leftover, target)
        folder.mkdir(0o700)
        try:
            yield folder / target.name
            _publish(folder, target)
        finally:
            _remove(folder, target)
    except Exception as error:
        # The user need not know where it was really written.
        raise _renamed(error, folder, str(path)) from error.__cause__


def recover(path: str | Path) -> None:
    """Restores what a killed process had moved away to replace it."""
    target = Path(os.path.realpath(path))
    if not target.exists() and target.parent.exists():
        for leftover in _leftovers(target):
            _remove(leftover, target)


def _renamed(error: Exception, folder: Path, path: str) -> Exception:
    """The error, with `path` in place of names in `folder`."""
    if isinstance(error, OSError) and str(error.filename).startswith(str(folder)):
        return OSError(error.errno, error.strerror, path)

    def rename(value: object) -> object:
        return (
            value.replace(f"{folder / Path(path).name}", path) if isinstance(value, str) else value
        )

    error.args = tuple(map(rename, error.args))
    if isinstance(error, OSError) and error.strerror is not None:
        error.strerror = str(rename(error.strerror))
    return error


def _leftovers(target: Path) -> list[Path]:
    start = f".{target.name}{_MARK}"
    return [path for path in target.parent.iterdir() if path.name.startswith(start)]


def _remove(folder: Path, target: Path) -> None:
    """Removes what was written, but first puts back what it was to replace, if that is gone."""
    if (folder / _REPLACED).exists() and not target.exists():
        (folder / _REPLACED).rename(target)
    shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, target: Path) -> None:
    # The file that was asked for comes last: it may name the others.
    written = sorted(folder.iterdir(), key=lambda path: (path.stem == target.stem, path.name))
    _flush(written)
    for new in written:
        _replace(new, target.with_name(new.name), folder / _REPLACED)
    with suppress(OSError):  # not every file system can
        _flush([target.parent], below=False)


def _replace(new: Path, target: Path, old: Path) -> None:
    if not new.is_dir() or target.is_file():
        with suppress(FileNotFoundError):
            shutil.copymode(target, new)
        new.replace(target)
    elif _names(target) <= _names(new):
        _replace_folder(new, target, old)
    else:
        for entry in sorted(new.iterdir()):
            _replace(entry, target / entry.name, old)


def _replace_folder(new: Path, target: Path, old: Path) -> None:
    """Replaces a folder with another, as other writers may do at the same time."""
    while not (target.exists() and _exchange(new, target)):
        # Where folders cannot be exchanged, there is none for a moment.
        with suppress(FileNotFoundError):
            target.rename(old)
        try:
            new.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
        finally:
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps the two names atomically; returns whether the operating and file systems allow it."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except AttributeError:  # not Linux, or an old one
        return False
    names = os.fsencode(one), os.fsencode(other)
    status: int = rename(_FROM_HERE, names[0], _FROM_HERE, names[1], _RENAME_EXCHANGE)
    return status == 0


def _names(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return set()


def _flush(paths: Iterable[Path], below: bool = True) -> None:
    """Makes the system write to disk what it still keeps in memory."""
    for path in paths:
        if path.is_dir() and below:
            _flush(path.iterdir())
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
