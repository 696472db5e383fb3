"""The same samples in the same order on every rank.

A `shuffle` without a seed orders the samples differently in every process. Such a dataset is taken
apart and rebuilt with seeds that all ranks share; everything else about it stays the same. A seed
that the user gave, there or with `tf.random.set_seed`, is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from tarantella.data import dataset_state, pipeline, randomness, rebuild
from tarantella.data.dataset_functions import PYTHON_NODES, generator_states, is_keras_seed, nodes
from tarantella.data.function_seeds import NO_SEED, ORDERING_NODES, seeds, with_seeds
from tarantella.errors import InputError
from tarantella.internals import tensorflow as internals
from tarantella.internals.tensorflow import MissingNameError, concrete, functions, is_a, sources
from tarantella.runtime.log import LOGGER

# What stands in for a seed that was not given. Each transformation gets a different one, so that
# two shuffles differ.
_FIRST_SEED = 7919

# What may draw random numbers, besides operations with a seed.
_DRAWS = ("RngReadAndSkip", *PYTHON_NODES)

# These make datasets of their elements. If those shuffle, the order may differ in each pass.
_MAKE_DATASETS = {"interleave", "flat_map", "group_by_window"}
# These may give a different order in each pass.
_ORDERS = {"shuffle", "random", "directed_interleave", *_MAKE_DATASETS}
# These begin to read their source once in each pass, with the first element.
_PASS_ON = {
    "shuffle", "tensor_slice", "tensor", "range", "map", "filter", "batch", "padded_batch",
    "prefetch", "take", "skip", "shard", "options", "zip", "unbatch", "restructured", "variant",
    "assert_cardinality", "ignore_errors", "window", "dense_to_ragged", "t_f_record_dataset",
    "text_line_dataset", "fixed_length_record_dataset",
}  # fmt: skip

_uses = itertools.count()


def with_common_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset itself, or one that differs only in having the same order on all ranks."""
    dataset = internals.unwrapped(dataset)
    if not any(_is_random(one) for one in pipeline.ancestors(dataset)):
        return dataset
    try:
        return in_common_order(dataset, with_common_order)
    except MissingNameError as missing:
        raise InputError(
            f"Tarantella does not know the transformation `{pipeline.name_of(dataset)}` well "
            f"enough to give it the same order on all ranks (`{missing.private_name}`). Give every "
            "shuffle a seed (`shuffle(buffer_size, seed=42)`), set `deterministic=True`, and cache "
            "in memory."
        ) from missing


def in_common_order(dataset: tf.data.Dataset, replace: internals.Replace) -> tf.data.Dataset:
    """The same transformation of what `replace` makes of its inputs, alike on all ranks."""
    if is_a(dataset, internals.SHUFFLE) and pipeline.has_no_seed(dataset):
        (source,) = sources(dataset)
        return rebuild.shuffled(replace(source), dataset, _seed_of(dataset))
    if is_a(dataset, internals.RANDOM) and pipeline.has_no_seed(dataset):
        return rebuild.random_numbers(dataset, _seed_of(dataset))
    if is_a(dataset, internals.SHUFFLE) and not keeps_order(dataset):
        LOGGER.warning(
            "The dataset holds large tensors before a `shuffle`. If a script iterates over it "
            "before training with it, the order in training differs from that in one process."
        )
        (source,) = sources(dataset)
        return rebuild.shuffled(replace(source), dataset)
    traced = [
        _seeded(function, _seed_of(dataset)) if _draws_unseeded(dataset, function) else function
        for function in functions(dataset)
    ]
    return rebuild.over(dataset, replace, traced)


def keeps_order(dataset: tf.data.Dataset) -> bool:
    """Whether a shuffle that is rebuilt continues the orders of the user's shuffle."""
    return (
        not is_a(dataset, internals.SHUFFLE)
        or not pipeline.reshuffles(dataset)
        or pipeline.has_no_seed(dataset)
        or dataset_state.can_be_written_out(dataset)
    )


@contextmanager
def common_seed() -> Iterator[None]:
    """Gives random operations made meanwhile one seed on all ranks, if the user gave none."""
    if internals.global_seed() is not None:
        yield
    else:
        with internals.seeded(_seed()):
            yield


