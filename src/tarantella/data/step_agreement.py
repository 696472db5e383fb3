"""The steps of all ranks, taken together: how large each is, and when they end.

Before a rank takes a step it has to know how many samples all ranks have in it, and that none of
them has reached the end of its data. Mostly it knows that by itself: ranks that share batches of
which they know the number take as many steps. They only compare, now and then, what they have had
so far (`comparison`).

Otherwise (unknown numbers of batches, padding, data of each rank's own) each rank announces the
numbers of a step as soon as its input pipeline has it ready, some steps ahead, and receives those
of the others when it takes the step, by which time they have long arrived. Only the announcing
runs ahead in the pipeline, and it never waits. An iteration that is abandoned leaves nothing behind
but a few messages that are never read.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella.comm.waiting import wait_polling
from tarantella.data import optionals
from tarantella.data.comparison import Comparison, complain_of_different_data, different_sizes
from tarantella.data.cut import Split
from tarantella.data.micro_batch import MicroBatch, fingerprint_of, slice_rows
from tarantella.data.on_device import Prefetched, prefetched
from tarantella.errors import InputError, MismatchError
from tarantella.graph.host_call import host_call
from tarantella.runtime import devices, times, world
from tarantella.runtime.configuration import configuration
from tarantella.runtime.meter import METER

_LARGEST_TAG = 2**15  # what every MPI library allows
# The numbers of a step: how many samples this rank has and all ranks have, the fingerprint of the
# batch, and from `_SIZES` on the sizes of the longest samples.
_COUNT, _TOTAL, _FINGERPRINT, _SIZES = range(4)
_ENDED = -1
_NO_PASS = -1
_GIVEN_UP = 2**62  # a step that no rank ever reaches

# Threads that train at the same time have communicators, and so numbers, of their own.
_numbers: defaultdict[Any, Iterator[int]] = defaultdict(itertools.count)


class AgreedSteps:
    """The steps of all ranks over the same data; the ranks agree on the size of each.

    Args:
        split: This rank's micro-batches. All ranks make their `AgreedSteps` in the same order.
        own_data: Whether the ranks' data are their own, and a step is made of what each has in it;
            otherwise they share batches, and must agree on how large these are.
        number_is_known: Whether they share batches, and all know how many there are.

    Attributes:
        dataset: The micro-batches, each with the size of its step over all ranks.
        comparison: What compares the ranks' data, if they know the number of batches.
        purpose: What the data are for, in words for the user.
    """

    purpose = "data"
    _exchange: _Exchange

    def __init__(self, split: Split, own_data: bool, number_is_known: bool) -> None:
        self.comparison: Comparison | None = None
        self._own_data = own_data
        self._padding = split.padding
        self._finish = split.finish or (lambda data: data)
        self._agrees = False
        if world.get_size() == 1:
            own = split.micro_batches
            self.dataset = own if split.finish is None else own.map(self._finished)
            return
        if number_is_known and not own_data and not split.padding:
            self.comparison = Comparison(lambda: self.purpose)
            self.dataset = split.micro_batches
            return
        self._agrees = True
        everyone = own_data or split.padding is not None
        self._exchange = _Exchange(own_data, everyone, purpose=lambda: self.purpose)
        self._spec = split.micro_batches.element_spec.data
        agreed = self._agreed(split.micro_batches)
        self.dataset = agreed.with_options(_options(split.micro_batches))

    def read_ahead(self, steps: int | None, to_device: bool) -> tf.data.Dataset | Prefetched:
        """The micro-batches, the next of which are prepared while a step is computed.

        Args:
            steps: How many are needed at most, if that is known. One more is read, as in a pipeline
                of plain Keras. Where a dataset repeats a shuffle, reading further could begin
                another pass, and another order in whatever reads the dataset next.
            to_device: Whether they may be copied to the memory of a GPU ahead of time; those that
                are there are `OnDevice`.
        """
        if self.comparison is None:
            return self.dataset
        read = self.dataset if steps is None else self.dataset.take(steps + 1)
        ahead = read.prefetch(tf.data.AUTOTUNE).with_options(_options(self.dataset))
        return prefetched(ahead) if to_device else ahead

    @property
    def problem(self) -> Exception | None:
        """Why the ranks could not continue, if they could not."""
        return self._exchange.problem if self._agrees else None

    def on_step_size(self, tell: Callable[[int], None]) -> None:
        """Calls `tell` once, with the number of samples that all ranks have in a step."""
        if self._agrees:
            self._exchange.on_step_size = tell
        elif self.comparison:
            self.comparison.on_step_size = tell

    def _agreed(self, micro_batches: tf.data.Dataset) -> tf.data.Dataset:
        before_the_first = tf.constant(_NO_PASS, tf.int64)
        announced = self._with_end(micro_batches).scan(before_the_first, self._announce)
        taken = announced.prefetch(tf.data.AUTOTUNE).take_while(self._is_step)
        # A `map` could be made parallel by TensorFlow, and then run ahead.
        return taken.scan(optionals.empty(), self._micro_batch)

    def _with_end(self, micro_batches: tf.data.Dataset) -> tf.data.Dataset:
        """The numbers of each micro-batch, and its data in an optional that is empty at the end."""

        @tf.autograph.experimental.do_not_convert
        def step_of(one: MicroBatch) -> Any:
            numbers = [tf.stack([one.count, one.total, fingerprint_of(one)])]
            if self._padding:
                numbers.append(self._padding.sizes(one.data))
            return tf.concat(numbers, 0), optionals.from_value(one.data)

        length = _SIZES + (self._padding.count if self._padding else 0)
        numbers = tf.constant([_ENDED] + [0] * (length - 1), tf.int64)
        end = tf.data.Dataset.from_tensors((numbers, optionals.empty()))
        return micro_batches.map(step_of).concatenate(end.repeat() if self._own_data else end)

    @tf.autograph.experimental.do_not_convert
    def _announce(self, pass_number: tf.Tensor, step: Any) -> Any:
        numbers, data = step
        position = host_call(self._exchange.announce, [pass_number, numbers], tf.int64)
        position = tf.ensure_shape(position, (2,))
        return position[0], (position, numbers, data)

    @tf.autograph.experimental.do_not_convert
    def _is_step(self, position: tf.Tensor, numbers: tf.Tensor, data: tf.Tensor) -> tf.Tensor:
        del data
        is_step = host_call(self._exchange.agree, [position, numbers], tf.bool)
        return tf.ensure_shape(is_step, ())

    @tf.autograph.experimental.do_not_convert
    def _micro_batch(self, last: tf.Tensor, step: Any) -> Any:
        """The micro-batch; if this rank's own data have ended, the last one, counting nothing."""
        position, numbers, optional = step
        if self._own_data or self._padding:
            agreed = host_call(self._exchange.take_agreed, [position], tf.int64)
            numbers = tf.ensure_shape(agreed, numbers.shape)
        if self._own_data:
            given = optional
            optional = tf.cond(optionals.has_value(given), lambda: given, lambda: last)
        data = optionals.get_value(self._spec, optional)
        if self._own_data:
            rows = tf.maximum(numbers[_COUNT], 1)
            data = tf.nest.map_structure(lambda leaf: slice_rows(leaf, 0, rows), data)
        if self._padding:
            data = self._padding.fill_up(data, numbers[_SIZES:])
        data = self._finish(data)
        own = MicroBatch(numbers[_COUNT], numbers[_TOTAL], data)
        if not self._own_data:
            own = own._replace(fingerprint=numbers[_FINGERPRINT])
        return optional if self._own_data else last, own

    @tf.autograph.experimental.do_not_convert
    def _finished(self, one: MicroBatch) -> MicroBatch:
        return one._replace(data=self._finish(one.data))


