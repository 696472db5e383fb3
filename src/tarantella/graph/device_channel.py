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

    def allreduce(self, tensors: Sequence[tf.Tensor], threshold: int) -> list[tf.Tensor]:
        return super().allreduce(tensors, max(threshold, BUCKET_BYTES))

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
            span.end(total)
        return tf.complex(*tf.unstack(total)) if flat.dtype.is_complex else total

    def _reduce(self, values: tf.Tensor) -> tf.Tensor:
        total = tf.raw_ops.CollectiveReduceV2(
            input=values,
            merge_op="Add",
            final_op="Id",
            ordering_token=[],
            instance_key=_key("sum", values.dtype, values.shape),
            **self._group(),
        )
        _run_in_own_order(total)
        return tf.stop_gradient(total)  # it has none, which TensorFlow would complain about

    def _rows(self, indices: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with self._device():
            return self._counter.in_order(
                [indices, values], lambda: self._gather_rows(indices, values)
            )

    def _gather_rows(self, indices: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        size = world.get_size()
        own = tf.shape(indices, tf.int64)[0]
        counts = self._reduce(tf.one_hot(world.get_rank(), size, dtype=tf.int64) * own)
        rows = -(-tf.reduce_max(counts) // _ROWS) * _ROWS
        counted = tf.reshape(tf.sequence_mask(counts, rows), [-1])

        def gathered(values: tf.Tensor) -> tf.Tensor:
            row = values.shape[1:]
            padded = tf.pad(values, [[0, rows - own], *[[0, 0]] * row.rank])
            everyones = tf.raw_ops.CollectiveGatherV2(
                input=padded,
                ordering_token=[],
                instance_key=_key("rows", values.dtype, row) ^ tf.cast(rows, tf.int32),
                **self._group(),
            )
            _run_in_own_order(everyones)
            everyones.set_shape([None, *row])
            return tf.boolean_mask(everyones, counted)

        all_indices = gathered(indices)
        with tf.control_dependencies([all_indices]):
            return all_indices, gathered(values)

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


def _real(values: tf.Tensor) -> tf.Tensor:
    """The values, with those of complex numbers as two real ones."""
    if values.dtype.is_complex:
        return tf.stack([tf.math.real(values), tf.math.imag(values)])
    return values


def _key(kind: str, dtype: tf.DType, shape: tf.TensorShape) -> int:
    return _number(f"{kind} {dtype.name} {shape}")


def _number(text: str) -> int:
    """The same number for the same text, on all ranks."""
    return zlib.crc32(text.encode()) % _LARGEST_KEY
