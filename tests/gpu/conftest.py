from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "ranks"))  # for plain Keras as the judge

from fixtures import float64, no_time_to_fail, unseeded  # noqa: F401
