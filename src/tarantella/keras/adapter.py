"""Whatever Keras accepts as data, as this rank's micro-batches of the global batches."""

from __future__ import annotations

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
from tarantella.data.batch_size import is_unbatched
from tarantella.data.comparison import Comparison, complain_of_different_data
from tarantella.data.cut import Split, cut
from tarantella.data.epochs import Epochs
from tarantella.data.micro_batch import MicroBatch
from tarantella.data.on_device import Prefetched
from tarantella.data.split import split
from tarantella.data.step_agreement import AgreedSteps
from tarantella.errors import InputError
from tarantella.internals import keras as internals
from tarantella.internals.tensorflow import MISSING_ROW, own_graph
from tarantella.keras import arguments, hooks
from tarantella.keras.micro_batch_size import in_batches
from tarantella.runtime import world


class RankDataAdapter(internals.DataAdapter):
    """A Keras data adapter of this rank's micro-batches.

    Args:
        adapter: Keras's adapter of the global batches.
        own: This rank's micro-batches.
        own_data: Whether each rank has its own data, instead of the same data as the others.
        steps_per_epoch: How many steps an epoch has, if the user said so.

    Attributes:
        steps_per_epoch: The same for Keras; None if an epoch is one pass over this adapter.
        most_steps: How many steps are taken in all at most, if that is known.
    """

    most_steps: int | None = None

    def __init__(
        self, adapter: Any, own: Split, own_data: bool = False, steps_per_epoch: int | None = None
    ) -> None:
        self._adapter = adapter
        check_same(_described(own.micro_batches.element_spec.data), "the data")
        self._own = own
        self._distributed = world.get_size() > 1 and not own_data
        self._uses = 0
        known = not own_data and _know_number_of_batches(adapter)
        self._steps = own.unused.pop() if own.unused else AgreedSteps(own, own_data, known)
        self._num_batches = _most(adapter.num_batches) if own_data else adapter.num_batches
        self.steps_per_epoch = steps_per_epoch
        if _continues_across_epochs(adapter, steps_per_epoch):
            self._num_batches, self.steps_per_epoch = steps_per_epoch, None
        # Within a pass, each rank reads ahead, and draws random numbers, as far as it gets.
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
        argument_prefix: str = "",
        purpose: str = "data",
        **options: Any,
    ) -> RankDataAdapter:
        """The adapter of what was passed to `fit`, `evaluate` or `predict`.

        Args:
            x: The data, in batches of the global size.
            y: Targets.
            sample_weight: Weights.
            micro_batch_size: How many samples of a batch each rank gets.
            distribute: Whether all ranks pass the same data, and each works on its micro-batch of
                every batch. Otherwise each rank passes its own batches.
            argument_prefix: As in `in_batches`.
            purpose: What the data are for, in words for the user.
            **options: Further arguments of Keras's data adapters.
        """
        if isinstance(x, RankDataAdapter):
            return x
        made = cls._made(
            x, y, sample_weight, micro_batch_size, distribute, argument_prefix, purpose, options
        )
        made._steps.purpose = purpose
        return made

    @classmethod
    def _made(
        cls,
        x: Any,
        y: Any,
        sample_weight: Any,
        micro_batch_size: int | None,
        distribute: bool,
        argument_prefix: str,
        purpose: str,
        options: dict[str, Any],
    ) -> RankDataAdapter:
        ranks = world.get_size() if distribute else 1
        x, options = in_batches(x, micro_batch_size, options, ranks, argument_prefix)
        if isinstance(x, tf.data.Dataset):
            return cls._of_dataset(x, y, sample_weight, distribute, options)
        steps = options.get("steps_per_epoch")
        anew = bool(argument_prefix)  # Keras validates with the first batches each time
        if distribute:
            check_same(_kind(x), "the kind of data")
            if not internals.is_arrays(x):
                randomness.broadcast_from_master()  # before Keras looks at the first batches
        with arguments.explained(x=x, y=y, sample_weight=sample_weight):
            adapter = internals.data_adapters.get_data_adapter(x, y, sample_weight, **options)
            if not distribute:
                dataset = _read_in_passes(adapter, steps, anew)
                return cls(adapter, _whole(dataset), own_data=True, steps_per_epoch=steps)
            if internals.is_array_adapter(adapter) and arrays.can_take(
                internals.arrays_of(adapter)
            ):
                return cls(adapter, _rows_of_arrays(adapter, purpose), steps_per_epoch=steps)
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
        """Raises an error of ours, instead of TensorFlow's, if the ranks' data do not match.

        It wraps all use of the adapter, also for `evaluate` within `fit`. If all goes well,
        the steps can be used for the same data again.
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
        """Explains the error of a model that looks for a row of a batch on another rank."""
        try:
            yield
        except Exception as error:
            if not self._distributed or not MISSING_ROW.search(str(error)):
                raise
            raise InputError(
                "The model looks for a row of a batch that this rank does not have. "
                + micro_batch.OTHER_AXIS
            ) from error

    @property
    def comparison(self) -> Comparison | None:
        """What compares the ranks' data; None if they agree on each step."""
        return self._steps.comparison

    def on_step_size(self, tell: Callable[[int], None]) -> None:
        """Calls `tell` once, with the number of samples that all ranks have in a step."""
        self._steps.on_step_size(tell)

    def restarts_each_epoch(self) -> bool:
        """Whether the data of an epoch depend only on the number of epochs before."""
        return restarts_each_epoch(self._adapter, self.steps_per_epoch)

    @property
    def spec(self) -> Any:
        """The structure of the data of one micro-batch."""
        return self._steps.dataset.element_spec.data

    def get_tf_dataset(self) -> tf.data.Dataset | Prefetched:
        ends_with_data = int(self.steps_per_epoch or -1) < 0
        is_bounded = ends_with_data or self.most_steps is not None
        return self._steps.read_ahead(self.most_steps, to_device=is_bounded)

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
            randomness.broadcast_from_master()
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if self._draws_alike:
            randomness.broadcast_from_master()
        self._adapter.on_epoch_end()


