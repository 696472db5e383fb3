"""The file of a module, found without importing anything. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def module_file(name: str, folders: Sequence[str]) -> str:
    """The file that `python -m` runs for a module in one of these folders; empty if there is none.

    Unlike `importlib.util.find_spec`, this does not import the packages around the module.
    """
    for folder in folders:
        base = Path(folder, *name.split(".")).absolute()
        for file in (base / "__main__.py", base.with_name(f"{base.name}.py")):
            if is_file(file):
                return str(file)
    return ""


def is_file(path: Path) -> bool:
    """Whether there is such a file; False for a name that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False
