"""The same samples in the same order on every rank.

A `shuffle` without a seed orders the samples differently in every process. Such a dataset
is taken apart and put together again with seeds that all ranks share; everything else
about it stays. What was given a seed, by the user or through `tf.random.set_seed`, is
kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from tarantella.data import pipeline, randomness
from tarantella.errors import InputError
from tarantella.runtime.log import LOGGER

# What stands in for a seed that was not given. TensorFlow takes (0, 0) for "none". Each
# transformation gets another one, so that two shuffles are not alike.
_FIRST_SEED = 7919
_NO_SEED = (0, 0)

# Besides operations with a seed, those that draw, and Python functions, which may do anything.
_DRAWS = ("RngReadAndSkip", "PyFunc", "PyFuncStateless", "EagerPyFunc")

# Datasets with an order of their own, as they are called inside of a function.
_ORDERING_NODES = ("ShuffleDataset", "RandomDataset")
# What makes datasets of its elements. With a shuffle among these, each pass may have another order.
_MAKE_DATASETS = {"interleave", "flat_map", "group_by_window"}
# What may give another order in each pass.
_ORDERS = {"shuffle", "random", "directed_interleave", *_MAKE_DATASETS}
# What begins to read its source once in each pass, with the first element.
_PASS_ON = {
    "shuffle", "tensor_slice", "tensor", "range", "map", "filter", "batch", "padded_batch",
    "prefetch", "take", "skip", "shard", "options", "zip", "unbatch", "restructured", "variant",
    "assert_cardinality", "ignore_errors", "window", "dense_to_ragged", "t_f_record_dataset",
    "text_line_dataset", "fixed_length_record_dataset",
}  # fmt: skip

_uses = itertools.count()


def with_common_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset itself, or one that differs only in having the order of all ranks."""
    dataset = pipeline.unwrapped(dataset)
    if not any(_is_free(one) for one in pipeline.ancestors(dataset)):
        return dataset
    return in_common_order(dataset, with_common_order)


def in_common_order(dataset: tf.data.Dataset, replace: pipeline.Replace) -> tf.data.Dataset:
    """The same transformation of what `replace` makes of its inputs, alike on all ranks."""
    if isinstance(dataset, pipeline.Shuffle) and pipeline.is_free(dataset):
        (source,) = pipeline.sources(dataset)
        return pipeline.shuffled(replace(source), dataset, _seed_of(dataset))
    if isinstance(dataset, pipeline.Random) and pipeline.is_free(dataset):
        return pipeline.random_numbers(dataset, _seed_of(dataset))
    if isinstance(dataset, pipeline.Shuffle) and not keeps_order(dataset):
        LOGGER.warning(
            "The dataset holds large tensors in front of a `shuffle`. If a script goes through it "
            "before it trains with it, the order in training is not that of a single process."
        )
        (source,) = pipeline.sources(dataset)
        return pipeline.shuffled(replace(source), dataset)
    traced = [
        _seeded(function, _seed_of(dataset)) if _draws_freely(dataset, function) else function
        for function in pipeline.functions(dataset)
    ]
    return pipeline.over(dataset, replace, traced)


def keeps_order(dataset: tf.data.Dataset) -> bool:
    """Whether a shuffle that is made again goes on with the orders of the user's own."""
    return (
        not isinstance(dataset, pipeline.Shuffle)
        or not pipeline.reshuffles(dataset)
        or pipeline.is_free(dataset)
        or pipeline.has_light_input(dataset)
    )


@contextmanager
def common_seed() -> Iterator[None]:
    """Gives random operations made meanwhile one seed on all ranks, if the user gave none."""
    if pipeline.global_seed() is not None:
        yield
    else:
        with pipeline.seeded(_seed()):
            yield


