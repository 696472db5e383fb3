"""The steps of all ranks, taken together: how large each is, and when they end.

Before a rank takes a step it has to know how many samples all ranks have in it, and that
none of them has come to its end. So each rank announces the numbers of a step as soon as
its input pipeline has it ready, some steps ahead, and hears those of the others when it
takes the step, by when they have long arrived.

Only the announcing runs ahead in the pipeline, and it never waits. A dataset that is left
in the middle leaves nothing behind but a few messages that are never read.
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

from tarantella.comm.waiting import wait_aside
from tarantella.data import pipeline
from tarantella.data.micro_batch import MicroBatch, slice_rows
from tarantella.data.split import Split
from tarantella.errors import InputError, MismatchError
from tarantella.graph.host_call import host_call
from tarantella.runtime import devices, times, watch, world
from tarantella.runtime.configuration import configuration
from tarantella.runtime.log import LOGGER

_LARGEST_TAG = 2**15  # what every MPI library allows
# Where in the numbers of a step there are those of this rank's samples and of all, the mark of
# the batch, and the sizes of the longest samples.
_COUNT, _TOTAL, _MARK, _SIZES = range(4)
_ENDED = -1
_NO_PASS = -1
_GIVEN_UP = 2**62  # a step that no rank ever comes to

# Threads that train at the same time have communicators, and so numbers, of their own.
_numbers: defaultdict[Any, Iterator[int]] = defaultdict(itertools.count)


class Steps:
    """The exchange of numbers between the ranks that go through the same data together.

    Args:
        split: This rank's parts. All ranks make their `Steps` in the same order.
        own_data: Whether the ranks' data are their own, and a step is made of what each has
            in it; otherwise they share batches, and must agree on how large these are.

    Attributes:
        dataset: The parts, each with the size of its step over all ranks.
    """

    def __init__(self, split: Split, own_data: bool = False) -> None:
        self._own_data = own_data
        self._padding = split.padding
        self._finish = split.finish or (lambda data: data)
        self.dataset = split.parts
        if split.finish is not None and world.get_size() == 1:
            self.dataset = split.parts.map(self._finished)
        if world.get_size() > 1:
            self._exchange = _Exchange(own_data, everyone=own_data or split.padding is not None)
            self._spec = split.parts.element_spec.data
            self.dataset = self._agreed(split.parts)

    @property
    def problem(self) -> Exception | None:
        """Why the ranks could not go on, if they could not."""
        return None if world.get_size() == 1 else self._exchange.problem

    def on_next_step(self, tell: Callable[[int], None]) -> None:
        """Has `tell` called once, with the number of samples of all ranks in the next step."""
        if world.get_size() > 1:
            self._exchange.on_next_step = tell

    def _agreed(self, parts: tf.data.Dataset) -> tf.data.Dataset:
        before_the_first = tf.constant(_NO_PASS, tf.int64)
        marked = self._ended_by_a_mark(parts)
        announced = marked.scan(before_the_first, self._announce)
        taken = announced.prefetch(tf.data.AUTOTUNE).take_while(self._goes_on)
        # A `map` could be made parallel by TensorFlow, and then run ahead.
        agreed = taken.scan(pipeline.empty_box(), self._unboxed)
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False  # would hear ahead of the steps
        if parts.options().threading.private_threadpool_size is None:
            # One more than usual: hearing keeps a thread waiting, and the others prepare data.
            options.threading.private_threadpool_size = devices.thread_count(configuration()) + 1
        return agreed.with_options(options)

    def _ended_by_a_mark(self, parts: tf.data.Dataset) -> tf.data.Dataset:
        """The numbers of each part, and the part in a box, which is empty at the end."""

        @tf.autograph.experimental.do_not_convert
        def boxed(part: MicroBatch) -> Any:
            mark = part.mark if isinstance(part.mark, tf.Tensor) else tf.constant(0, tf.int64)
            numbers = [tf.stack([part.count, part.total, mark])]
            if self._padding:
                numbers.append(self._padding.sizes(part.data))
            return tf.concat(numbers, 0), pipeline.boxed(self._spec, part.data)

        length = _SIZES + (self._padding.count if self._padding else 0)
        mark = tf.constant([_ENDED] + [0] * (length - 1), tf.int64)
        end = tf.data.Dataset.from_tensors((mark, pipeline.empty_box()))
        return parts.map(boxed).concatenate(end.repeat() if self._own_data else end)

    @tf.autograph.experimental.do_not_convert
    def _announce(self, pass_number: tf.Tensor, step: Any) -> Any:
        numbers, box = step
        place = host_call(self._exchange.announce, [pass_number, numbers], tf.int64)
        place = tf.ensure_shape(place, (2,))
        return place[0], (place, numbers, box)

    @tf.autograph.experimental.do_not_convert
    def _goes_on(self, place: tf.Tensor, numbers: tf.Tensor, box: tf.Tensor) -> tf.Tensor:
        del box
        goes_on = host_call(self._exchange.agree, [place, numbers], tf.bool)
        return tf.ensure_shape(goes_on, ())

    @tf.autograph.experimental.do_not_convert
    def _unboxed(self, last: tf.Tensor, step: Any) -> Any:
        """The part; where this rank's own data have ended, its last one, counting nothing."""
        place, numbers, box = step
        if self._own_data or self._padding:
            agreed = host_call(self._exchange.take_agreed, [place], tf.int64)
            numbers = tf.ensure_shape(agreed, numbers.shape)
        if self._own_data:
            box = tf.cond(pipeline.has_element(box), lambda: box, lambda: last)
        data = pipeline.unboxed(self._spec, box)
        if self._own_data:
            rows = tf.maximum(numbers[_COUNT], 1)
            data = tf.nest.map_structure(lambda leaf: slice_rows(leaf, 0, rows), data)
        if self._padding:
            data = self._padding.fill_up(data, numbers[_SIZES:])
        data = self._finish(data)
        return box if self._own_data else last, MicroBatch(numbers[_COUNT], numbers[_TOTAL], data)

    @tf.autograph.experimental.do_not_convert
    def _finished(self, part: MicroBatch) -> MicroBatch:
        return part._replace(data=self._finish(part.data))


