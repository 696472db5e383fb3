"""Waiting for the other ranks without taking the core from whoever computes on it.

MPI libraries wait by polling, which is quickest when every rank has a core to spend. Here a
rank waits on the cores on which it, or another rank, is still computing. So ranks meet first,
looking less and less often, and start the collective proper when all are there: then it
takes as long as the data, and polling costs nothing.
"""

from __future__ import annotations

import time
from typing import Any

# How often to look before the first pause: the others are often just about to come.
_LOOKS_AT_ONCE = 50
_SHORTEST_PAUSE = 20e-6
_LONGEST_PAUSE = 1e-3


def meet(communicator: Any) -> None:
    """Returns when every rank has called it."""
    request = communicator.Ibarrier()
    for _ in range(_LOOKS_AT_ONCE):
        if request.Test():
            return
    pause = _SHORTEST_PAUSE
    while not request.Test():
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
