"""Sums over the ranks on their devices, by TensorFlow's own collectives: NCCL on GPUs.

No value leaves the GPU, and no Python function is called. NCCL wants few, large messages, issued
in one order on all ranks: all sums of a thread come one after the other, whatever their purpose.

Each collective has a key, by which the ranks' operations find each other. Since no two of them run
at the same time, the key says only what is summed: collectives that sum the same kind of tensor
share one, and ranks need not trace their graphs equally often.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tarantella.comm.buckets import Bucket
from tarantella.graph.channel import Channel
from tarantella.graph.host_call import call_when_computed
from tarantella.graph.packing import Packing
from tarantella.graph.sum_counter import sum_counter
from tarantella.internals.tensorflow import run_independently
from tarantella.runtime import world
from tarantella.runtime.timeline import Timeline, now, timeline

# Smaller tensors are fused up to this size, whatever the fusion threshold: a message for each of
# them was ten times slower. A bucket can be summed while the rest is still being computed.
BUCKET_BYTES = 32 << 20
# The same where all tensors are ready at once: then nothing is gained by several messages.
LARGEST_BUCKET_BYTES = 1 << 30
# Slices are padded to a multiple of this many, as each number of them needs a key of its own.
_ROWS = 256
_LARGEST_KEY = 2**31 - 1
# Indices and values are gathered as if they were such numbers, by the size of the values: these are
# types that TensorFlow gathers, and their bits are only copied.
_GATHERED_AS = {2: tf.float16, 4: tf.float32, 8: tf.float64}
# Numbers of slices are sent as digits.
_BASE = 256
_DIGITS = [_BASE**place for place in range(4)]


class DeviceChannel(Channel):
    """A channel whose collectives are operations of TensorFlow.

    Args:
        purpose: One of `world.PURPOSES`.
        hint: What TensorFlow should use: "nccl" on GPUs, "ring" on CPUs.
    """

    # NCCL knows no others, and on a GPU TensorFlow keeps 32-bit integers in host memory.
    ADDED_AS: ClassVar[dict[tf.DType, tf.DType]] = {
        **dict.fromkeys((tf.bool, tf.int8, tf.int16, tf.int32), tf.int64),
        **dict.fromkeys((tf.uint8, tf.uint16, tf.uint32, tf.uint64), tf.int64),
    }

    def __init__(self, purpose: str, hint: str) -> None:
        super().__init__(purpose)
        self._hint = hint
        # The ranks decide what sums in whichever thread of each needs a sum first.
        self._thread = "" if purpose == "engine" else world.communicators().thread
        self._counter = sum_counter(hint, self._thread)
        self._buckets = 0

    def allreduce(self, tensors: Sequence[tf.Tensor], threshold: int | None) -> list[tf.Tensor]:
        return super().allreduce(tensors, max(threshold or 0, BUCKET_BYTES))

    def _sums(self, tensors: list[tf.Tensor], buckets: list[Bucket]) -> dict[int, tf.Tensor]:
        packing = Packing(tensors, buckets)
        with self._device():
            sums = [self._sum(flat) for flat in packing.pack(tensors)]
            return dict(enumerate(packing.unpack(sums)))

    def _sum(self, flat: tf.Tensor) -> tf.Tensor:
        """The sum over the ranks of values in one axis."""
        if flat.shape[0] == 0:
            return flat
        values = _real(flat)
        span = self._span(values)
        begun = span.begin(values) if span else []
        total = self._counter.in_order([values, *begun], lambda: self._reduce(values))
        if span:
            with tf.control_dependencies(begun):  # its beginning is noted first
                span.end(total)
        return tf.complex(*tf.unstack(total)) if flat.dtype.is_complex else total

    def compiled_sum(self, flat: tf.Tensor) -> tf.Tensor:
        """The sum over the ranks of values in one axis, in a function that XLA compiles.

        There can be only one in such a function: XLA may put several in another order on each rank.
        """
        return self._reduce(flat)

    def _reduce(self, values: tf.Tensor) -> tf.Tensor:
        total = tf.raw_ops.CollectiveReduceV2(
            input=values,
            merge_op="Add",
            final_op="Id",
            ordering_token=[],
            instance_key=_key_of_sum(values),
            **self._group(),
        )
        _run_in_own_order(total)
        return tf.stop_gradient(total)  # it has none, which TensorFlow would complain about

    def allreduce_with_slices(
        self,
        tensors: Sequence[tf.Tensor],
        slices: Sequence[tf.IndexedSlices],
        threshold: int | None,
    ) -> tuple[list[tf.Tensor], list[tf.IndexedSlices]]:
        """The numbers of slices travel with one of the tensors: a message of their own would cost
        about as much as a large one."""
        if not slices:
            return self.allreduce(tensors, threshold), []
        sent = list(tensors)
        floating = [i for i, tensor in enumerate(sent) if tensor.dtype.is_floating]
        if not floating:
            floating = [len(sent)]
            sent.append(tf.zeros(0))
        carrier = min(floating, key=lambda i: int(sent[i].shape.num_elements()))
        own = sent[carrier]
        with self._device():
            # On a GPU, shapes are in host memory; taken on the CPU, they would take indices along.
            numbers = _row_numbers([tf.shape(one.indices, tf.int64) for one in slices])
            sent[carrier] = tf.concat([tf.reshape(own, [-1]), tf.cast(numbers, own.dtype)], 0)
        sums = self.allreduce(sent, threshold)
        with self._device():
            total, numbers = tf.split(sums[carrier], [own.shape.num_elements(), numbers.shape[0]])
            sums[carrier] = tf.reshape(total, own.shape)
        counts = _counts(numbers, len(slices))
        gathered = [self._gathered(one, count) for one, count in zip(slices, counts, strict=True)]
        return sums[: len(tensors)], gathered

    def _gathered(self, slices: tf.IndexedSlices, counts: tf.Tensor) -> tf.IndexedSlices:
        """The slices of all ranks, by rank.

        Args:
            slices: Those of this rank.
            counts: How many each rank has, in host memory.
        """
        values = self._as_sent(slices.values)
        with self._device():
            rows = self._rows(_as_rows(slices.indices, values), counts)
            indices, values = _from_rows(rows, slices.indices.dtype, values)
        return tf.IndexedSlices(tf.cast(values, slices.values.dtype), indices, slices.dense_shape)

    def _rows(self, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """The rows of all ranks, by rank."""
        width = rows.shape[1]
        with tf.device("CPU:0"):
            most = -(-tf.reduce_max(counts) // _ROWS) * _ROWS
            padding = [[0, most - counts[world.get_rank()]], [0, 0]]
            counted = tf.where(tf.reshape(tf.sequence_mask(counts, most), [-1]))[:, 0]
            key = _key("rows", rows.dtype, width) ^ tf.cast(most, tf.int32)
        padded = tf.pad(rows, padding)

        def gather() -> tf.Tensor:
            everyones = tf.raw_ops.CollectiveGatherV2(
                input=padded, ordering_token=[], instance_key=key, **self._group()
            )
            _run_in_own_order(everyones)
            return everyones

        everyones = self._counter.in_order([padded], gather)
        everyones.set_shape([None, width])
        return tf.gather(everyones, counted)

    def _group(self) -> dict[str, Any]:
        return {
            "group_size": world.get_size(),
            # Threads that train at the same time must not meet each other.
            "group_key": _number(f"thread {self._thread}"),
            "communication_hint": self._hint,
        }

    def _span(self, values: tf.Tensor) -> _SumSpan | None:
        notes = timeline()
        if notes is None:
            return None
        self._buckets += 1
        megabytes = values.dtype.size * values.shape.num_elements() / 1e6
        return _SumSpan(f"{self._purpose} {self._buckets} ({megabytes:.2f} MB)", notes)

    def _device(self) -> Any:
        return tf.device("GPU:0" if self._hint == "nccl" else "CPU:0")


class _SumSpan:
    """A bucket's sum in a timeline: from when the bucket is ready to when its sum is there.

    In between, NCCL waits for the other ranks and adds; nothing tells the one from the other.

    Args:
        lane: The row it is shown in.
        notes: The timeline.
    """

    def __init__(self, lane: str, notes: Timeline) -> None:
        self._lane = lane
        self._notes = notes
        self._began: deque[int] = deque()

    def begin(self, values: tf.Tensor) -> list[tf.Tensor]:
        return call_when_computed(lambda: self._began.append(now()), [values])

    def end(self, total: tf.Tensor) -> None:
        size = total.dtype.size * total.shape.num_elements()

        def note() -> None:
            self._notes.add(self._lane, "summing", self._began.popleft(), now(), bytes=size)

        call_when_computed(note, [total])


def _run_in_own_order(result: tf.Tensor) -> None:
    """Lets a collective run as soon as those before it have ended.

    TensorFlow would have it wait for everything else in the program that has an effect.
    """
    if not tf.executing_eagerly():
        run_independently(result.op)


def _row_numbers(shapes: Sequence[tf.Tensor]) -> tf.Tensor:
    """How many slices this rank has, for a sum with those of other ranks.

    They have places of their own, as numbers up to 255, which all types of gradients can hold.

    Args:
        shapes: Those of the indices.
    """
    with tf.device("CPU:0"):
        counts = tf.stack([shape[0] for shape in shapes])
        digits = (counts[:, tf.newaxis] // _DIGITS) % _BASE
        own = tf.one_hot(world.get_rank(), world.get_size(), dtype=tf.float32)
        numbers = own[:, tf.newaxis, tf.newaxis] * tf.cast(digits, tf.float32)
        return tf.reshape(numbers, [-1])


def _counts(numbers: tf.Tensor, slices: int) -> list[tf.Tensor]:
    """How many slices each rank has, for each of several slices, in host memory."""
    with tf.device("CPU:0"):
        digits = tf.reshape(tf.cast(numbers, tf.int64), [-1, slices, len(_DIGITS)])
        return tf.unstack(tf.reduce_sum(digits * _DIGITS, 2), axis=1)


def _as_rows(indices: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Indices and values side by side, so that they can be gathered together."""
    dtype = _GATHERED_AS[values.dtype.real_dtype.size]
    count = tf.shape(indices)[0]
    bits = tf.bitcast(tf.cast(indices, tf.int64), dtype)
    return tf.concat(
        [
            tf.reshape(bits, [count, tf.int64.size // dtype.size]),
            tf.reshape(tf.bitcast(values, dtype), [count, _width(values)]),
        ],
        1,
    )


def _from_rows(
    rows: tf.Tensor, index_dtype: tf.DType, like: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Indices, and values of the type and the shape of others, of rows that hold both."""
    bits, values = tf.split(rows, [rows.shape[1] - _width(like), _width(like)], 1)
    if bits.shape[1] == 1:
        bits = bits[:, 0]
    if like.dtype.is_complex:
        values = tf.reshape(values, [-1, *like.shape[1:], 2])
    values = tf.bitcast(values, like.dtype)
    indices = tf.cast(tf.bitcast(bits, tf.int64), index_dtype)
    return indices, tf.reshape(values, [-1, *like.shape[1:]])


def _width(values: tf.Tensor) -> int:
    """How many real numbers a slice has."""
    return int(values.shape[1:].num_elements()) * (2 if values.dtype.is_complex else 1)


def _real(values: tf.Tensor) -> tf.Tensor:
    """The values, with those of complex numbers as two real ones."""
    if values.dtype.is_complex:
        return tf.stack([tf.math.real(values), tf.math.imag(values)])
    return values


def _key_of_sum(values: tf.Tensor) -> Any:
    """Each size needs a key of its own."""
    key = _key("sum", values.dtype, values.shape)
    known = values.shape.is_fully_defined()
    return key if known else key ^ tf.cast(tf.size(values, tf.int64) % _LARGEST_KEY, tf.int32)


def _key(kind: str, dtype: tf.DType, shape: Any) -> int:
    return _number(f"{kind} {dtype.name} {shape}")


def _number(text: str) -> int:
    """The same number for the same text, on all ranks."""
    return zlib.crc32(text.encode()) % _LARGEST_KEY
