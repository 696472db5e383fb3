"""The same samples in the same order on every rank.

A `shuffle` without a seed orders the samples differently in every process. Such a dataset
is taken apart and put together again with a seed that all ranks share; everything else
about it stays. What was given a seed, by the user or through `tf.random.set_seed`, is
kept. This is the one module that knows TensorFlow's private dataset classes.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops, shuffle_op
from tensorflow.python.data.ops.structured_function import StructuredFunctionWrapper
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_dataset_ops

from tarantella.errors import InputError

# What stands in for the seed that was not given. TensorFlow takes (0, 0) for "none".
_SEEDS = (0, 7919)

_uses = itertools.count()

_DETERMINISTIC = {"default": None, "true": True, "false": True}


def with_common_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset itself, or one that differs only in having the order of all ranks."""
    return _rebuild(dataset) if _has_free_order(dataset) else dataset


@contextmanager
def common_seed() -> Iterator[None]:
    """Gives random operations made meanwhile one seed on all ranks, if the user gave none."""
    if context.global_seed() is not None:
        yield
        return
    tf.random.set_seed(_SEEDS[1] + next(_uses))  # a second `fit` shuffles anew
    try:
        yield
    finally:
        context.context()._set_global_seed(None)


def _has_free_order(dataset: tf.data.Dataset) -> bool:
    _refuse_free_order_in_functions(dataset)
    return (
        _is_unseeded_shuffle(dataset)
        or getattr(dataset, "_deterministic", None) == "false"
        or any(_has_free_order(source) for source in dataset._inputs())
    )


def _is_unseeded_shuffle(dataset: tf.data.Dataset) -> bool:
    if not isinstance(dataset, shuffle_op._ShuffleDataset):
        return False
    return int(dataset._seed) == 0 and int(dataset._seed2) == 0


def _refuse_free_order_in_functions(dataset: tf.data.Dataset) -> None:
    for function in dataset._functions():
        for node in function.function.graph.get_operations():
            if node.type.startswith("ShuffleDataset") and _seeds_are_zero(node):
                raise InputError(
                    f"A shuffle without a seed inside the function of "
                    f"{dataset._transformation_name()} orders the samples differently on every "
                    "rank. Give it one: `shuffle(buffer_size, seed=42)`."
                )


def _seeds_are_zero(shuffle: tf.Operation) -> bool:
    seeds = [tf.get_static_value(tensor) for tensor in shuffle.inputs[2:4]]
    return all(seed is not None and int(seed) == 0 for seed in seeds)


def _rebuild(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same transformations with their order fixed, over rebuilt inputs."""
    if not _has_free_order(dataset):
        return dataset
    if isinstance(dataset, shuffle_op._ShuffleDataset):
        return _shuffle_again(dataset, _rebuild(dataset._input_dataset))
    if isinstance(dataset, dataset_ops._OptionsDataset):
        return _rebuild(dataset._input_dataset).with_options(dataset.options())
    if isinstance(dataset, dataset_ops.DatasetV1Adapter):
        return _rebuild(dataset._dataset)
    return _construct_again(dataset)


def _shuffle_again(dataset: Any, source: tf.data.Dataset) -> tf.data.Dataset:
    again = copy.copy(dataset)
    again._input_dataset = source
    if _is_unseeded_shuffle(dataset):
        again._seed, again._seed2 = (tf.constant(seed, tf.int64) for seed in _SEEDS)
    variant = gen_dataset_ops.shuffle_dataset_v3(
        source._variant_tensor,
        buffer_size=again._buffer_size,
        seed=again._seed,
        seed2=again._seed2,
        seed_generator=gen_dataset_ops.dummy_seed_generator(),
        reshuffle_each_iteration=again._reshuffle_each_iteration,
        **again._common_args,
    )
    dataset_ops.UnaryUnchangedStructureDataset.__init__(again, source, variant)
    return again


def _construct_again(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Calls the class of a dataset with the arguments that it keeps as attributes."""
    arguments = {}
    for name, parameter in list(inspect.signature(type(dataset).__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        attribute = "_input_dataset" if name == "dataset" else f"_{name}"
        if hasattr(dataset, attribute):
            arguments[name] = _argument(name, getattr(dataset, attribute))
        elif name == "row_splits_dtype":  # kept only in what the dataset yields
            arguments[name] = _row_splits_dtype(dataset.element_spec)
        elif parameter.default is parameter.empty:
            raise InputError(
                f"The order of the samples below a {type(dataset).__name__.strip('_')} is left "
                "free (a shuffle without a seed, or deterministic=False), and Tarantella does "
                "not know that transformation well enough to fix it. Give the shuffle a seed: "
                "`shuffle(buffer_size, seed=42)`, and set `deterministic=True`."
            )
    return type(dataset)(**arguments)


def _argument(name: str, value: Any) -> Any:
    if name == "deterministic":
        return _DETERMINISTIC.get(value, value)
    if isinstance(value, StructuredFunctionWrapper):
        return value._func
    if name == "buffer_size":  # prefetch() compares it with AUTOTUNE
        return int(value)
    return tf.nest.map_structure(
        lambda leaf: _rebuild(leaf) if isinstance(leaf, tf.data.Dataset) else leaf, value
    )


def _row_splits_dtype(element_spec: Any) -> tf.DType:
    for spec in tf.nest.flatten(element_spec):
        if isinstance(spec, tf.RaggedTensorSpec):
            return spec.row_splits_dtype
    return tf.int64
