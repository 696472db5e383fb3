"""Every process of ours, on any host, is started with this file: `python entry.py MODULE ...`.

Importing Tarantella starts MPI and loads TensorFlow, and only the user's script should do that. So
this loads `tarantella.MODULE` with an empty stand-in for the package, and removes everything from
the import system again before it calls the `main` of the module.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).absolute().parent


def main(name: str, arguments: list[str]) -> int:
    if sys.path and Path(sys.path[0]) == _FOLDER:
        del sys.path[0]  # Python has put it there, and the user's script must not see it
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
