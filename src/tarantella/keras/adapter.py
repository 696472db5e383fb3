"""Whatever Keras accepts as data, as this rank's parts of the global batches."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella.comm import collectives
from tarantella.comm.agreement import check_same
from tarantella.data import arrays, micro_batch, order, randomness
from tarantella.data.batch_size import find_batch_size, is_unbatched, may_be_batched
from tarantella.data.cut import Split, cut
from tarantella.data.epochs import Epochs
from tarantella.data.micro_batch import MicroBatch
from tarantella.data.split import split
from tarantella.data.step_agreement import AgreedSteps, warn_of_different_data
from tarantella.errors import InputError
from tarantella.internals import keras as internals
from tarantella.internals.tensorflow import own_graph
from tarantella.keras import arguments
from tarantella.runtime import world

# What TensorFlow says where a model looks for a row that another rank has.
_MISSING_ROW = re.compile(r"slice index -?\d+ of dimension 0 out of bounds")


class RankDataAdapter(internals.DataAdapter):
    """A Keras data adapter of this rank's parts of the batches of another one.

    Args:
        adapter: Keras's adapter of the data.
        own: This rank's parts.
        own_data: Whether the data are this rank's own, and not the same on all ranks.
        steps_per_epoch: How many steps an epoch has, if that was stated.

    Attributes:
        steps_per_epoch: The same for Keras; None where an epoch is a pass over the feed.
    """

    def __init__(
        self, adapter: Any, own: Split, own_data: bool = False, steps_per_epoch: int | None = None
    ) -> None:
        self._adapter = adapter
        check_same(_described(own.micro_batches.element_spec.data), "the data")
        self._own = own
        self._in_parts = world.get_size() > 1 and not own_data
        self._uses = 0
        self._steps = own.unused.pop() if own.unused else AgreedSteps(own, own_data)
        self._num_batches = _most(adapter.num_batches) if own_data else adapter.num_batches
        self.steps_per_epoch = steps_per_epoch
        if _goes_on(adapter, steps_per_epoch):
            self._num_batches, self.steps_per_epoch = steps_per_epoch, None
        # In the middle of a pass each rank has read, and drawn, as far ahead as it got.
        between_passes = self.steps_per_epoch is None
        self._draws_alike = internals.draws_in_python(adapter) and between_passes and not own_data

    @classmethod
    @own_graph()
    def of(
        cls,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        micro_batch_size: int | None = None,
        distribute: bool = True,
        purpose: str = "",
        **options: Any,
    ) -> RankDataAdapter:
        """The feed of what was passed to `fit`, `evaluate` or `predict`.

        Args:
            x: The data, in batches of the global size.
            y: Targets.
            sample_weight: Weights.
            micro_batch_size: How many samples of a batch each rank gets.
            distribute: Whether all ranks pass the same data, and each works on its part of
                every batch; otherwise the batches are this rank's own already.
            purpose: As in `in_batches`.
            **options: More arguments of Keras's data adapters.
        """
        if isinstance(x, RankDataAdapter):
            return x
        ranks = world.get_size() if distribute else 1
        x, options = in_batches(x, micro_batch_size, options, ranks, purpose)
        if isinstance(x, tf.data.Dataset):
            return cls._of_dataset(x, y, sample_weight, distribute, options)
        steps = options.get("steps_per_epoch")
        anew = bool(purpose)  # Keras validates with the first batches each time
        if distribute:
            check_same(_kind(x), "the kind of data")
            if not internals.is_arrays(x):
                randomness.share()  # before Keras has a look at the first batches
        with arguments.explained(x=x, y=y, sample_weight=sample_weight):
            adapter = internals.data_adapters.get_data_adapter(x, y, sample_weight, **options)
            if not distribute:
                dataset = _read_in_passes(adapter, steps, anew)
                return cls(adapter, _whole(dataset), own_data=True, steps_per_epoch=steps)
            if internals.is_array_adapter(adapter) and arrays.can_take(
                internals.arrays_of(adapter)
            ):
                return cls(adapter, _rows_of_arrays(adapter), steps_per_epoch=steps)
            with order.common_seed():
                dataset = _read_in_passes(adapter, steps, anew)
            own = cut(dataset, world.get_rank(), world.get_size())
            return cls(adapter, own, steps_per_epoch=steps)

    @classmethod
    def _of_dataset(
        cls,
        dataset: tf.data.Dataset,
        y: Any,
        sample_weight: Any,
        distribute: bool,
        options: dict[str, Any],
    ) -> RankDataAdapter:
        options.pop("shuffle", None)  # not for datasets; Keras would warn that it ignores it
        class_weight = options.pop("class_weight", None)
        adapter = internals.data_adapters.get_data_adapter(dataset, y, sample_weight, **options)
        if is_unbatched(dataset):
            raise InputError(micro_batch.NOT_BATCHED)
        if distribute:
            check_same(_kind(dataset), "the kind of data")
        own = _split_once(dataset) if distribute else _whole(dataset)
        if class_weight is not None:
            own = _with_class_weights(own, class_weight)
        steps = options.get("steps_per_epoch")
        return cls(adapter, own, own_data=not distribute, steps_per_epoch=steps)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Tells what is wrong with the ranks' data in words of ours, not TensorFlow's.

        It is around all use of the feed, `evaluate` within `fit` too. What went well to the end
        can be used for the same data again.
        """
        self._uses += 1
        try:
            with self.explaining_rows():
                yield
        except Exception:
            if self._steps.problem is None:
                raise
            raise self._steps.problem from None
        self._uses -= 1
        if not self._uses:
            self._own.unused.append(self._steps)

    @contextmanager
    def explaining_rows(self) -> Iterator[None]:
        """Tells a model that looks for certain rows of a batch what the rows of a part are."""
        try:
            yield
        except Exception as error:
            if not self._in_parts or not _MISSING_ROW.search(str(error)):
                raise
            raise InputError(
                "The model looks for a row of a batch that this rank does not have. "
                + micro_batch.OTHER_AXIS
            ) from error

    def on_next_step(self, tell: Callable[[int], None]) -> None:
        """Has `tell` called once, with the number of samples of all ranks in the next step."""
        self._steps.on_next_step(tell)

    def begins_anew(self) -> bool:
        """Whether an epoch of it depends on nothing but how often it was begun before."""
        return begins_anew(self._adapter, self.steps_per_epoch)

    @property
    def spec(self) -> Any:
        """The structure of the data of one part."""
        return self._steps.dataset.element_spec.data

    def get_tf_dataset(self) -> tf.data.Dataset:
        return self._steps.dataset

    @property
    def num_batches(self) -> int | None:
        return self._num_batches

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
        if self._draws_alike:
            randomness.share()
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if self._draws_alike:
            randomness.share()
        self._adapter.on_epoch_end()


