"""The predictions of all ranks, in the order of the samples.

Keras's `predict` keeps the outputs of all steps and joins them at the end. Here each rank keeps
only the rows of its micro-batches, and Keras keeps none. At the end the ranks exchange their rows
block by block, straight into the arrays that are returned. So a rank holds one copy of the result,
and never much more.

This assumes that a model works sample by sample: an output has a row for each sample, in the order
of the samples, and a row does not depend on the other samples of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tarantella.comm import agreement, buffers, structures
from tarantella.comm.block_exchange import OutgoingBlocks, exchange
from tarantella.comm.waiting import barrier
from tarantella.data.micro_batch import row_count, slice_rows
from tarantella.errors import InputError, MismatchError
from tarantella.keras.prediction_columns import Column, Dense, RowLayout, column_for
from tarantella.runtime import world

if TYPE_CHECKING:
    from mpi4py import MPI

_CALL = "predict()"


def own_rows(outputs: Any, count: Any) -> tuple[Any, Any]:
    """This rank's rows of a step, and how many there are of each output.

    Args:
        outputs: What the model has computed.
        count: How many samples of the batch this rank has. Without any, it has computed on a
            placeholder sample, and has no rows.

    Returns:
        The rows, in the structure of `outputs`, and an array with one row for the step: Keras
        joins the arrays of several steps that it runs at once.
    """
    rows = keras.tree.map_structure(lambda output: _all_or_none(output, count > 0), outputs)
    return rows, tf.stack([row_count(leaf) for leaf in keras.tree.flatten(rows)])[tf.newaxis]


def _all_or_none(output: Any, wanted: Any) -> Any:
    if not isinstance(output, (tf.RaggedTensor, tf.SparseTensor)):
        output = tf.convert_to_tensor(output)
    if output.shape.rank == 0:
        raise InputError(
            f"{_CALL}: the model returns a single number for a whole batch, but each rank sees "
            "only its micro-batch: return one row for each sample."
        )
    return slice_rows(output, 0, tf.where(wanted, row_count(output), 0))


class Predictions:
    """This rank's rows, until they are gathered with those of the other ranks."""

    def __init__(self) -> None:
        self._structure: Any = None  # of the outputs, with a description of each
        self._columns: list[Column] = []
        self._stream = OutgoingBlocks(world.get_size())
        self._counts: list[Any] = []  # of each execution, which is one step or several

    def add(self, rows: Any, counts: Any) -> None:
        """Keeps the result of `own_rows`, for the steps of one execution."""
        leaves = keras.tree.flatten(rows)
        if not self._counts:
            self._columns = [column_for(leaf) for leaf in leaves]
            descriptions = [column.description for column in self._columns]
            self._structure = keras.tree.pack_sequence_as(rows, descriptions)
        else:
            keras.tree.assert_same_structure(self._structure, rows)
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.add(leaf, self._stream)
        self._counts.append(np.asarray(counts))

    def gather(self) -> Any:
        """The rows of all ranks, in the order of the samples; every rank must call it, once."""
        with agreement.turn() as comm:
            agreement.agree(_CALL, self._lines(), comm)
            layouts = self._layouts(comm)
            dense = [
                (column, layout)
                for column, layout in zip(self._columns, layouts, strict=True)
                if isinstance(column, Dense)
            ]
            if dense:
                self._agree_on_shapes(dense, comm)
                self._exchange(dense, comm)
        results = [
            column.result(layout) for column, layout in zip(self._columns, layouts, strict=True)
        ]
        return keras.tree.pack_sequence_as(self._structure, results)

    def _lines(self) -> list[agreement.Line]:
        steps = [len(counts) for counts in self._counts]
        return [
            ("the data", f"{sum(steps)} steps, {max(steps)} at a time"),
            *(
                (path, item if structures.is_leaf(item) else structures.describe_container(item))
                for path, item in structures.walk(self._structure)
            ),
        ]

    def _layouts(self, comm: MPI.Comm) -> list[RowLayout]:
        """The order of the rows of each column."""
        mine = np.concatenate(self._counts).astype(np.int64)
        everyones = np.empty((world.get_size(), *mine.shape), np.int64)
        barrier(comm)
        comm.Allgather(mine, everyones)
        steps = [len(counts) for counts in self._counts]
        return [RowLayout(everyones[:, :, column], steps) for column in range(mine.shape[1])]

    def _agree_on_shapes(self, dense: Sequence[tuple[Dense, RowLayout]], comm: MPI.Comm) -> None:
        """Finds the shape of a row in each execution.

        A rank without rows may have another one, that of its placeholder sample.
        """
        from mpi4py import MPI

        shapes = [column.shapes() for column, _ in dense]
        has_rows = [layout.rows_of(world.get_rank()) > 0 for _, layout in dense]
        mine = np.concatenate(shapes, axis=1)
        known = np.concatenate(
            [np.broadcast_to(k[:, None], s.shape) for k, s in zip(has_rows, shapes, strict=True)],
            axis=1,
        )
        # The maximum, and the minimum with its sign changed, in one message.
        extremes = np.where(known, np.stack([mine, -mine]), np.iinfo(np.int64).min)
        barrier(comm)
        comm.Allreduce(MPI.IN_PLACE, extremes, MPI.MAX)
        known = extremes[0] >= 0
        largest, smallest = np.where(known, np.stack([extremes[0], -extremes[1]]), mine)
        if not np.array_equal(largest, smallest):
            raise _different_shapes(largest, smallest)
        ends = np.cumsum([shape.shape[1] for shape in shapes])[:-1]
        for (column, _), agreed in zip(dense, np.split(largest, ends, axis=1), strict=True):
            column.agreed = agreed

    def _exchange(self, dense: Sequence[tuple[Dense, RowLayout]], comm: MPI.Comm) -> None:
        for column, layout in dense:
            column.allocate(layout)
        ranks, executions = range(world.get_size()), range(len(self._counts))
        lengths = [sum(column.bytes_of(rank, layout) for column, layout in dense) for rank in ranks]

        def targets(rank: int) -> Iterator[Any]:
            for execution in executions:
                for column, layout in dense:
                    yield from column.targets(rank, execution, layout)

        exchange(self._stream, lengths, [targets(rank) for rank in ranks], comm)
        for column, _ in dense:
            column.exchange_rest(lambda data: buffers.allgather_bytes(data, comm))