def restarts_each_epoch(adapter: Any, steps_per_epoch: int | None) -> bool:
    """Whether the data of an epoch depend only on the number of epochs before."""
    if steps_per_epoch or adapter.num_batches is None or internals.draws_in_python(adapter):
        return False
    if internals.is_array_adapter(adapter):
        return True
    dataset = adapter.get_tf_dataset()
    return order.restarts_each_pass(dataset)


def split_for_validation(data: Any, fraction: float) -> tuple[Any, Any]:
    """The data to train on, and the last of them to validate with, as Keras splits them."""
    split_by_keras = internals.array_slicing.train_validation_split
    if not arrays.can_take(data):
        return split_by_keras(data, validation_split=fraction)
    samples = next(leaf for leaf in tf.nest.flatten(data) if leaf is not None).shape[0]
    numbers, _ = split_by_keras(np.arange(samples), validation_split=fraction)
    return arrays.split(data, len(numbers))


def _split_once(dataset: tf.data.Dataset) -> Split:
    """This rank's micro-batches of a dataset; the same object if the dataset is used again.

    So its shuffles continue their sequence of orders, as in Keras. The dataset holds the object,
    which lives as long as the dataset does.
    """
    attributes = vars(dataset)
    if "_tnt_split" not in attributes:
        attributes["_tnt_split"] = split(dataset, world.get_rank(), world.get_size())
    own: Split = attributes["_tnt_split"]
    return own


def _whole(dataset: tf.data.Dataset) -> Split:
    """Batches that belong to this rank as a whole."""
    return cut(dataset, rank=0, size=1, fingerprinted=False)


def _continues_across_epochs(adapter: Any, steps_per_epoch: int | None) -> bool:
    """Whether data from Python code continue from one epoch to the next, without an end."""
    python = internals.draws_in_python(adapter)
    return python and bool(steps_per_epoch) and adapter.num_batches is None


def _read_in_passes(adapter: Any, steps_per_epoch: int | None, anew: bool) -> tf.data.Dataset:
    """The batches of an adapter, one epoch in each pass."""
    if steps_per_epoch is None or not _continues_across_epochs(adapter, steps_per_epoch):
        return adapter.get_tf_dataset()
    with hooks.generators_read_with(lambda begin: Epochs(begin, steps_per_epoch, anew)):
        return adapter.get_tf_dataset()


