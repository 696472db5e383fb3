"""The file that the processes of a rank are started with: `python entry.py ROLE ...`.

Importing Tarantella starts MPI and loads TensorFlow, which is for the user's script to do, when
it comes to that line. So this loads `tarantella.runtime.ROLE` with empty stand-ins in the place of
the packages around it, and takes all of it out of the import system again before it runs.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

_RUNTIME = Path(__file__).absolute().parent


def main(role: str, arguments: list[str]) -> int:
    if sys.path and Path(sys.path[0]) == _RUNTIME:
        del sys.path[0]  # put there by Python, and of no use to the user's script
    for name, folder in (("tarantella", _RUNTIME.parent), ("tarantella.runtime", _RUNTIME)):
        stand_in = ModuleType(name)
        stand_in.__path__ = [str(folder)]
        sys.modules[name] = stand_in
    module = import_module(f"tarantella.runtime.{role}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "tarantella"]:
        del sys.modules[name]
    status: int = module.main(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
