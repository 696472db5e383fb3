"""Datasets for custom training loops on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import tensorflow as tf

from tarantella.data import share
from tarantella.data.comparison import Taken, is_due
from tarantella.data.micro_batch import fingerprint_of
from tarantella.data.on_device import micro_batch_of
from tarantella.errors import InputError
from tarantella.graph.phases import end_phase
from tarantella.keras.adapter import RankDataAdapter
from tarantella.runtime import watch, world
from tarantella.runtime.meter import INPUT, METER


def distribute_dataset(dataset: Any, tnt_micro_batch_size: int | None = None) -> DistributedDataset:
    """Returns this rank's micro-batches of the global batches, for a custom training loop.

    Every rank iterates over the result in a Python loop, and takes as many steps as the dataset
    has batches. The sizes of the ranks' micro-batches differ by at most one. If a batch has fewer
    samples than there are ranks, a rank without a sample gets one that does not count.

    A `tnt.keras.optimizers.Optimizer` uses the share of the batch that was handed out last: take
    one step with each batch, and do not collect batches for later.

    Args:
        dataset (tf.data.Dataset): Batches of the global size, the same on all ranks; other
            batches that `fit` takes will do as well.
        tnt_micro_batch_size: How many samples of each batch a rank gets, as in `fit`.

    Returns:
        A `DistributedDataset`. Its `share` is this rank's share of the batch handed out last: a
        mean over the micro-batch, multiplied by the share and summed over the ranks, is the mean
        over the global batch.

    Example:

    ```python
    import keras
    import tensorflow as tf
    import tarantella as tnt

    x, y = tf.random.stateless_normal((100, 4), seed=(1, 2)), tf.ones((100, 1))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(100).batch(16)
    model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    optimizer = tnt.keras.optimizers.Optimizer(keras.optimizers.SGD(0.1))
    loss_function = keras.losses.MeanSquaredError()

    batches = tnt.distribute_dataset(dataset)
    for epoch in range(2):
        for x, y in batches:
            with tf.GradientTape() as tape:
                loss = loss_function(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            global_loss = tnt.allreduce(float(loss) * batches.share)
    ```
    """
    if isinstance(dataset, DistributedDataset):
        raise InputError(
            "The dataset is distributed already: use it as it is, or pass the dataset that it "
            "was made from."
        )
    return DistributedDataset(dataset, tnt_micro_batch_size)


def undistributed(x: Any, micro_batch_size: int | None) -> tuple[Any, int | None]:
    """The data that `fit` is to distribute itself, and the micro-batch size stated for them."""
    if isinstance(x, DistributedDataset):
        return x.dataset, x.micro_batch_size
    return x, micro_batch_size


class DistributedDataset:
    """The result of `tnt.distribute_dataset`: an iterable over this rank's micro-batches.

    Attributes:
        dataset: The dataset that it was made from.
        micro_batch_size: How many samples of each batch a rank gets, if that was stated.
    """

    def __init__(self, dataset: Any, micro_batch_size: int | None = None) -> None:
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self._counts = (1, world.get_size())
        if not self._is_plain:
            _ = self._adapter  # errors in the dataset are reported here, not in the loop

    @cached_property
    def _adapter(self) -> RankDataAdapter:
        """The micro-batches, as `fit` takes them."""
        if self.micro_batch_size is None:
            return RankDataAdapter.of(self.dataset)
        return RankDataAdapter.of(self.dataset, micro_batch_size=self.micro_batch_size)

    @property
    def share(self) -> float:
        """The fraction of the samples that are this rank's, in the batch handed out last."""
        return share.share_of(*self._counts)

    @property
    def element_spec(self) -> Any:
        """The structure of this rank's elements, made of `tf.TypeSpec` objects."""
        return self.dataset.element_spec if self._is_plain else self._adapter.spec

    def cardinality(self) -> int:
        """The number of batches, or `tf.data.INFINITE_CARDINALITY`, `UNKNOWN_CARDINALITY`."""
        if self._is_plain:
            return int(self.dataset.cardinality())
        if self._adapter.num_batches is not None:
            return int(self._adapter.num_batches)
        known = self.dataset.cardinality() if isinstance(self.dataset, tf.data.Dataset) else None
        infinite = tf.data.INFINITE_CARDINALITY
        return int(infinite if known == infinite else tf.data.UNKNOWN_CARDINALITY)

    def __len__(self) -> int:
        batches = self.cardinality()
        if batches < 0:
            problem = "infinite" if batches == tf.data.INFINITE_CARDINALITY else "not known"
            raise TypeError(f"The number of batches of this dataset is {problem}.")
        return batches

    def __iter__(self) -> Iterator[Any]:
        if not tf.executing_eagerly():
            raise InputError(
                "A distributed dataset cannot be iterated over inside a tf.function: write the "
                "loop outside, and decorate the function that takes one step."
            )
        return iter(self.dataset) if self._is_plain else self._iterate()

    def _iterate(self) -> Iterator[Any]:
        comparison, taken = self._adapter.comparison, Taken()
        with share.loop() as outer, METER.part(INPUT):
            self._adapter.on_epoch_begin()
            try:
                for step, element in enumerate(self._adapter.get_tf_dataset(), 1):
                    watch.note_step(step)
                    micro_batch = micro_batch_of(element)
                    self._counts = (int(micro_batch.count), int(micro_batch.total))
                    if comparison is not None:
                        taken = taken.plus(*self._counts, int(fingerprint_of(micro_batch)))
                        if is_due(step):
                            comparison.compare(taken)
                    METER.note_input()
                    METER.note_step(int(micro_batch.count))
                    share.set_current(*self._counts)
                    end_phase("input", micro_batch.data)
                    yield _without_optionals(micro_batch.data)
                    METER.next_input()
                if comparison is not None and not is_due(taken.steps):
                    comparison.compare(taken)
                # Back to the batch of a loop around this one. A step on the last batch may follow
                # a loop that is left before its end.
                share.set_current(*outer)
            finally:
                self._adapter.on_epoch_end()

    @property
    def _is_plain(self) -> bool:
        """Whether the dataset's own batches can be handed out as they are."""
        alone = world.get_size() == 1 and self.micro_batch_size is None
        return alone and isinstance(self.dataset, tf.data.Dataset)


def _without_optionals(data: Any) -> Any:
    """Keras's data adapters write None as an optional value."""
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )
