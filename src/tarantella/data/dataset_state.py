"""What TensorFlow keeps for a dataset: the seeds of a shuffle's passes, the memory of a cache.

A dataset does not show these. They are found in the graph that TensorFlow writes out for it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tarantella.data.pipeline import ancestors, reshuffles
from tarantella.internals.tensorflow import RESULT, TENSORS, argument, concrete, functions, is_a

# TensorFlow writes out all tensors before a dataset as well.
_MOST_WRITTEN_OUT = 64 * 2**20


def can_be_written_out(dataset: tf.data.Dataset) -> bool:
    """Whether few enough tensors come before a dataset for TensorFlow to write them all out."""
    tensors = [
        tensor
        for one in ancestors(dataset)
        for tensor in (
            *(tf.nest.flatten(argument(one, "tensors")) if is_a(one, TENSORS) else []),
            *(tensor for f in functions(one) for tensor in concrete(f).captured_inputs),
        )
        if isinstance(tensor, tf.Tensor) and tensor.dtype not in (tf.variant, tf.resource)
    ]
    sizes = (tensor.shape.num_elements() * (tensor.dtype.size or 64) for tensor in tensors)
    return sum(sizes) <= _MOST_WRITTEN_OUT


def seed_generator(shuffle: tf.data.Dataset) -> tf.Tensor:
    """What gives a `shuffle` the seeds of its passes, one after the other."""
    if not reshuffles(shuffle):
        return tf.raw_ops.DummySeedGenerator()
    return _resource(shuffle)


def own_seed_generator(shuffle: tf.data.Dataset, seeds: tuple[Any, Any]) -> tf.Tensor:
    """A seed generator for all copies of a `shuffle` that do not share its own."""
    attributes = vars(shuffle)
    if "_tnt_generator" not in attributes:
        seed, seed2 = seeds
        attributes["_tnt_generator"] = tf.raw_ops.AnonymousSeedGenerator(
            seed=seed, seed2=seed2, reshuffle=reshuffles(shuffle)
        )
    handle: tf.Tensor = attributes["_tnt_generator"][0]
    return handle


def is_filled(cache: tf.data.Dataset) -> bool:
    """Whether a `cache` in memory has all elements already.

    Only a cache that is not full begins to read its source when an iterator is made. So we make one
    with the same memory and a source of ours, and see whether it begins to read that.
    """
    source, untouched = (tf.data.Dataset.range(64).shuffle(64, seed=1) for _ in range(2))
    memory = tf.raw_ops.CacheDatasetV2(
        input_dataset=tf.data.experimental.to_variant(source),
        filename="",
        cache=_resource(cache),
        output_types=[source.element_spec.dtype],
        output_shapes=[source.element_spec.shape],
    )
    iter(tf.data.experimental.from_variant(memory, source.element_spec))
    return [int(i) for i in source] == [int(i) for i in untouched]


def is_in_order(interleaved: tf.data.Dataset) -> bool:
    """Whether a parallel `interleave` was not told that its order does not matter."""
    attributes = vars(interleaved)
    if "_tnt_in_order" not in attributes:
        node, _ = _written_out(interleaved)
        attributes["_tnt_in_order"] = node.attr["deterministic"].s != b"false"
    return bool(attributes["_tnt_in_order"])


def _resource(dataset: tf.data.Dataset) -> tf.Tensor:
    """The resource that a dataset has made for itself, the last argument of its operation."""
    attributes = vars(dataset)
    if "_tnt_resource" not in attributes:
        node, by_name = _written_out(dataset)
        attributes["_tnt_resource"] = _value(by_name[node.input[-1]])
    handle: tf.Tensor = attributes["_tnt_resource"]
    return handle


def _written_out(
    dataset: tf.data.Dataset,
) -> tuple[tf.compat.v1.NodeDef, dict[str, tf.compat.v1.NodeDef]]:
    """The operation of a dataset, and all before it by name, as TensorFlow writes them out."""
    written = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=1,
        strip_device_assignment=True,
    )
    definition = tf.compat.v1.GraphDef.FromString(written.numpy())
    by_name = {node.name: node for node in definition.node}
    (result,) = (node for node in definition.node if node.op == RESULT)
    return by_name[result.input[0]], by_name


def _value(constant: tf.compat.v1.NodeDef) -> tf.Tensor:
    """The value of a node that is a constant; NumPy knows no handles of resources."""
    definition = tf.compat.v1.GraphDef(node=[constant])

    @tf.function(autograph=False)
    def value() -> tf.Tensor:
        return tf.graph_util.import_graph_def(
            definition, return_elements=[f"{constant.name}:0"], name=""
        )[0]

    return value()