def begins_anew(adapter: Any, steps_per_epoch: int | None) -> bool:
    """Whether the data of an epoch depend on nothing but how often they were begun before."""
    if steps_per_epoch or adapter.num_batches is None or internals.draws_in_python(adapter):
        return False
    if internals.is_array_adapter(adapter):
        return True
    dataset = adapter.get_tf_dataset()
    return order.restarts_each_pass(dataset)


def split_for_validation(data: Any, fraction: float) -> tuple[Any, Any]:
    """The data to train on and the last part of them, to validate with; as Keras splits them."""
    split_by_keras = internals.array_slicing.train_validation_split
    if not arrays.can_take(data):
        return split_by_keras(data, validation_split=fraction)
    samples = next(leaf for leaf in tf.nest.flatten(data) if leaf is not None).shape[0]
    numbers, _ = split_by_keras(np.arange(samples), validation_split=fraction)
    return arrays.split(data, len(numbers))


def in_batches(
    x: Any, micro_batch_size: int | None, options: dict[str, Any], ranks: int, purpose: str = ""
) -> tuple[Any, dict[str, Any]]:
    """The data and options with the batch size that a micro-batch size asks for.

    Args:
        x: Data as passed to `fit`.
        micro_batch_size: How many samples of a batch each rank is to get; None: not stated.
        options: Arguments for Keras's data adapters, `batch_size` among them.
        ranks: How many ranks share a batch.
        purpose: How the names of such arguments begin: "validation_", or not at all.
    """
    name = f"tnt_{purpose}micro_batch_size"
    batch_size = options.get("batch_size")
    if batch_size is not None:
        _require_size(f"{purpose}batch_size", batch_size)
    if micro_batch_size is None:
        return x, options
    wanted = _require_size(name, micro_batch_size) * ranks
    if isinstance(x, tf.data.Dataset):
        batch_size = find_batch_size(x)
        if batch_size is None and not may_be_batched(x):
            return x.batch(wanted), options
        if batch_size is None:
            raise InputError(
                f"{name} cannot be used with a dataset in batches whose size cannot be told: "
                "leave it out, or make the batches last, all with `dataset.batch(batch_size)`."
            )
    elif not internals.is_arrays(x):
        raise InputError(
            f"{name} cannot be used with a {type(x).__name__}, which comes in "
            "batches already: leave it out, and make the batches of the global size."
        )
    elif batch_size is None:
        return x, {**options, "batch_size": wanted}
    if batch_size != wanted:
        shared = f"{ranks} ranks, each with" if ranks > 1 else "a rank with"
        raise InputError(
            f"{name}={micro_batch_size} contradicts the batch size {batch_size}: "
            f"{shared} {micro_batch_size} samples of a batch, make {wanted}. Leave one of them "
            "out, or make them fit."
        )
    return x, options