def _sum_of_all(
    place: np.ndarray, numbers: np.ndarray, everyones: dict[int, np.ndarray]
) -> np.ndarray:
    ended = [rank for rank, one in everyones.items() if one[_COUNT] == _ENDED]
    if len(ended) == len(everyones):
        return numbers
    if ended and place[1] == 0:
        raise InputError(
            f"The data of rank {ended[0]} are empty: give every rank at least one batch."
        )
    counts = {rank: max(int(one[_COUNT]), 0) for rank, one in everyones.items()}
    own = counts[world.get_rank()]
    return np.array([own, sum(counts.values()), *numbers[_MARK:]], np.int64)


def _check_same_batch(
    place: np.ndarray, numbers: np.ndarray, everyones: dict[int, np.ndarray]
) -> None:
    for rank, theirs in everyones.items():
        if int(theirs[_TOTAL]) != int(numbers[_TOTAL]):
            raise MismatchError(
                f"The data differ between the ranks in step {int(place[1]) + 1}: rank "
                f"{world.get_rank()} has {_described(numbers)}, rank {rank} has "
                f"{_described(theirs)}. All ranks must be given the same data in the same order: "
                "seed what is random in it; or pass `tnt_distribute_dataset=False` if every rank "
                "brings its own part."
            )


def warn_of_different_data(evidence: str) -> None:
    """Tells that ranks which should have the same data do not."""
    LOGGER.warning(
        "The ranks do not have the same data: %s. So some samples are left out, and others are "
        "used twice. Seed what is random in the data, and let all ranks go through a dataset "
        "equally often before they train with it; or pass `tnt_distribute_dataset=False` if "
        "every rank brings its own part.",
        evidence,
    )


def _described(numbers: np.ndarray) -> str:
    return (
        "come to the end"
        if numbers[_COUNT] == _ENDED
        else f"a batch of {int(numbers[_TOTAL])} samples"
    )


