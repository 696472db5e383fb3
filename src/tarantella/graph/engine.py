"""The engine of sums: the one place that chooses how values are summed over the ranks.

Gradients, metrics, losses, the state of layers and batch statistics all get their channel here. A
new engine is a subclass of `Channel` in a file of its own, and a line in `channel`.
"""

from __future__ import annotations

from tarantella.graph.channel import Channel
from tarantella.graph.host_channel import HostChannel
from tarantella.graph.overlapped import OverlappedChannel
from tarantella.runtime import world


def channel(purpose: str) -> Channel:
    """What sums are taken with.

    Args:
        purpose: One of `world.PURPOSES`, as in "gradients".
    """
    # On one host, a sum is work for the cores that compute, and the shortest way is the best one.
    if purpose == "gradients" and world.has_several_hosts():
        return OverlappedChannel("gradients", "sparse gradients")
    return HostChannel(purpose)
