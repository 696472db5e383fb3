"""The fusion threshold that costs least: gradients up to which size share a message.

A message costs time whatever its size: a call from TensorFlow into Python, a wait for the slowest
rank, the latency of a network. A tensor that shares a message is copied. What is best follows from
the sizes of a model's gradients and from the number of hosts, and is found without measuring: so
all ranks, and all runs, choose the same one and round alike.
"""

from __future__ import annotations

import math
from functools import lru_cache

from tarantella.comm.buckets import TensorSpec, fuse

# On the machine of docs/performance.md, in seconds. Only their ratios matter, and not much: halving
# or doubling one of them costs less than 2 % of a step.
_CALL = 100e-6  # for a message on one host
_ROUND = 60e-6  # more on a network, for each of the rounds that all hosts need to add up
_COPY = 0.4e-9  # for a byte that is copied where its message is put together
_THRESHOLDS = tuple(1024 << power for power in range(4, 14))  # 16 kB to 8 MB


@lru_cache
def best_threshold(specs: tuple[TensorSpec, ...], hosts: int) -> int:
    """The threshold, in bytes, for tensors that are summed together in each step.

    Args:
        specs: The tensors.
        hosts: How many hosts the ranks are on.
    """
    message = _CALL + _ROUND * math.ceil(math.log2(hosts))

    def cost(threshold: int) -> float:
        buckets = fuse(specs, threshold)
        copied = sum(bucket.nbytes for bucket in buckets if len(bucket.members) > 1)
        return len(buckets) * message + copied * _COPY

    return min(_THRESHOLDS, key=cost)