def may_draw(dataset: tf.data.Dataset) -> bool:
    """Whether a function on the way to a dataset may draw random numbers, on each rank others."""
    functions = (f for one in pipeline.ancestors(dataset) for f in pipeline.functions(one))
    return any(
        any(map(pipeline.is_seed, function.function.graph.variables))
        or any("seed" in node.attr or node.op in _DRAWS for node in pipeline.nodes(function))
        for function in functions
    )


def goes_on(dataset: tf.data.Dataset) -> bool:
    """Whether the order in a pass may depend on more than how often passes were begun before."""
    names = {pipeline.name_of(one) for one in pipeline.ancestors(dataset) if not _only_joins(one)}
    return not names.isdisjoint(_ORDERS) and not names <= _PASS_ON


def is_settled(dataset: tf.data.Dataset) -> bool:
    """Whether the elements have the same order in each pass."""
    return not any(
        (isinstance(one, pipeline.Shuffle) and pipeline.reshuffles(one))
        or isinstance(one, pipeline.Random)
        or (pipeline.name_of(one) in _MAKE_DATASETS and not _only_joins(one))
        for one in pipeline.ancestors(dataset)
    )


def _only_joins(dataset: tf.data.Dataset) -> bool:
    """Whether it puts datasets together that are the same in each pass, as the lines of files."""
    return pipeline.name_of(dataset) in _MAKE_DATASETS and not any(
        node.op.startswith(_ORDERING_NODES)
        for function in pipeline.functions(dataset)
        for node in pipeline.nodes(function)
    )


def drawing_as_rank(function: Any, rank: int) -> Any:
    """The function of a `map` of one rank's samples, with random draws of that rank.

    With one seed on all ranks, the first sample of each would be treated alike, and so would
    the second and all others. The master draws as it would alone.
    """
    for variable in filter(pipeline.is_seed, function.function.graph.variables):
        variable.assign(randomness.seed_of_rank(variable.numpy(), rank))
    for variable in pipeline.generator_states(function):
        variable.assign(randomness.generator_of_rank(variable.numpy(), rank))
    if rank == 0 or not any(seeds != _NO_SEED for seeds in pipeline.seeds(function)):
        return function
    return pipeline.with_seeds(function, partial(randomness.operation_seeds_of_rank, rank=rank))


def _seeded(function: Any, seed: int) -> Any:
    """A function with seeds where it has none."""
    numbers = itertools.count(1)
    return pipeline.with_seeds(
        function, lambda *seeds: (seed, next(numbers)) if seeds == _NO_SEED else seeds
    )


def _seed() -> int:
    return _FIRST_SEED + next(_uses)


def _seed_of(dataset: tf.data.Dataset) -> int:
    """The seed of a transformation that has none; always the same one.

    Data for training and for validation may both come from one shuffled dataset.
    """
    attributes = vars(dataset)
    if "_tnt_seed" not in attributes:
        attributes["_tnt_seed"] = _seed()
    seed: int = attributes["_tnt_seed"]
    return seed


def _is_free(dataset: tf.data.Dataset) -> bool:
    """Whether a transformation leaves the order, or what it draws, to chance."""
    if isinstance(dataset, (pipeline.Shuffle, pipeline.Random)):
        return pipeline.is_free(dataset)
    if isinstance(dataset, pipeline.ParallelInterleave) and not (
        pipeline.has_light_input(dataset) and pipeline.says_in_order(dataset)
    ):
        return True
    return getattr(dataset, "_deterministic", None) == "false" or any(
        _draws_freely(dataset, function) for function in pipeline.functions(dataset)
    )


def _draws_freely(dataset: tf.data.Dataset, function: Any) -> bool:
    nodes = pipeline.nodes(function)
    if any(node.attr["deterministic"].s == b"false" for node in nodes):
        raise InputError(
            f"A dataset inside the function of `{pipeline.name_of(dataset)}` leaves the order of "
            "its elements to chance, which is another one on every rank: set `deterministic=True` "
            "there."
        )
    return _NO_SEED in pipeline.seeds(function)
