"""Each rank's part of the batches of a dataset, split off where that is cheapest.

To cut a finished batch is always right, but then every rank has prepared all of it. So a
pipeline is taken apart, and its transformations are put together again behind the split:

- Samples are told apart where they are still raw: the elements of a batch are counted off in
  front of the `map`s that work on one element each, and these see only the elements of this
  rank. A `map` can trade places with whatever only picks and orders elements (`shuffle`,
  `repeat`, `take`, `zip`...), not with what looks at them or changes their number (`filter`,
  `flat_map`, `interleave`...).
- What is done with whole batches without looking into them (`repeat`, `shuffle`, `cache`...)
  is done with the parts. So is a `map` of batches, if it provably treats each row by itself.

A part comes with its size and that of its batch: every rank has counted all elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella.data import micro_batch, order, pipeline
from tarantella.data.micro_batch import MicroBatch
from tarantella.data.padding import Padding
from tarantella.data.rowwise import what_mixes_rows
from tarantella.runtime.log import LOGGER

# What only picks elements, and orders them: a `map` before it can as well stand behind it.
_PICKS = (pipeline.Repeat, pipeline.Shard, pipeline.Shuffle, pipeline.Skip, pipeline.Take)
# What treats batches alike, whatever is in them.
_TREATS_ALIKE = (*_PICKS, pipeline.Cache, pipeline.Options, pipeline.Prefetch)

_NO_MARK = np.int64(0)

Change = Callable[[Any], Any]
Stage = Callable[[tf.data.Dataset, int], tf.data.Dataset]


@dataclass(frozen=True)
class Split:
    """This rank's parts of the batches of a dataset.

    Attributes:
        parts: A dataset of `Part`s.
        padding: How each part is to be padded to the longest sample of its batch.
        finish: What is to be done with the data of a part when it is padded.
        unused: What was made of it to go through it, and can be used again.
    """

    parts: tf.data.Dataset
    padding: Padding | None = None
    finish: Change | None = None
    unused: list[Any] = field(default_factory=list)


def split(dataset: tf.data.Dataset, rank: int, size: int) -> Split:
    """The parts of `rank` in the batches of a dataset, which come in the order of all ranks."""
    dataset = _with_own_files(pipeline.unwrapped(dataset), f".rank{rank}of{size}")
    own = _Splitter(rank, size).of_batches(dataset)
    in_order = tf.data.Options()
    in_order.deterministic = True
    own_parts = own.parts.with_options(dataset.options()).with_options(in_order)
    return Split(own_parts, own.padding)


def cut(dataset: tf.data.Dataset, rank: int, size: int, marked: bool = True) -> Split:
    """The parts of `rank` in the batches of a dataset, taken when each batch is made.

    Args:
        dataset: The dataset.
        rank: The number of the rank.
        size: How many ranks there are.
        marked: Whether parts get a mark, as the batches are the same on all ranks.
    """

    @tf.autograph.experimental.do_not_convert
    def part_of(*batch: Any) -> MicroBatch:
        whole = pipeline.as_one(batch, dataset.element_spec)
        return micro_batch.cut(whole, rank, size)._replace(
            mark=micro_batch.mark(whole) if marked else _NO_MARK
        )

    # Not in parallel: to hand a batch over to another thread costs more than to cut it.
    return Split(dataset.map(part_of))


def find_batch_size(dataset: tf.data.Dataset) -> int | None:
    """The size of the batches of a dataset, if a `batch` of some form says so."""
    dataset = pipeline.unwrapped(dataset)
    if isinstance(dataset, (*pipeline.Batch, pipeline.PaddedBatch)):
        return int(pipeline.constant(dataset._batch_size))
    if isinstance(dataset, pipeline.Rebatch):
        sizes = set(np.ravel(pipeline.constant(dataset._batch_sizes)).tolist())
        return sizes.pop() if len(sizes) == 1 else None
    if isinstance(dataset, (*_TREATS_ALIKE, *pipeline.Map, pipeline.Zip, pipeline.Concatenate)):
        return next(filter(None, map(find_batch_size, pipeline.sources(dataset))), None)
    return None


# Elements, and the stages they go through


@dataclass(frozen=True)
class _Map:
    """A `map`, as a stage that elements go through with their tag.

    Attributes:
        function: What it applies to an element.
        parallel: How many elements it works on at a time; None: one.
        within: What makes a function of whole elements of one of elements that it applies to.
    """

    function: Any
    parallel: int | None
    within: Callable[[Change], Change] = lambda change: change

    def __call__(self, tagged: tf.data.Dataset, rank: int) -> tf.data.Dataset:
        function = order.drawing_as_rank(self.function, rank)
        change = self.within(partial(pipeline.call, function))

        @tf.autograph.experimental.do_not_convert
        def change_element(tag: tf.Tensor, element: Any) -> Any:
            return tag, change(element)

        return tagged.map(change_element, num_parallel_calls=self.parallel)

    def in_component(self, zipped: tf.data.Dataset, index: int) -> _Map:
        """The same for elements of a `zip` that has its elements in one place."""

        def within(change: Change) -> Change:
            return pipeline.in_component(zipped, index, self.within(change))

        return replace(self, within=within)


@dataclass(frozen=True)
class _Again:
    """A transformation that does not mind the tags."""

    dataset: tf.data.Dataset

    def __call__(self, tagged: tf.data.Dataset, rank: int) -> tf.data.Dataset:
        return pipeline.over(self.dataset, lambda _: tagged)


@dataclass(frozen=True)
class _Lifted:
    """A dataset as a simpler one, and the stages that lead from there.

    Each stage makes exactly one element of each.

    Attributes:
        base: The simpler dataset.
        stages: The stages.
        shortened: Whether something was taken off the end of the base.
    """

    base: tf.data.Dataset
    stages: tuple[Stage, ...] = ()
    shortened: bool = False

    @property
    def saves_work(self) -> bool:
        return any(isinstance(stage, _Map) for stage in self.stages)

    def and_then(self, stage: Stage) -> _Lifted:
        return replace(self, stages=(*self.stages, stage), shortened=True)

    def picked_by(self, dataset: tf.data.Dataset) -> _Lifted:
        """The same behind what only picks elements of the base."""
        base = pipeline.set_apart(self.base) if self.shortened else self.base
        picked = order.in_common_order(dataset, lambda _: base)
        return replace(self, base=picked, shortened=False)


def _lift(dataset: tf.data.Dataset, settled: bool = True) -> _Lifted:
    """Takes the one-to-one transformations off the end of a dataset of elements.

    Args:
        dataset: The dataset.
        settled: Whether an element has the same place in its batch each time the dataset is
            iterated; only then can this rank's elements be cached.
    """
    if isinstance(dataset, pipeline.Zip):
        return _lift_zip(dataset)
    if isinstance(dataset, pipeline.Map):
        (function,) = pipeline.functions(dataset)
        stage = _Map(function, pipeline.parallel_calls(dataset))
        if pipeline.is_identity(dataset):  # in all but the structure of the elements
            lifted = _lift_source(dataset, settled)
            return replace(lifted, stages=(*lifted.stages, stage))
        if pipeline.changes_state(function):  # it counts samples, say, and must see them all
            return _Lifted(dataset)
        return _lift_source(dataset, settled).and_then(stage)
    if isinstance(dataset, _PICKS) and order.keeps_order(dataset):
        lifted = _lift_source(dataset, settled=False)
        if lifted.stages:
            return lifted.picked_by(dataset)
    elif isinstance(dataset, (pipeline.Prefetch, pipeline.DenseToRagged)) or (
        isinstance(dataset, pipeline.Cache)
        and not pipeline.file_of(dataset)
        # Who goes through it first fixes the order for all, and may be someone else.
        and settled
        and order.is_settled(dataset)
    ):
        lifted = _lift_source(dataset, settled)
        if lifted.stages:
            return lifted.and_then(_Again(dataset))
    elif isinstance(dataset, pipeline.Options):  # `split` sees to the options of all
        return replace(_lift_source(dataset, settled), shortened=True)
    return _Lifted(dataset)


def _lift_source(dataset: tf.data.Dataset, settled: bool) -> _Lifted:
    (source,) = pipeline.sources(dataset)
    return _lift(source, settled)


def _lift_zip(dataset: tf.data.Dataset) -> _Lifted:
    """A `zip` of mapped datasets is a mapped `zip`."""
    bases: list[tf.data.Dataset] = []
    stages: list[Stage] = []
    for index, member in enumerate(pipeline.sources(dataset)):
        lifted = _lift(member, settled=False)
        maps = [stage for stage in lifted.stages if isinstance(stage, _Map)]
        if len(maps) + _count_prefetches(lifted.stages) < len(lifted.stages):
            lifted, maps = _Lifted(member), []
        bases.append(lifted.base)
        stages += [stage.in_component(dataset, index) for stage in maps]
    if not stages:
        return _Lifted(dataset)
    return _Lifted(pipeline.with_components(dataset, bases), tuple(stages))


def _count_prefetches(stages: Iterable[Stage]) -> int:
    return sum(isinstance(s, _Again) and isinstance(s.dataset, pipeline.Prefetch) for s in stages)


# Batches


@dataclass(frozen=True)
class _Splitter:
    """Makes the parts of one rank."""

    rank: int
    size: int

    def of_batches(self, dataset: tf.data.Dataset) -> Split:
        """The parts of the batches of a dataset."""
        if isinstance(dataset, (*pipeline.Batch, pipeline.PaddedBatch)):
            return self._of_batching(dataset)
        if isinstance(dataset, pipeline.Rebatch):
            return self._of_rebatching(dataset)
        if isinstance(dataset, pipeline.Cache):
            return self._of_cache(dataset)
        if isinstance(dataset, _TREATS_ALIKE) and order.keeps_order(dataset):
            return self._of_like_treatment(dataset)
        if isinstance(dataset, (pipeline.Concatenate, pipeline.DirectedInterleave)):
            return self._of_several(dataset)
        if isinstance(dataset, pipeline.Zip):
            return self._of_zip(dataset)
        if isinstance(dataset, pipeline.Map):
            return self._of_map(dataset)
        return self._cut(dataset)

    def _of_like_treatment(self, dataset: tf.data.Dataset) -> Split:
        """The parts of batches that are all treated alike: so are the parts."""
        (source,) = pipeline.sources(dataset)
        own = self.of_batches(source)
        if isinstance(dataset, pipeline.Options):  # `split` sees to the options of all
            return replace(own, parts=pipeline.set_apart(own.parts))
        return replace(own, parts=order.in_common_order(dataset, lambda _: own.parts))

    def _of_cache(self, dataset: tf.data.Dataset) -> Split:
        """The parts of cached batches, cached; once for all that is made of the cache.

        What is in it already stays as it is.
        """
        cached: dict[_Splitter, Split] = vars(dataset).setdefault("_tnt_parts", {})
        if self not in cached:
            divided = not _holds_an_order(dataset)
            cached[self] = self._of_like_treatment(dataset) if divided else self._cut(dataset)
        return cached[self]

    def _cut(self, dataset: tf.data.Dataset, because_of: str = "") -> Split:
        """Takes the part of each finished batch."""
        _tell_what_is_not_divided(dataset, because_of or f"`{pipeline.name_of(dataset)}`")
        marked = not order.may_draw(dataset)
        return cut(order.with_common_order(dataset), self.rank, self.size, marked)

    def _of_batching(self, dataset: Any) -> Split:
        """The parts of batches of elements, each made of this rank's elements only."""
        (source,) = pipeline.sources(dataset)
        lifted = _lift(source)
        batch_size = pipeline.constant(dataset._batch_size)
        if batch_size is None or not lifted.saves_work:
            return self._cut(dataset, f"`{pipeline.name_of(lifted.base)}`")
        _tell_what_is_not_divided(lifted.base, f"`{pipeline.name_of(lifted.base)}`")
        tagged = self._own_elements(
            order.with_common_order(lifted.base),
            int(batch_size),
            pipeline.drops_remainder(dataset),
        )
        for stage in lifted.stages:
            tagged = stage(tagged, self.rank)
        _, share = micro_batch.bounds(int(batch_size), self.rank, self.size)
        batches, padding = pipeline.batched_like(tagged, dataset, max(share, 1))

        @tf.autograph.experimental.do_not_convert
        def part_of(tags: tf.Tensor, data: Any) -> MicroBatch:
            return MicroBatch(tags[0, 0], tags[0, 1], data, tags[0, 2])

        return Split(batches.map(part_of), padding)

    def _own_elements(
        self, dataset: tf.data.Dataset, batch_size: int, drop_remainder: bool
    ) -> tf.data.Dataset:
        """This rank's elements of each batch to be, tagged.

        A tag is the number of this rank's elements, that of all, and the mark of the batch.
        """

        @tf.autograph.experimental.do_not_convert
        def own(*window: Any) -> tf.data.Dataset:
            window = pipeline.as_one(window, windows.element_spec)
            total = pipeline.leaves(window)[0].cardinality()
            begin, count = micro_batch.bounds(total, self.rank, self.size)
            first = [pipeline.first(one) for one in pipeline.leaves(window)] if marked else []
            mark = micro_batch.mark_of_one(first)
            tag = tf.data.Dataset.from_tensors(tf.stack([count, total, mark])).repeat()
            members = [
                member.skip(tf.minimum(begin, total - 1)).take(tf.maximum(count, 1))
                for member in pipeline.leaves(window)
            ]
            return tf.data.Dataset.zip((tag, pipeline.packed(window, members)))

        marked = not order.may_draw(dataset)
        windows = dataset.window(batch_size, drop_remainder=drop_remainder)
        return windows.flat_map(own)

    def _of_rebatching(self, dataset: Any) -> Split:
        """Batches of batches: where the first ones leave no trace, only the last ones count."""
        source = pipeline.rebatched(dataset)
        while isinstance(source, (pipeline.Prefetch, pipeline.Options)):
            (source,) = pipeline.sources(source)
        sizes = pipeline.constant(dataset._batch_sizes)
        if not isinstance(source, pipeline.Batch) or pipeline.drops_remainder(source):
            return self._cut(dataset)
        if sizes is None or np.ndim(sizes):
            return self._cut(dataset)
        (elements,) = pipeline.sources(source)
        drop_remainder = pipeline.drops_remainder(dataset)
        return self.of_batches(elements.batch(int(sizes), drop_remainder=drop_remainder))

    def _of_several(self, dataset: Any) -> Split:
        """Batches that come from several datasets: parts that come from their parts."""
        own = {
            id(source): self.of_batches(source)
            for source in pipeline.sources(dataset)
            if source is not pipeline.selector(dataset)
        }
        if any(one.padding for one in own.values()):
            return self._cut(dataset)

        def parts_of(source: tf.data.Dataset) -> tf.data.Dataset:
            if id(source) in own:
                return own[id(source)].parts
            return order.with_common_order(source)

        return Split(order.in_common_order(dataset, parts_of))

    def _of_zip(self, dataset: Any) -> Split:
        """Batches side by side: parts side by side, if the batches are of one size."""
        members = pipeline.sources(dataset)
        if not all(micro_batch.is_batched(member.element_spec) for member in members):
            return self._cut(dataset)
        own = [self.of_batches(member) for member in members]
        if any(one.padding for one in own):
            return self._cut(dataset)
        zipped = tf.data.Dataset.zip(tuple(one.parts for one in own))

        @tf.autograph.experimental.do_not_convert
        def joined(*several: MicroBatch) -> MicroBatch:
            total = micro_batch.common_total([one.total for one in several])
            data = pipeline.packed(pipeline.components(dataset), [one.data for one in several])
            mark = reduce(tf.bitwise.bitwise_xor, [one.mark for one in several])
            return MicroBatch(several[0].count, total, data, mark)

        return Split(zipped.map(joined))

    def _of_map(self, dataset: Any) -> Split:
        """What a `map` makes of batches, made of parts if it does not mix their rows."""
        (source,) = pipeline.sources(dataset)
        # To Keras an OrderedDict is not the dict that it is equal to.
        is_alike = repr(source.element_spec) == repr(dataset.element_spec)
        if is_alike and pipeline.is_identity(dataset):
            return self.of_batches(source)
        function = pipeline.for_any_batch_size(dataset)
        if function is None:
            return self._cut(dataset, "`map` (of batches of a fixed size, in a loop)")
        mixing = what_mixes_rows(function.function)
        if mixing:
            return self._cut(dataset, f"`map` (of batches, with {mixing})")
        own = self.of_batches(source)
        if own.padding:
            return self._cut(dataset, "`map` (of padded batches)")
        function = order.drawing_as_rank(function, self.rank)

        @tf.autograph.experimental.do_not_convert
        def changed(part: MicroBatch) -> MicroBatch:
            return part._replace(data=pipeline.call(function, part.data))

        calls = pipeline.parallel_calls(dataset)
        return Split(own.parts.map(changed, num_parallel_calls=calls))


def _holds_an_order(cache: tf.data.Dataset) -> bool:
    """Whether going through a cache before may have fixed the order of what is in it."""
    if pipeline.file_of(cache) or order.is_settled(cache):
        return False
    return not pipeline.has_light_input(cache) or pipeline.is_filled(cache)


def _tell_what_is_not_divided(dataset: tf.data.Dataset, because_of: str) -> None:
    if any(isinstance(one, pipeline.Map) for one in pipeline.ancestors(dataset)):
        LOGGER.info(
            "Every rank prepares all samples up to %s in the dataset; what comes behind it is "
            "divided among the ranks.",
            because_of,
        )


# Files


def _with_own_files(dataset: tf.data.Dataset, suffix: str) -> tf.data.Dataset:
    """The dataset, with a file of this rank's for each that ranks must not write together."""
    if not any(pipeline.file_of(one) for one in pipeline.ancestors(dataset)):
        return dataset
    changed = pipeline.over(dataset, lambda source: _with_own_files(source, suffix))
    file = pipeline.file_of(dataset)
    return pipeline.with_file(changed, file + suffix) if file else changed