def _options(micro_batches: tf.data.Dataset) -> tf.data.Options:
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # would receive ahead of the steps
    if micro_batches.options().threading.private_threadpool_size is None:
        # One more than usual: receiving blocks a thread, and the others prepare data.
        options.threading.private_threadpool_size = devices.thread_count(configuration()) + 1
    return options


def _sum_of_all(
    position: np.ndarray, numbers: np.ndarray, everyones: dict[int, np.ndarray]
) -> np.ndarray:
    ended = [rank for rank, one in everyones.items() if one[_COUNT] == _ENDED]
    if len(ended) == len(everyones):
        return numbers
    if ended and position[1] == 0:
        raise InputError(
            f"The data of rank {ended[0]} are empty: give every rank at least one batch."
        )
    counts = {rank: max(int(one[_COUNT]), 0) for rank, one in everyones.items()}
    own = counts[world.get_rank()]
    return np.array([own, sum(counts.values()), *numbers[_FINGERPRINT:]], np.int64)


def _check_same_samples(
    position: np.ndarray, numbers: np.ndarray, everyones: dict[int, np.ndarray]
) -> None:
    def described(of_rank: np.ndarray) -> str:
        if of_rank[_COUNT] == _ENDED:
            return "reached the end"
        return f"a batch of {int(of_rank[_TOTAL])} samples"

    for rank, theirs in everyones.items():
        if int(theirs[_TOTAL]) != int(numbers[_TOTAL]):
            raise different_sizes(
                f"in step {int(position[1]) + 1}: rank {world.get_rank()} has "
                f"{described(numbers)}, rank {rank} has {described(theirs)}"
            )


