"""The file that our processes on any host are started with: `python entry.py MODULE ...`.

Importing Tarantella starts MPI and loads TensorFlow, which is for the user's script to do, when
it comes to that line. So this loads `tarantella.MODULE` with an empty stand-in in the place of
the package, and takes all of it out of the import system again before it runs.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).absolute().parent


def main(name: str, arguments: list[str]) -> int:
    if sys.path and Path(sys.path[0]) == _FOLDER:
        del sys.path[0]  # put there by Python, and of no use to the user's script
    stand_in = ModuleType("tarantella")
    stand_in.__path__ = [str(_FOLDER.parent)]
    sys.modules["tarantella"] = stand_in
    module = import_module(f"tarantella.{name}")
    for loaded in [each for each in sys.modules if each.partition(".")[0] == "tarantella"]:
        del sys.modules[loaded]
    status: int = module.main(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
