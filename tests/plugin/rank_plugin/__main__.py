"""One rank of a group: `mpiexec -n N python rank_plugin/__main__.py PLAN`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

    from rank_plugin.worker import main

    main(Path(sys.argv[1]))