def _different_shapes(largest: Any, smallest: Any) -> MismatchError:
    execution, dimension = (int(index[0]) for index in np.nonzero(largest != smallest))
    low, high = smallest[execution, dimension], largest[execution, dimension]
    return MismatchError(
        f"{_CALL}: the ranks computed rows of different shapes in step {execution}: a dimension is "
        f"{low} on one rank and {high} on another. The shape of a row must not depend on the other "
        "samples of a batch: pad the samples to a common size first."
    )


class NeedsSamples(keras.callbacks.Callback):
    """Refuses data without a single batch: Keras would fail for lack of an output to return."""

    async_safe = True  # for Keras: it may be called while the next step runs

    def __init__(self) -> None:
        super().__init__()
        self._has_batch = False

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._has_batch = True

    def on_predict_end(self, logs: Any = None) -> None:
        if not self._has_batch:
            raise InputError("There are no samples in the data: `predict` needs at least one.")


@contextmanager
def kept_predictions(model: Any) -> Iterator[Predictions]:
    """Keeps what the model predicts, in place of Keras."""
    predictions = Predictions()

    def keep(rows_and_counts: Any) -> Any:
        predictions.add(*rows_and_counts)
        return ()

    with _predictions_through(keep, model):
        yield predictions


@contextmanager
def gathered_predictions(model: Any) -> Iterator[None]:
    """Gives Keras the rows of all ranks in each step, as if this rank had computed them all."""

    def gather(rows_and_counts: Any) -> Any:
        predictions = Predictions()
        predictions.add(*rows_and_counts)
        return keras.tree.map_structure(_as_tensor, predictions.gather())

    with _predictions_through(gather, model):
        yield


@contextmanager
def _predictions_through(change: Callable[[Any], Any], model: Any) -> Iterator[None]:
    model.make_predict_function()
    function = model.predict_function
    model.predict_function = lambda data: change(function(data))
    try:
        yield
    finally:
        model.predict_function = function


def _as_tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return tf.convert_to_tensor(value, tf.string if value.dtype == object else None)
