"""One output of a model over all steps: how its rows are kept, sent and put in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tarantella.comm import collectives
from tarantella.comm.block_exchange import OutgoingBlocks, as_bytes
from tarantella.comm.buffers import MESSAGE_BYTES
from tarantella.comm.values import strings
from tarantella.errors import InputError

Array = npt.NDArray[Any]


class RowLayout:
    """The order of the rows of all ranks: step after step, and by rank in each step.

    Args:
        counts: How many rows each rank has in each step, as a matrix of ranks and steps.
        steps: How many steps each execution has.
    """

    def __init__(self, counts: Array, steps: Sequence[int]) -> None:
        self.counts = counts
        in_order = counts.T.reshape(-1)
        self.starts = (np.cumsum(in_order) - in_order).reshape(counts.T.shape).T
        ends = np.cumsum(steps)
        self.executions = [slice(end - n, end) for end, n in zip(ends, steps, strict=True)]

    def total(self) -> int:
        return int(self.counts.sum())

    def rows(self) -> Array:
        """The number of rows of all ranks in each execution."""
        return self._by_execution(self.counts.sum(axis=0))

    def rows_of(self, rank: int) -> Array:
        """The number of rows of one rank in each execution."""
        return self._by_execution(self.counts[rank])

    def slices(self, rank: int, execution: int) -> list[slice]:
        """The slices of one rank's rows among those of all ranks in an execution, step by step."""
        steps = self.executions[execution]
        starts = (self.starts[rank, steps] - self.starts[0, steps.start]).tolist()
        counts = self.counts[rank, steps].tolist()
        return [slice(start, start + n) for start, n in zip(starts, counts, strict=True)]

    def positions(self, rank: int) -> Array:
        """The index of each row of one rank among all rows."""
        counts, starts = self.counts[rank], self.starts[rank]
        shifts = starts - (np.cumsum(counts) - counts)
        return np.repeat(shifts, counts) + np.arange(counts.sum())

    def _by_execution(self, counts: Array) -> Array:
        return np.add.reduceat(counts, [steps.start for steps in self.executions])


class Column(Protocol):
    """The rows of one output.

    Attributes:
        description: What must be the same on all ranks.
    """

    description: str

    def add(self, leaf: Any, stream: OutgoingBlocks) -> None:
        """Keeps this rank's rows of one execution, in the stream if that can hold them."""

    def result(self, layout: RowLayout) -> Any:
        """The rows of all ranks; every rank must call it."""


def column_for(leaf: Any) -> Column:
    """The column for outputs like this one."""
    if isinstance(leaf, tf.RaggedTensor):
        return Ragged(leaf)
    if isinstance(leaf, tf.SparseTensor):
        return Sparse(leaf)
    return Strings(leaf) if leaf.dtype == tf.string else Dense(leaf)


class Dense:
    """Tensors of numbers; their bytes go through the stream.

    Attributes:
        agreed: The shape of a row in each execution, as all ranks know it.
    """

    agreed: Array

    def __init__(self, leaf: Any) -> None:
        self.description = f"{leaf.dtype.name} with {leaf.shape.rank} dimensions"
        self._dtype = np.dtype(leaf.dtype.as_numpy_dtype)
        self._shapes: list[tuple[int, ...]] = []
        self._whole: Array | None = None
        self._arrays: list[Array] = []  # of each execution

    def add(self, leaf: Any, stream: OutgoingBlocks) -> None:
        self._keep_shape(leaf)
        for piece in _pieces(leaf):
            stream.write(piece)

    def shapes(self) -> Array:
        """The shape of this rank's rows in each execution."""
        return np.array(self._shapes, np.int64)

    def allocate(self, layout: RowLayout) -> None:
        """Makes the arrays that receive the rows: one for all executions of equal shapes."""
        rows = layout.rows()
        if (self.agreed == self.agreed[0]).all():
            self._whole = np.empty((layout.total(), *self.agreed[0]), self._dtype)
            self._arrays = np.split(self._whole, np.cumsum(rows)[:-1])
        else:
            shapes = zip(rows, self.agreed, strict=True)
            self._arrays = [np.empty((n, *shape), self._dtype) for n, shape in shapes]

    def bytes_of(self, rank: int, layout: RowLayout) -> int:
        """How many bytes of a rank's stream belong to this column."""
        elements = layout.rows_of(rank) * self.agreed.prod(axis=1)
        return int(elements.sum()) * self._dtype.itemsize

    def targets(self, rank: int, execution: int, layout: RowLayout) -> Iterator[Array]:
        """Where the bytes of a rank's rows of an execution go."""
        array = self._arrays[execution]
        for rows in layout.slices(rank, execution):
            yield as_bytes(array[rows])

    def exchange_rest(self, allgather: Callable[[bytes], list[bytes]]) -> None:
        """Exchanges what is not in the stream."""

    def result(self, layout: RowLayout) -> Any:
        return _joined(self._arrays) if self._whole is None else self._whole

    def _keep_shape(self, leaf: Any) -> None:
        shape = tuple(leaf.shape[1:])
        if self._shapes and len(self._shapes[0]) != len(shape):
            raise InputError(
                "predict(): an output must have the same number of dimensions in each step, but "
                f"has {1 + len(shape)} after {1 + len(self._shapes[0])}."
            )
        self._shapes.append(shape)