class _Exchange:
    """Messages about steps, each with its position: which pass, and which step in it."""

    def __init__(self, own_data: bool, everyone: bool, purpose: Callable[[], str]) -> None:
        self.problem: Exception | None = None
        self.on_step_size: Callable[[int], None] | None = None
        self._own_data = own_data
        self._purpose = purpose
        self._communicator = world.communicator("data")
        self._number = next(_numbers[self._communicator])
        rank, size = world.get_rank(), world.get_size()
        others = [other % size for other in range(rank + 1, rank + size)]
        # If the ranks only have to agree, comparing neighbours is enough.
        self._receivers = others if everyone else others[:1]
        self._senders = others if everyone else others[-1:]
        self._passes = itertools.count()
        self._next_position = (0, 0)
        self._in_doubt = self._has_complained = False
        self._agreed: dict[tuple[int, int], np.ndarray] = {}
        self._sent: deque[tuple[Any, np.ndarray]] = deque()
        self._lock = threading.Lock()

    @property
    def _tag(self) -> int:
        return self._number % _LARGEST_TAG

    def announce(self, pass_number: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Tells the others the numbers of the next step of a pass, and returns its position."""
        with self._lock:
            number = next(self._passes) if pass_number == _NO_PASS else int(pass_number)
            position = max(self._next_position, (number, 0))
            if position[0] != number:
                return np.array([number, _GIVEN_UP], np.int64)  # nobody will take this step
            self._next_position = (number, position[1] + 1)
            self._send(np.array([self._number, *position, self._in_doubt, *numbers], np.int64))
        return np.array(position, np.int64)

    def agree(self, position: np.ndarray, numbers: np.ndarray) -> np.bool_:
        """Whether all ranks have this step, by what the others say; then all take it.

        Args:
            position: The step.
            numbers: The numbers of this rank.
        """
        METER.note_input()
        try:
            others = self._receive(position, len(numbers))
            everyones = {world.get_rank(): numbers, **others}
            if self._own_data:
                agreed = _sum_of_all(position, numbers, everyones)
            else:
                _check_same_samples(position, numbers, everyones)
                self._compare_fingerprints(position, everyones)
                agreed = numbers
                if len(numbers) > _SIZES:
                    longest = np.max(list(everyones.values()), axis=0)
                    agreed = np.concatenate([numbers[:_SIZES], longest[_SIZES:]])
        except Exception as error:
            self._give_up(position)
            # A rank whose data fail looks like one whose data end. It is about to say why.
            time.sleep(times.TIME_FOR_DATA_ERROR)
            self.problem = error  # what TensorFlow makes of it is hard to read
            raise
        self._agreed = {_key(position): agreed}
        is_step = agreed[_COUNT] != _ENDED
        if is_step:
            METER.note_samples(int(agreed[_COUNT]))
        if is_step and self.on_step_size is not None:
            self.on_step_size(int(agreed[_TOTAL]))
            self.on_step_size = None
        return np.bool_(is_step)

    def _compare_fingerprints(self, position: np.ndarray, everyones: dict[int, np.ndarray]) -> None:
        """Complains once if the ranks' batches differ, as far as their fingerprints tell."""
        fingerprints = {int(one[_FINGERPRINT]) for one in everyones.values()}
        self._in_doubt = self._in_doubt or len(fingerprints) > 1
        if self._in_doubt and not self._has_complained:
            self._has_complained = True
            complain_of_different_data(
                f"in the {self._purpose()}, batch {int(position[1]) + 1}, or one before it, begins "
                "with another sample on another rank"
            )

    def take_agreed(self, position: np.ndarray) -> np.ndarray:
        """The numbers of the step that was agreed on last.

        They are this rank's count, the sum of all counts, and the longest samples of all.
        """
        return self._agreed.pop(_key(position))

    def _give_up(self, position: np.ndarray) -> None:
        """Tells the others not to wait for this rank."""
        with self._lock:
            self._send(np.array([self._number, position[0], _GIVEN_UP], np.int64))

    def _send(self, message: np.ndarray) -> None:
        while self._sent and self._sent[0][0].Test():
            self._sent.popleft()
        for rank in self._receivers:
            self._sent.append((self._communicator.Isend(message, rank, self._tag), message))

    def _receive(self, position: np.ndarray, length: int) -> dict[int, np.ndarray]:
        """What the others say of a step, by rank."""
        return {rank: self._receive_from(rank, position, length) for rank in self._senders}

    def _receive_from(self, rank: int, position: np.ndarray, length: int) -> np.ndarray:
        expected = (self._number, *map(int, position))
        message = np.empty(4 + length, np.int64)
        while True:
            wait_polling(self._communicator.Irecv(message, rank, self._tag), "data")
            said = tuple(int(number) for number in message[:3])
            if said == expected:
                self._in_doubt = self._in_doubt or bool(message[3])  # it is passed on
                return message[4:]
            if said == (*expected[:2], _GIVEN_UP):
                error = MismatchError(
                    f"Rank {rank} cannot continue, as its data do not match those of another rank."
                )
                error._tnt_is_echo = True  # type: ignore[attr-defined]  # it knows more
                raise error
            if said > expected:
                raise MismatchError(
                    f"Rank {rank} has iterated over its data more often than rank "
                    f"{world.get_rank()}: all ranks must iterate over a dataset equally often."
                )
            # Otherwise it is from a pass that was abandoned.


def _key(position: np.ndarray) -> tuple[int, int]:
    return int(position[0]), int(position[1])