def may_draw(dataset: tf.data.Dataset) -> bool:
    """Whether a function on the way to a dataset may draw random numbers that differ by rank."""
    return any(
        any(map(is_keras_seed, concrete(function).graph.variables))
        or any("seed" in node.attr or node.op in _DRAWS for node in nodes(function))
        for one in pipeline.ancestors(dataset)
        for function in functions(one)
    )


def restarts_each_pass(dataset: tf.data.Dataset) -> bool:
    """Whether a pass depends only on how many passes were begun before.

    False if it may draw random numbers, or if we cannot tell.
    """
    try:
        return not may_draw(dataset) and not continues_across_passes(dataset)
    except MissingNameError as missing:
        internals.tell_once(missing, "to resume training, completed epochs are read again.")
        return False


def continues_across_passes(dataset: tf.data.Dataset) -> bool:
    """Whether the order in a pass may depend on more than how many passes were begun before."""
    names = {pipeline.name_of(one) for one in pipeline.ancestors(dataset) if not _only_joins(one)}
    return not names.isdisjoint(_ORDERS) and not names <= _PASS_ON


def has_fixed_order(dataset: tf.data.Dataset) -> bool:
    """Whether the elements have the same order in each pass."""
    return not any(
        (is_a(one, internals.SHUFFLE) and pipeline.reshuffles(one))
        or is_a(one, internals.RANDOM)
        or (pipeline.name_of(one) in _MAKE_DATASETS and not _only_joins(one))
        for one in pipeline.ancestors(dataset)
    )


def _only_joins(dataset: tf.data.Dataset) -> bool:
    """Whether it joins datasets that are the same in each pass, such as the lines of files."""
    return pipeline.name_of(dataset) in _MAKE_DATASETS and not any(
        node.op.startswith(tuple(ORDERING_NODES))
        for function in functions(dataset)
        for node in nodes(function)
    )


def drawing_as_rank(function: Any, rank: int) -> Any:
    """The function of a `map` of one rank's samples, with random draws of that rank.

    With one seed on all ranks, the first samples of all ranks would be treated alike, and so would
    the second ones and all others. The master draws as it would alone.
    """
    states = generator_states(function)
    own = function
    if rank != 0 and any(one != NO_SEED for one in seeds(function)):
        own = with_seeds(function, partial(randomness.operation_seeds_of_rank, rank=rank))
    for variable in filter(is_keras_seed, concrete(function).graph.variables):
        variable.assign(randomness.seed_of_rank(variable.numpy(), rank))
    for variable in states:
        variable.assign(randomness.generator_of_rank(variable.numpy(), rank))
    return own


def _seeded(function: Any, seed: int) -> Any:
    """A function with seeds where it has none."""
    numbers = itertools.count(1)
    return with_seeds(function, lambda *old: (seed, next(numbers)) if old == NO_SEED else old)


def _seed() -> int:
    return _FIRST_SEED + next(_uses)


def _seed_of(dataset: tf.data.Dataset) -> int:
    """The seed for a transformation that has none; always the same one.

    Training and validation data may both come from one shuffled dataset.
    """
    attributes = vars(dataset)
    if "_tnt_seed" not in attributes:
        attributes["_tnt_seed"] = _seed()
    seed: int = attributes["_tnt_seed"]
    return seed


def _is_random(dataset: tf.data.Dataset) -> bool:
    """Whether a transformation leaves the order, or what it draws, to chance."""
    if is_a(dataset, internals.SHUFFLE, internals.RANDOM):
        return pipeline.has_no_seed(dataset)
    if is_a(dataset, internals.PARALLEL_INTERLEAVE) and not (
        dataset_state.can_be_written_out(dataset) and dataset_state.is_in_order(dataset)
    ):
        return True
    return internals.is_nondeterministic(dataset) or any(
        _draws_unseeded(dataset, function) for function in functions(dataset)
    )


def _draws_unseeded(dataset: tf.data.Dataset, function: Any) -> bool:
    if any(node.attr["deterministic"].s == b"false" for node in nodes(function)):
        raise InputError(
            f"A dataset inside the function of `{pipeline.name_of(dataset)}` leaves the order of "
            "its elements to chance, so it differs between the ranks: set `deterministic=True` "
            "there."
        )
    return NO_SEED in seeds(function)
