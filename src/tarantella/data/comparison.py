"""Ranks that share batches make sure, now and then, that they have had the same ones.

Each step adds to a variable in host memory what it has had (`SamplesTaken`), and Python compares
between steps (`Comparison`): steps call no Python for it, and input pipelines can read ahead as far
as they like.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella.comm.waiting import barrier
from tarantella.data.micro_batch import MicroBatch, fingerprint_of
from tarantella.errors import MismatchError
from tarantella.internals.tensorflow import may_be_deterministic
from tarantella.runtime import run_report, world
from tarantella.runtime.configuration import configuration
from tarantella.runtime.log import LOGGER

# The ranks compare after 1, 2, 4, 8 and then every 16 calls, a power of two, and at the end.
_CALLS_BETWEEN = 16

_NOTHING = np.zeros(4, np.int64)
# The fingerprints of batches that come in another order add up to another number.
_FACTOR = 31
_FACTORS = np.array([1, 1, 1, _FACTOR], np.int64)

_has_warned = False


@dataclass(frozen=True)
class Taken:
    """What a rank has had of its data.

    Attributes:
        steps: The number of steps.
        count: How many samples this rank has had in them.
        total: How many samples all ranks have had.
        fingerprint: A number made of the fingerprints of the batches, and of their order.
    """

    steps: int = 0
    count: int = 0
    total: int = 0
    fingerprint: int = 0

    def plus(self, count: int, total: int, fingerprint: int) -> Taken:
        """What it has had after one more step."""
        fingerprints = np.int64(self.fingerprint), np.int64(fingerprint)
        with np.errstate(over="ignore"):
            both = int(fingerprints[0] * _FACTOR + fingerprints[1])
        return Taken(self.steps + 1, self.count + count, self.total + total, both)


class SamplesTaken:
    """Adds up what steps have had, in their graph."""

    def __init__(self) -> None:
        self._sums: Any = None
        self._arrival: Any = None

    def prepare(self) -> None:
        """Makes the variables: TensorFlow traces a function twice that makes some."""
        if self._sums is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._sums = tf.Variable(_NOTHING, trainable=False)
                self._arrival = tf.Variable(0.0, trainable=False, dtype=tf.float64)

    def restart(self, start: Taken) -> None:
        """Adds to this from now on, and not to what was there before."""
        self.prepare()
        self._sums.assign(dataclasses.astuple(start))

    def add(self, one: MicroBatch) -> None:
        """Adds the micro-batch of a step."""
        self.prepare()
        with tf.device("CPU:0"):
            numbers = tf.stack([1, one.count, one.total, fingerprint_of(one)])
            self._sums.assign(self._sums * _FACTORS + numbers, read_value=False)
            if run_report.is_wanted() and not may_be_deterministic():
                with tf.control_dependencies([] if tf.executing_eagerly() else [one.count]):
                    now = tf.timestamp()
                self._arrival.assign(now, read_value=False)

    def read(self) -> Taken:
        """What they have had until now."""
        return Taken() if self._sums is None else Taken(*self._sums.numpy().tolist())

    def arrival(self) -> float:
        """When the data of the last step were there, as in `time.time()`; 0 if it is not known."""
        return 0.0 if self._arrival is None else float(self._arrival.numpy())


class Comparison:
    """Compares what the ranks have had of the same data. All have to take the same steps.

    Args:
        purpose: Returns what the data are for, in words for the user.

    Attributes:
        on_step_size: Is called once, with the number of samples that all ranks have in a step.
    """

    def __init__(self, purpose: Callable[[], str]) -> None:
        self.on_step_size: Callable[[int], None] | None = None
        self._purpose = purpose
        self._communicator = world.communicator("data")
        self._has_complained = False

    def compare(self, taken: Taken) -> None:
        """Compares what this rank has had with the others; every rank must call it.

        Raises:
            MismatchError: On all ranks, if their batches had different sizes.
        """
        from mpi4py import MPI

        if self.on_step_size is not None and taken.steps:
            self.on_step_size(taken.total // taken.steps)
            self.on_step_size = None
        own = np.array([taken.steps, taken.total, taken.fingerprint], np.int64)
        extremes = np.concatenate([own, ~own])  # the largest, and the complements of the smallest
        barrier(self._communicator)
        self._communicator.Allreduce(MPI.IN_PLACE, extremes, MPI.MAX)
        largest, smallest = extremes[: len(own)], ~extremes[len(own) :]
        same_steps, same_total, same_fingerprint = largest == smallest
        if not (same_steps and same_total):
            raise self._sizes_differ(taken)
        if not same_fingerprint and not self._has_complained:
            self._has_complained = True
            complain_of_different_data(
                f"in the {self._purpose()}, batch {taken.steps}, or one before it, begins with "
                "another sample on another rank"
            )

    def _sizes_differ(self, taken: Taken) -> MismatchError:
        """The error that names two ranks that differ; every rank must call it."""
        own = np.array([taken.steps, taken.total], np.int64)
        everyones = np.empty((world.get_size(), len(own)), np.int64)
        self._communicator.Allgather(own, everyones)
        rank = world.get_rank()
        other = next(r for r, theirs in enumerate(everyones) if (theirs != everyones[0]).any())
        if (everyones[rank] != everyones[0]).any():
            other = 0
        steps, samples = everyones[other].tolist()
        return different_sizes(
            f"up to step {max(steps, taken.steps)}: rank {rank} has {taken.total} samples, rank "
            f"{other} has {samples} samples"
        )


def is_due(calls: int) -> bool:
    """Whether the ranks compare after so many calls that take steps."""
    return calls & (min(calls, _CALLS_BETWEEN) - 1) == 0


def different_sizes(where: str) -> MismatchError:
    """An error about ranks whose batches are not equally large."""
    return MismatchError(
        f"The data differ between the ranks {where}. All ranks must be given the same data in the "
        "same order: seed everything random in them, or pass `tnt_distribute_dataset=False` if "
        "every rank brings its own data."
    )


def complain_of_different_data(evidence: str) -> None:
    """Warns, once in a run, that the ranks, which should have the same data, do not.

    Raises:
        MismatchError: With `--strict`, which makes it an error.
    """
    global _has_warned
    problem = (
        f"The ranks do not have the same data: {evidence}. So some samples are left out, and "
        "others are used twice. Seed everything random in the data: "
        "`keras.utils.set_random_seed(1)` at the top of the script, and a seed for each generator "
        "of NumPy, as in `np.random.default_rng(1)`. Let all ranks iterate over a dataset equally "
        "often before they train on it. If every rank brings its own data, pass "
        "`tnt_distribute_dataset=False`."
    )
    if configuration().strict:
        raise MismatchError(problem)
    if not _has_warned:
        _has_warned = True
        LOGGER.warning("%s With --strict, this is an error.", problem)