def _rows_of_arrays(adapter: Any, purpose: str) -> Split:
    """This rank's rows of arrays, in the order that Keras gives them."""
    rows = arrays.ArrayRows(internals.arrays_of(adapter), keras.config.floatx())
    check_same({"samples": len(rows), "batch_size": int(adapter.batch_size)}, "the arrays")
    _compare_samples(rows, purpose)
    with order.common_seed():
        indices = internals.index_adapter(adapter).get_tf_dataset()
    own = cut(indices, world.get_rank(), world.get_size())

    @tf.autograph.experimental.do_not_convert
    def with_rows(indices: MicroBatch) -> MicroBatch:
        return indices._replace(data=rows.take(indices.data))

    return replace(
        own, micro_batches=own.micro_batches.map(with_rows, num_parallel_calls=tf.data.AUTOTUNE)
    )


def _compare_samples(rows: arrays.ArrayRows, purpose: str) -> None:
    """Complains if a few samples show that the arrays differ between the ranks."""
    if not len(rows):
        return
    samples = rows.take(tf.constant([0, len(rows) // 2, len(rows) - 1]))
    leaves = keras.tree.flatten_with_path(samples if isinstance(samples, tuple) else (samples,))
    own = np.array([int(micro_batch.fingerprint(leaf)) for _, leaf in leaves])
    for rank, theirs in enumerate(everyones := collectives.allgather(own)):
        if theirs.shape != everyones[0].shape:
            return  # another structure, which is checked elsewhere
        differ = np.flatnonzero(theirs != everyones[0])
        if len(differ):
            names = ", ".join(_argument(leaves[number][0]) for number in differ)
            complain_of_different_data(f"in the {purpose}, ranks 0 and {rank} differ in {names}")
            return


def _argument(path: tuple[Any, ...]) -> str:
    """What a user calls an array of the data, as in `x['image']`."""
    name = ("x", "y", "sample_weight")[path[0]]
    return f"`{name}{''.join(f'[{key!r}]' for key in path[1:])}`"


def _with_class_weights(own: Split, class_weight: dict[int, float]) -> Split:
    weigh = internals.class_weight_map(class_weight)
    if own.padding:  # it may change what Keras takes for a class
        return replace(own, finish=lambda data: weigh(*data), unused=[])

    @tf.autograph.experimental.do_not_convert
    def weighted(plain: MicroBatch) -> MicroBatch:
        return plain._replace(data=weigh(*plain.data))

    return Split(own.micro_batches.map(weighted))


def _kind(x: Any) -> str:
    """The kind of data, which must be the same on all ranks."""
    if isinstance(x, tf.data.Dataset):
        return "a tf.data.Dataset"
    return "arrays" if internals.is_arrays(x) else f"a {type(x).__name__}"


def _described(spec: Any) -> Any:
    """The structure of the data, as far as it must be the same on all ranks."""

    def describe(leaf: Any) -> str:
        shape = getattr(leaf, "shape", None)
        inner = list(shape[1:]) if shape is not None and shape.rank else shape
        return f"{type(leaf).__name__} {getattr(leaf, 'dtype', leaf)} {inner}"

    return tf.nest.map_structure(describe, spec)


def _know_number_of_batches(adapter: Any) -> bool:
    """Whether all ranks know that they have the same number of batches, perhaps without an end.

    Args:
        adapter: Keras's adapter of the batches.
    """
    batches = adapter.num_batches
    if batches is None and not internals.draws_in_python(adapter):
        batches = int(adapter.get_tf_dataset().cardinality())
    if batches is None:
        batches = tf.data.UNKNOWN_CARDINALITY
    everyones = {int(one) for one in collectives.allgather(np.int64(batches))}
    return len(everyones) == 1 and tf.data.UNKNOWN_CARDINALITY not in everyones


def _most(batches: int | None) -> int | None:
    """The largest number of batches that any rank has; None if some rank does not know."""
    numbers = [int(n) for n in collectives.allgather(np.int64(-1 if batches is None else batches))]
    return None if -1 in numbers else max(numbers)
