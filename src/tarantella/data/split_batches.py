"""Taking a pipeline of batches apart, and putting it together again for one rank's micro-batches.

What is done with whole batches without looking into them (`repeat`, `shuffle`, `cache`...) is done
with the micro-batches. So is a `map` of batches, if it provably treats each row by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella.data import dataset_state, micro_batch, order, pipeline, rebuild
from tarantella.data.cut import Split, cut
from tarantella.data.dataset_functions import for_any_batch_size, is_identity
from tarantella.data.micro_batch import MicroBatch
from tarantella.data.rowwise import what_mixes_rows
from tarantella.data.split_elements import PICKS, lift
from tarantella.internals import tensorflow as internals
from tarantella.internals.tensorflow import argument, concrete, is_a, parallel_calls, sources
from tarantella.runtime.log import LOGGER

# What treats batches alike, whatever is in them.
TREATS_ALIKE = (*PICKS, internals.CACHE, internals.OPTIONS, internals.PREFETCH)


@dataclass(frozen=True)
class Splitter:
    """Makes the micro-batches of one rank."""

    rank: int
    size: int

    def of_batches(self, dataset: tf.data.Dataset) -> Split:
        """The micro-batches of the batches of a dataset."""
        if is_a(dataset, internals.BATCH, internals.PADDED_BATCH):
            return self._of_batching(dataset)
        if is_a(dataset, internals.REBATCH):
            return self._of_rebatching(dataset)
        if is_a(dataset, internals.CACHE):
            return self._of_cache(dataset)
        if is_a(dataset, *TREATS_ALIKE) and order.keeps_order(dataset):
            return self._of_like_treatment(dataset)
        if is_a(dataset, internals.CONCATENATE, internals.DIRECTED_INTERLEAVE):
            return self._of_several(dataset)
        if is_a(dataset, internals.ZIP):
            return self._of_zip(dataset)
        if is_a(dataset, internals.MAP):
            return self._of_map(dataset)
        return self._cut(dataset)

    def _of_like_treatment(self, dataset: tf.data.Dataset) -> Split:
        """Batches that are all treated alike: so are the micro-batches."""
        (source,) = sources(dataset)
        own = self.of_batches(source)
        if is_a(dataset, internals.OPTIONS):  # `split` takes over the options of all
            treated = rebuild.set_apart(own.micro_batches)
        else:
            treated = order.in_common_order(dataset, lambda _: own.micro_batches)
        return replace(own, micro_batches=treated)

    def _of_cache(self, dataset: tf.data.Dataset) -> Split:
        """The micro-batches of cached batches, cached; once for all that is made of the cache.

        What is in it already stays as it is.
        """
        cached: dict[Splitter, Split] = vars(dataset).setdefault("_tnt_micro_batches", {})
        if self not in cached:
            divided = not _holds_an_order(dataset)
            cached[self] = self._of_like_treatment(dataset) if divided else self._cut(dataset)
        return cached[self]

    def _cut(self, dataset: tf.data.Dataset, because_of: str = "") -> Split:
        """Cuts each finished batch."""
        _tell_what_is_not_divided(dataset, because_of or f"`{pipeline.name_of(dataset)}`")
        fingerprinted = not order.may_draw(dataset)
        return cut(order.with_common_order(dataset), self.rank, self.size, fingerprinted)

    def _of_batching(self, dataset: tf.data.Dataset) -> Split:
        """Batches of elements: micro-batches that are made of this rank's elements only."""
        (source,) = sources(dataset)
        lifted = lift(source)
        batch_size = pipeline.batch_size(dataset)
        if batch_size is None or not lifted.saves_work:
            return self._cut(dataset, f"`{pipeline.name_of(lifted.base)}`")
        _tell_what_is_not_divided(lifted.base, f"`{pipeline.name_of(lifted.base)}`")
        tagged = self._own_elements(
            order.with_common_order(lifted.base), batch_size, pipeline.drops_remainder(dataset)
        )
        for stage in lifted.stages:
            tagged = stage(tagged, self.rank)
        _, share = micro_batch.bounds(batch_size, self.rank, self.size)
        batches, padding = rebuild.batched_like(tagged, dataset, max(share, 1))

        @tf.autograph.experimental.do_not_convert
        def micro_batch_of(tags: tf.Tensor, data: Any) -> MicroBatch:
            return MicroBatch(tags[0, 0], tags[0, 1], data, tags[0, 2])

        return Split(internals.map_inline(batches, micro_batch_of), padding)

    def _own_elements(
        self, dataset: tf.data.Dataset, batch_size: int, drop_remainder: bool
    ) -> tf.data.Dataset:
        """This rank's elements of each future batch, tagged.

        A tag is the number of this rank's elements, that of all, and the batch's fingerprint.
        """

        @tf.autograph.experimental.do_not_convert
        def own(*window: Any) -> tf.data.Dataset:
            window = pipeline.as_one(window, windows.element_spec)
            datasets = tf.nest.flatten(window)
            total = datasets[0].cardinality()
            begin, count = micro_batch.bounds(total, self.rank, self.size)
            first = [pipeline.first(one) for one in datasets] if fingerprinted else []
            fingerprint = micro_batch.fingerprint(first)
            tag = tf.data.Dataset.from_tensors(tf.stack([count, total, fingerprint])).repeat()
            members = [
                member.skip(tf.minimum(begin, total - 1)).take(tf.maximum(count, 1))
                for member in datasets
            ]
            return tf.data.Dataset.zip((tag, tf.nest.pack_sequence_as(window, members)))

        fingerprinted = not order.may_draw(dataset)
        windows = dataset.window(batch_size, drop_remainder=drop_remainder)
        return windows.flat_map(own)

    def _of_rebatching(self, dataset: tf.data.Dataset) -> Split:
        """Batches of batches: if nothing remains of the first ones, only the last ones count."""
        source = pipeline.rebatched(dataset)
        while is_a(source, internals.PREFETCH, internals.OPTIONS):
            (source,) = sources(source)
        sizes = pipeline.constant(argument(dataset, "batch_sizes"))
        if not is_a(source, internals.BATCH) or pipeline.drops_remainder(source):
            return self._cut(dataset)
        if sizes is None or np.ndim(sizes):
            return self._cut(dataset)
        (elements,) = sources(source)
        drop_remainder = pipeline.drops_remainder(dataset)
        return self.of_batches(elements.batch(int(sizes), drop_remainder=drop_remainder))

    def _of_several(self, dataset: tf.data.Dataset) -> Split:
        """Batches that come from several datasets: so do the micro-batches."""
        own = {
            id(source): self.of_batches(source)
            for source in sources(dataset)
            if source is not pipeline.selector(dataset)
        }
        if any(one.padding for one in own.values()):
            return self._cut(dataset)

        def micro_batches_of(source: tf.data.Dataset) -> tf.data.Dataset:
            if id(source) in own:
                return own[id(source)].micro_batches
            return order.with_common_order(source)

        return Split(order.in_common_order(dataset, micro_batches_of))

    def _of_zip(self, dataset: tf.data.Dataset) -> Split:
        """Batches side by side: so are the micro-batches, if the batches are of one size."""
        members = sources(dataset)
        if not all(micro_batch.is_batched(member.element_spec) for member in members):
            return self._cut(dataset)
        own = [self.of_batches(member) for member in members]
        if any(one.padding for one in own):
            return self._cut(dataset)
        zipped = tf.data.Dataset.zip(tuple(one.micro_batches for one in own))
        structure = tf.nest.map_structure(lambda _: 0, pipeline.components(dataset))

        @tf.autograph.experimental.do_not_convert
        def joined(*several: MicroBatch) -> MicroBatch:
            total = micro_batch.common_total([one.total for one in several])
            data = tf.nest.pack_sequence_as(structure, [one.data for one in several])
            fingerprint = reduce(tf.bitwise.bitwise_xor, [one.fingerprint for one in several])
            return MicroBatch(several[0].count, total, data, fingerprint)

        return Split(zipped.map(joined))

    def _of_map(self, dataset: tf.data.Dataset) -> Split:
        """What a `map` makes of batches, made of micro-batches if it does not mix their rows."""
        (source,) = sources(dataset)
        # To Keras an OrderedDict is not the dict that it is equal to.
        is_alike = repr(source.element_spec) == repr(dataset.element_spec)
        if is_alike and is_identity(dataset):
            return self.of_batches(source)
        function = for_any_batch_size(dataset)
        if function is None:
            return self._cut(dataset, "`map` (of batches of a fixed size, in a loop)")
        mixing = what_mixes_rows(concrete(function))
        if mixing:
            return self._cut(dataset, f"`map` (of batches, with {mixing})")
        own = self.of_batches(source)
        if own.padding:
            return self._cut(dataset, "`map` (of padded batches)")
        function = order.drawing_as_rank(function, self.rank)

        @tf.autograph.experimental.do_not_convert
        def changed(one: MicroBatch) -> MicroBatch:
            return one._replace(data=internals.call(function, one.data))

        return Split(own.micro_batches.map(changed, num_parallel_calls=parallel_calls(dataset)))


def _holds_an_order(cache: tf.data.Dataset) -> bool:
    """Whether an earlier pass over a cache may have fixed the order of what is in it."""
    if pipeline.file_of(cache) or order.has_fixed_order(cache):
        return False
    return not dataset_state.can_be_written_out(cache) or dataset_state.is_filled(cache)


def _tell_what_is_not_divided(dataset: tf.data.Dataset, because_of: str) -> None:
    if any(is_a(one, internals.MAP) for one in pipeline.ancestors(dataset)):
        LOGGER.info(
            "Every rank prepares all samples up to %s in the dataset; what comes after it is "
            "divided among the ranks.",
            because_of,
        )