def _require_size(name: str, value: Any) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        size = 0
    if size < 1 or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; it must be a whole number of samples, 1 or more.")
    return size


def _split_once(dataset: tf.data.Dataset) -> Split:
    """The parts of a dataset; those of the first time, if it is used again.

    So its shuffles go on with their sequence of orders, as in Keras. The dataset itself keeps
    its parts, which live as long as it does.
    """
    attributes = vars(dataset)
    if "_tnt_split" not in attributes:
        attributes["_tnt_split"] = split(dataset, world.get_rank(), world.get_size())
    own: Split = attributes["_tnt_split"]
    return own


def _whole(dataset: tf.data.Dataset) -> Split:
    """Batches that are all this rank's own."""
    return cut(dataset, rank=0, size=1, fingerprinted=False)


def _goes_on(adapter: Any, steps_per_epoch: int | None) -> bool:
    """Whether data from Python code go on from one epoch to the next, without an end."""
    python = internals.draws_in_python(adapter)
    return python and bool(steps_per_epoch) and adapter.num_batches is None


def _read_in_passes(adapter: Any, steps_per_epoch: int | None, anew: bool) -> tf.data.Dataset:
    """The batches of an adapter, those of an epoch in each pass."""
    if steps_per_epoch is None or not _goes_on(adapter, steps_per_epoch):
        return adapter.get_tf_dataset()
    with internals.read_with(lambda begin: Epochs(begin, steps_per_epoch, anew)):
        return adapter.get_tf_dataset()


def _rows_of_arrays(adapter: Any) -> Split:
    """This rank's rows of arrays, in the order that Keras gives them."""
    rows = arrays.ArrayRows(internals.arrays_of(adapter), keras.config.floatx())
    check_same({"samples": len(rows), "batch_size": int(adapter.batch_size)}, "the arrays")
    _compare_samples(rows)
    with order.common_seed():
        indices = internals.index_adapter(adapter).get_tf_dataset()
    own = cut(indices, world.get_rank(), world.get_size())

    @tf.autograph.experimental.do_not_convert
    def with_rows(part: MicroBatch) -> MicroBatch:
        return part._replace(data=rows.take(part.data))

    return replace(
        own, micro_batches=own.micro_batches.map(with_rows, num_parallel_calls=tf.data.AUTOTUNE)
    )


def _compare_samples(rows: arrays.ArrayRows) -> None:
    """Warns if a few samples show that the ranks' arrays are not the same."""
    if len(rows):
        some = tf.constant([0, len(rows) // 2, len(rows) - 1])
        fingerprints = collectives.allgather(micro_batch.fingerprint(rows.take(some)).numpy())
        if len({int(one) for one in fingerprints}) > 1:
            warn_of_different_data("their arrays have different samples in the same places")


def _with_class_weights(own: Split, class_weight: dict[int, float]) -> Split:
    weigh = internals.class_weight_map(class_weight)
    if own.padding:  # which may change what Keras takes for a class
        return replace(own, finish=lambda data: weigh(*data), unused=[])

    @tf.autograph.experimental.do_not_convert
    def weighted(part: MicroBatch) -> MicroBatch:
        return part._replace(data=weigh(*part.data))

    return Split(own.micro_batches.map(weighted))


def _kind(x: Any) -> str:
    """What must be the same on all ranks before they look at the data together."""
    if isinstance(x, tf.data.Dataset):
        return "a tf.data.Dataset"
    return "arrays" if internals.is_arrays(x) else f"a {type(x).__name__}"


def _described(spec: Any) -> Any:
    """What must be the same on all ranks about the structure of the data."""

    def describe(leaf: Any) -> str:
        shape = getattr(leaf, "shape", None)
        inner = list(shape[1:]) if shape is not None and shape.rank else shape
        return f"{type(leaf).__name__} {getattr(leaf, 'dtype', leaf)} {inner}"

    return tf.nest.map_structure(describe, spec)


def _most(batches: int | None) -> int | None:
    """The largest number of batches that any rank has; None if one does not know."""
    numbers = [int(n) for n in collectives.allgather(np.int64(-1 if batches is None else batches))]
    return None if -1 in numbers else max(numbers)
