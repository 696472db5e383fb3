"""Which engine sums what: the one place that decides how tensors are summed over the ranks."""

from __future__ import annotations

from tarantella.graph.channel import Channel
from tarantella.graph.overlapped import OverlappedChannel
from tarantella.runtime import world


def channel(purpose: str) -> Channel:
    """What tensors are summed by in the graph that is being made.

    On one host, a sum is work for the cores that compute, and the shortest way is the best one.
    Between hosts, gradients are summed while others are still being computed.

    Args:
        purpose: One of `world.PURPOSES`.
    """
    if purpose == "gradients" and world.has_several_hosts():
        return OverlappedChannel("gradients", "sparse gradients")
    return Channel(purpose)
