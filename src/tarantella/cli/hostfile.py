"""The hosts of a run from a file: one name per line, comments and blank lines allowed."""

from __future__ import annotations

import re
from pathlib import Path

from tarantella.errors import InputError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")


def is_host_name(name: str) -> bool:
    """Whether a host can have this name."""
    return _NAME.fullmatch(name) is not None


def read_hostfile(path: str) -> tuple[str, ...]:
    """The names in a file, in order; an InputError says what is wrong with it."""
    if not path:
        raise InputError("--hostfile needs the path of a file with one host name per line.")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"There is no hostfile {path}: check its path.") from None
    except UnicodeDecodeError:
        raise InputError(
            f"The hostfile {path} is not a text file: write one host name per line."
        ) from None
    except OSError as error:
        raise InputError(f"The hostfile {path} cannot be read: {error.strerror}.") from None
    lines: dict[str, int] = {}
    names: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        name = line.partition("#")[0].strip()
        if not name:
            continue
        if not is_host_name(name):
            raise InputError(
                f"Line {number} of the hostfile {path} is {name!r}, which is not a host name: "
                "write one name per line; --n-per-node sets the number of ranks on each."
            )
        if name.lower() in lines:
            raise InputError(
                f"The hostfile {path} names the host {name} twice, on lines "
                f"{lines[name.lower()]} and {number}: name each host once; --n-per-node sets the "
                "number of ranks on each."
            )
        lines[name.lower()] = number
        names.append(name)
    if not names:
        raise InputError(f"The hostfile {path} names no host: write one name per line.")
    return tuple(names)