class _Exchange:
    """Messages about steps, each marked with the pass over the data and the step in it."""

    def __init__(self, own_data: bool, everyone: bool) -> None:
        self.problem: Exception | None = None
        self.on_next_step: Callable[[int], None] | None = None
        self._own_data = own_data
        self._communicator = world.communicator("data")
        self._number = next(_numbers[self._communicator])
        rank, size = world.get_rank(), world.get_size()
        others = [other % size for other in range(rank + 1, rank + size)]
        # A difference shows between neighbours, too, if all that is asked for is to be alike.
        self._hearers = others if everyone else others[:1]
        self._speakers = others if everyone else others[-1:]
        self._passes = itertools.count()
        self._next_place = (0, 0)
        self._in_doubt = self._has_warned = False
        self._agreed: dict[tuple[int, int], np.ndarray] = {}
        self._sent: deque[tuple[Any, np.ndarray]] = deque()
        self._lock = threading.Lock()

    @property
    def _tag(self) -> int:
        return self._number % _LARGEST_TAG

    def announce(self, pass_number: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Tells the others the numbers of the next step of a pass, and returns its place."""
        with self._lock:
            number = next(self._passes) if pass_number == _NO_PASS else int(pass_number)
            place = max(self._next_place, (number, 0))
            if place[0] != number:
                return np.array([number, _GIVEN_UP], np.int64)  # nobody will take this step
            self._next_place = (number, place[1] + 1)
            self._send(np.array([self._number, *place, self._in_doubt, *numbers], np.int64))
        return np.array(place, np.int64)

    def agree(self, place: np.ndarray, numbers: np.ndarray) -> np.bool_:
        """Whether there is such a step, after what the others say; all are to take it then."""
        try:
            others = self._hear(place, len(numbers))
            everyones = {world.get_rank(): numbers, **others}
            if self._own_data:
                agreed = _sum_of_all(place, numbers, everyones)
            else:
                _check_same_batch(place, numbers, everyones)
                self._compare_marks(place, everyones)
                agreed = numbers
                if len(numbers) > _SIZES:
                    longest = np.max(list(everyones.values()), axis=0)
                    agreed = np.concatenate([numbers[:_SIZES], longest[_SIZES:]])
        except Exception as error:
            self._give_up(place)
            # A rank whose data fail looks like one whose data end. It is about to say why.
            time.sleep(times.TIME_FOR_DATA_ERROR)
            self.problem = error  # what TensorFlow makes of it is hard to read
            raise
        watch.note_step(int(place[1]) + 1)
        self._agreed = {_key(place): agreed}
        goes_on = agreed[_COUNT] != _ENDED
        if goes_on and self.on_next_step is not None:
            self.on_next_step(int(agreed[_TOTAL]))
            self.on_next_step = None
        return np.bool_(goes_on)

    def _compare_marks(self, place: np.ndarray, everyones: dict[int, np.ndarray]) -> None:
        """Warns once if the ranks' batches are not the same, as far as their marks tell."""
        self._in_doubt = self._in_doubt or len({int(one[_MARK]) for one in everyones.values()}) > 1
        if self._in_doubt and not self._has_warned:
            self._has_warned = True
            step = int(place[1]) + 1
            warn_of_different_data(f"up to step {step}, a batch began with different samples")

    def take_agreed(self, place: np.ndarray) -> np.ndarray:
        """The numbers of the step that was agreed on last.

        They are this rank's count, the sum of all counts, and the longest samples of all.
        """
        return self._agreed.pop(_key(place))

    def _give_up(self, place: np.ndarray) -> None:
        """Tells the others not to wait for this rank."""
        with self._lock:
            self._send(np.array([self._number, place[0], _GIVEN_UP], np.int64))

    def _send(self, message: np.ndarray) -> None:
        while self._sent and self._sent[0][0].Test():
            self._sent.popleft()
        for rank in self._hearers:
            self._sent.append((self._communicator.Isend(message, rank, self._tag), message))

    def _hear(self, place: np.ndarray, length: int) -> dict[int, np.ndarray]:
        """What the others say of a step, by rank."""
        return {rank: self._hear_from(rank, place, length) for rank in self._speakers}

    def _hear_from(self, rank: int, place: np.ndarray, length: int) -> np.ndarray:
        expected = (self._number, *map(int, place))
        message = np.empty(4 + length, np.int64)
        while True:
            wait_aside(self._communicator.Irecv(message, rank, self._tag), "data")
            said = tuple(int(number) for number in message[:3])
            if said == expected:
                self._in_doubt = self._in_doubt or bool(message[3])  # it goes round
                return message[4:]
            if said == (*expected[:2], _GIVEN_UP):
                raise MismatchError(
                    f"Rank {rank} cannot go on, as its data do not go together with another rank's."
                )
            if said > expected:
                raise MismatchError(
                    f"Rank {rank} goes through its data for another time than rank "
                    f"{world.get_rank()}: all ranks must iterate a dataset equally often."
                )
            # Otherwise it is from a pass that was not gone through to its end.


def _key(place: np.ndarray) -> tuple[int, int]:
    return int(place[0]), int(place[1])