class Strings(Dense):
    """Tensors of strings: their lengths go through the stream, their bytes follow separately."""

    def __init__(self, leaf: Any) -> None:
        super().__init__(leaf)
        self._dtype = np.dtype(np.int64)
        self._text = bytearray()
        self._texts: list[bytes] = []  # of each rank

    def add(self, leaf: Any, stream: OutgoingBlocks) -> None:
        self._keep_shape(leaf)
        lengths, text = strings.encode(leaf.numpy(), strings.BYTES)
        stream.write(lengths)
        self._text += text.tobytes()

    def exchange_rest(self, allgather: Callable[[bytes], list[bytes]]) -> None:
        self._texts = allgather(bytes(self._text))
        self._text.clear()

    def result(self, layout: RowLayout) -> Any:
        decoded = [np.empty(lengths.shape, object) for lengths in self._arrays]
        for rank, text in enumerate(self._texts):
            read = 0
            for execution, lengths in enumerate(self._arrays):
                for rows in layout.slices(rank, execution):
                    size = int(lengths[rows].sum())
                    data = np.frombuffer(text[read : read + size], np.uint8)
                    decoded[execution][rows] = strings.decode(lengths[rows], data, strings.BYTES)
                    read += size
        return _joined(decoded) if self._whole is None else np.concatenate(decoded)


class Ragged:
    """Ragged tensors, exchanged whole."""

    def __init__(self, leaf: Any) -> None:
        self.description = f"{leaf.dtype.name} with {leaf.ragged_rank} ragged dimensions"
        self._kept: list[Any] = []

    def add(self, leaf: Any, stream: OutgoingBlocks) -> None:
        self._kept.append(leaf)

    def result(self, layout: RowLayout) -> Any:
        mine = tf.concat(self._kept, axis=0)
        self._kept.clear()
        everyones = [
            tf.RaggedTensor.from_nested_row_splits(values, splits, validate=False)
            for values, splits in collectives.allgather(
                (mine.flat_values, list(mine.nested_row_splits))
            )
        ]
        positions = np.concatenate([layout.positions(rank) for rank in range(len(everyones))])
        return tf.gather(tf.concat(everyones, axis=0), np.argsort(positions))


class Sparse:
    """Sparse tensors, exchanged whole."""

    def __init__(self, leaf: Any) -> None:
        self.description = f"{leaf.dtype.name}, sparse, with {leaf.shape.rank} dimensions"
        self._kept: list[Any] = []

    def add(self, leaf: Any, stream: OutgoingBlocks) -> None:
        self._kept.append(leaf)

    def result(self, layout: RowLayout) -> Any:
        mine = tf.sparse.concat(0, self._kept)
        self._kept.clear()
        everyones = collectives.allgather(
            (mine.indices.numpy(), mine.values, mine.dense_shape.numpy()[np.newaxis])
        )
        for rank, (indices, _, _) in enumerate(everyones):
            indices[:, 0] = layout.positions(rank)[indices[:, 0]]
        indices, values, shapes = (tf.concat(each, 0) for each in zip(*everyones, strict=True))
        shape = tf.concat([[layout.total()], tf.reduce_max(shapes, axis=0)[1:]], 0)
        return tf.sparse.reorder(tf.SparseTensor(indices, values, shape))


def _pieces(tensor: Any) -> Iterator[Array]:
    """The rows of a tensor, in arrays of bounded size."""
    row_bytes = tensor.dtype.size * int(np.prod(tensor.shape[1:], dtype=np.int64))
    step = max(1, MESSAGE_BYTES // max(1, row_bytes))
    if tensor.shape[0] <= step:
        yield tensor.numpy()
        return
    for start in range(0, tensor.shape[0], step):
        yield tensor[start : start + step].numpy()


def _joined(arrays: Sequence[Array]) -> tf.RaggedTensor:
    """Rows of different shapes as one ragged tensor, as Keras joins them."""
    shapes = np.array([array.shape for array in arrays])
    varying = np.nonzero((shapes != shapes[0]).any(axis=0))[0]
    ragged_rank = int(varying[varying > 0].max())
    tensors = [
        tf.convert_to_tensor(array, tf.string if array.dtype == object else None)
        for array in arrays
    ]
    return tf.concat(
        [tf.RaggedTensor.from_tensor(tensor, ragged_rank=ragged_rank) for tensor in tensors], axis=0
    )
