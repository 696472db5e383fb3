"""This rank's micro-batches, cut out of finished batches: always right, for any dataset.

Every rank prepares the whole batch for that. `split` avoids it where it can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella.data import micro_batch, pipeline
from tarantella.data.micro_batch import MicroBatch
from tarantella.data.padding import Padding
from tarantella.internals.tensorflow import map_inline

_NO_FINGERPRINT = np.int64(0)

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Split:
    """This rank's micro-batches of the batches of a dataset.

    Attributes:
        micro_batches: A dataset of `MicroBatch`es.
        padding: How to pad each micro-batch to the longest sample of its batch.
        finish: What to do with the data of a micro-batch once it is padded.
        unused: Iterations over it that have ended, and can be used again.
    """

    micro_batches: tf.data.Dataset
    padding: Padding | None = None
    finish: Change | None = None
    unused: list[Any] = field(default_factory=list)


def cut(dataset: tf.data.Dataset, rank: int, size: int, fingerprinted: bool = True) -> Split:
    """The micro-batches of `rank`, each taken out of a batch when that is made.

    Args:
        dataset: The dataset.
        rank: The number of the rank.
        size: How many ranks there are.
        fingerprinted: Whether micro-batches get a fingerprint of their batch, which is to be the
            same on all ranks.
    """

    @tf.autograph.experimental.do_not_convert
    def micro_batch_of(*arguments: Any) -> MicroBatch:
        batch = pipeline.as_one(arguments, dataset.element_spec)
        return micro_batch.cut(batch, rank, size)._replace(
            fingerprint=(
                micro_batch.fingerprint_of_first_sample(batch) if fingerprinted else _NO_FINGERPRINT
            )
        )

    return Split(map_inline(dataset, micro_batch_of))
