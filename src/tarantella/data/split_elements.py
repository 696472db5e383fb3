"""Moving the `map`s of single elements after the split, so that a rank maps only its own elements.

A `map` can trade places with whatever only picks and orders elements (`shuffle`, `repeat`, `take`,
`zip`...), not with what looks at them or changes their number (`filter`, `flat_map`,
`interleave`...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tensorflow as tf

from tarantella.data import order, pipeline, rebuild
from tarantella.data.cut import Change
from tarantella.data.dataset_functions import changes_state, is_identity
from tarantella.internals import tensorflow as internals
from tarantella.internals.tensorflow import functions, is_a, parallel_calls, sources

# What only picks elements, and orders them: a `map` before it can come after it as well.
PICKS = (internals.REPEAT, internals.SHARD, internals.SHUFFLE, internals.SKIP, internals.TAKE)

Stage = Callable[[tf.data.Dataset, int], tf.data.Dataset]


@dataclass(frozen=True)
class Map:
    """A `map`, as a stage that elements go through with their tag.

    Attributes:
        function: What it applies to an element.
        parallel: How many elements it works on at a time; None: one.
        within: Turns a function of the elements that it applies to into one of whole elements.
    """

    function: Any
    parallel: int | None
    within: Callable[[Change], Change] = lambda change: change

    def __call__(self, tagged: tf.data.Dataset, rank: int) -> tf.data.Dataset:
        function = order.drawing_as_rank(self.function, rank)
        change = self.within(partial(internals.call, function))

        @tf.autograph.experimental.do_not_convert
        def change_element(tag: tf.Tensor, element: Any) -> Any:
            return tag, change(element)

        return tagged.map(change_element, num_parallel_calls=self.parallel)

    def in_component(self, zipped: tf.data.Dataset, index: int) -> Map:
        """The same `map`, for one component of the elements of a `zip`."""

        def within(change: Change) -> Change:
            return rebuild.in_component(zipped, index, self.within(change))

        return replace(self, within=within)


@dataclass(frozen=True)
class Reapply:
    """Applies a transformation to tagged elements, which it does not look into: `prefetch`, say."""

    dataset: tf.data.Dataset

    def __call__(self, tagged: tf.data.Dataset, rank: int) -> tf.data.Dataset:
        return rebuild.over(self.dataset, lambda _: tagged)


@dataclass(frozen=True)
class Lifted:
    """A dataset as a simpler one, and the stages that turn that into it.

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
        return any(isinstance(stage, Map) for stage in self.stages)

    def and_then(self, stage: Stage) -> Lifted:
        return replace(self, stages=(*self.stages, stage), shortened=True)

    def picked_by(self, dataset: tf.data.Dataset) -> Lifted:
        """The same stages after a transformation that only picks elements of the base."""
        base = rebuild.set_apart(self.base) if self.shortened else self.base
        picked = order.in_common_order(dataset, lambda _: base)
        return replace(self, base=picked, shortened=False)


def lift(dataset: tf.data.Dataset, fixed_order: bool = True) -> Lifted:
    """Takes the one-to-one transformations off the end of a dataset of elements.

    Args:
        dataset: The dataset.
        fixed_order: Whether an element has the same position in its batch each time the dataset is
            iterated; only then can this rank's elements be cached.
    """
    if is_a(dataset, internals.ZIP):
        return _lift_zip(dataset)
    if is_a(dataset, internals.MAP):
        (function,) = functions(dataset)
        stage = Map(function, parallel_calls(dataset))
        if is_identity(dataset):  # in all but the structure of the elements
            lifted = _lift_source(dataset, fixed_order)
            return replace(lifted, stages=(*lifted.stages, stage))
        if changes_state(function):  # it counts samples, say, and must see them all
            return Lifted(dataset)
        return _lift_source(dataset, fixed_order).and_then(stage)
    if is_a(dataset, *PICKS) and order.keeps_order(dataset):
        lifted = _lift_source(dataset, fixed_order=False)
        if lifted.stages:
            return lifted.picked_by(dataset)
    elif is_a(dataset, internals.PREFETCH, internals.DENSE_TO_RAGGED) or (
        is_a(dataset, internals.CACHE)
        and not pipeline.file_of(dataset)
        # The first to iterate over it fixes the order for all, and may be someone else.
        and fixed_order
        and order.has_fixed_order(dataset)
    ):
        lifted = _lift_source(dataset, fixed_order)
        if lifted.stages:
            return lifted.and_then(Reapply(dataset))
    elif is_a(dataset, internals.OPTIONS):  # `split` takes over the options of all
        return replace(_lift_source(dataset, fixed_order), shortened=True)
    return Lifted(dataset)


def _lift_source(dataset: tf.data.Dataset, fixed_order: bool) -> Lifted:
    (source,) = sources(dataset)
    return lift(source, fixed_order)


def _lift_zip(dataset: tf.data.Dataset) -> Lifted:
    """A `zip` of mapped datasets is a mapped `zip`."""
    bases: list[tf.data.Dataset] = []
    stages: list[Stage] = []
    for index, member in enumerate(sources(dataset)):
        lifted = lift(member, fixed_order=False)
        maps = [stage for stage in lifted.stages if isinstance(stage, Map)]
        if len(maps) + _count_prefetches(lifted.stages) < len(lifted.stages):
            lifted, maps = Lifted(member), []
        bases.append(lifted.base)
        stages += [stage.in_component(dataset, index) for stage in maps]
    if not stages:
        return Lifted(dataset)
    return Lifted(rebuild.with_components(dataset, bases), tuple(stages))


def _count_prefetches(stages: Iterable[Stage]) -> int:
    return sum(isinstance(s, Reapply) and is_a(s.dataset, internals.PREFETCH) for s in stages)
