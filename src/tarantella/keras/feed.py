"""Whatever Keras accepts as data, as this rank's parts of the global batches."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from tarantella.data import order, parts
from tarantella.keras import internals
from tarantella.runtime import world

# A dataset that is used again goes on with its sequence of shuffles, as in Keras.
_common: weakref.WeakKeyDictionary[tf.data.Dataset, tf.data.Dataset] = weakref.WeakKeyDictionary()


class Feed(internals.DataAdapter):
    """A Keras data adapter of this rank's parts of the batches of another one."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        with order.common_seed():
            dataset = adapter.get_tf_dataset()
        self._dataset = parts.distribute(dataset, world.get_rank(), world.get_size())

    @classmethod
    def of(cls, x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Feed:
        """The feed of what was passed to `fit`, `evaluate` or `predict`."""
        if isinstance(x, Feed):
            return x
        if isinstance(x, tf.data.Dataset):
            x = _in_common_order(x)
            options.pop("shuffle", None)  # not for datasets; Keras would warn that it ignores it
        return cls(internals.data_adapters.get_data_adapter(x, y, sample_weight, **options))

    @property
    def spec(self) -> Any:
        """The structure of the data of one part."""
        return self._dataset.element_spec.data

    def get_tf_dataset(self) -> tf.data.Dataset:
        return self._dataset

    @property
    def num_batches(self) -> int | None:
        return self._adapter.num_batches

    @property
    def batch_size(self) -> int | None:
        return self._adapter.batch_size

    @property
    def has_partial_batch(self) -> bool | None:
        return self._adapter.has_partial_batch

    @property
    def partial_batch_size(self) -> int | None:
        return self._adapter.partial_batch_size

    def on_epoch_begin(self) -> None:
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._adapter.on_epoch_end()


def _in_common_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    if dataset not in _common:
        common = order.with_common_order(dataset)
        if common is dataset:  # to keep it here would keep it for ever
            return dataset
        _common[dataset] = common
    return _common[dataset]
