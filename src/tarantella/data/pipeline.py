"""The transformations of a tf.data pipeline, to take it apart and put it together again.

This is the one module that knows TensorFlow's private dataset classes; its test
(`tests/unit/test_data_pipeline.py`) says which version of TensorFlow broke it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import (
    batch_op,
    cache_op,
    concatenate_op,
    dataset_ops,
    directed_interleave_op,
    interleave_op,
    map_op,
    padded_batch_op,
    prefetch_op,
    ragged_batch_op,
    random_op,
    rebatch_op,
    repeat_op,
    shard_op,
    shuffle_op,
    skip_op,
    snapshot_op,
    take_op,
    zip_op,
)
from tensorflow.python.data.ops.structured_function import StructuredFunctionWrapper
from tensorflow.python.data.util import nest, structure
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_dataset_ops

from tarantella.data.padding import Padding
from tarantella.errors import InputError

Replace = Callable[[tf.data.Dataset], tf.data.Dataset]

Batch = (batch_op._BatchDataset, batch_op._ParallelBatchDataset)
Cache = cache_op.CacheDataset
Concatenate = concatenate_op._ConcatenateDataset
DenseToRagged = ragged_batch_op._DenseToRaggedDataset
DirectedInterleave = directed_interleave_op._DirectedInterleaveDataset
Map = (map_op._MapDataset, map_op._ParallelMapDataset)
Options = dataset_ops._OptionsDataset
PaddedBatch = padded_batch_op._PaddedBatchDataset
ParallelInterleave = interleave_op._ParallelInterleaveDataset
Prefetch = prefetch_op._PrefetchDataset
Random = random_op._RandomDataset
Rebatch = rebatch_op._RebatchDataset
Repeat = repeat_op._RepeatDataset
Shard = shard_op._ShardDataset
Shuffle = shuffle_op._ShuffleDataset
Skip = skip_op._SkipDataset
Snapshot = snapshot_op._SnapshotDataset
Take = take_op._TakeDataset
Zip = zip_op._ZipDataset

_DETERMINISTIC = {"default": None, "true": True, "false": True}


def sources(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The datasets that this one is a transformation of."""
    return [unwrapped(source) for source in unwrapped(dataset)._inputs()]


def unwrapped(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset itself, without the cover of the old interface."""
    while isinstance(dataset, dataset_ops.DatasetV1Adapter):
        dataset = dataset._dataset
    return dataset


def ancestors(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """The dataset and all that it is made of."""
    yield dataset
    for source in sources(dataset):
        yield from ancestors(source)


def name_of(dataset: tf.data.Dataset) -> str:
    """What users call a transformation: `filter`, `padded_batch`."""
    words = type(unwrapped(dataset)).__name__.strip("_").removesuffix("Dataset").removesuffix("V2")
    snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in words).strip("_")
    return snake.removeprefix("parallel_")


def components(zipped: Any) -> Any:
    """The structure of datasets that a `zip` was given."""
    return zipped._datasets


def rebatched(dataset: Any) -> tf.data.Dataset:
    """The dataset that a `rebatch` was applied to, which it has made dense first."""
    (dense,) = sources(dataset)
    (mapped,) = sources(dense)
    (source,) = sources(mapped)
    return source


def selector(dataset: Any) -> tf.data.Dataset | None:
    """The dataset that says which of several others is next, as in `sample_from_datasets`."""
    chosen = getattr(dataset, "_selector_input", None)
    return None if chosen is None else unwrapped(chosen)


def constant(tensor: Any) -> Any:
    """The value of an argument of a transformation that was given as a number."""
    return tf.get_static_value(tensor)


def drops_remainder(batched: Any) -> bool:
    """Whether a last batch that is not full is left out."""
    return bool(constant(batched._drop_remainder))


def parallel_calls(mapped: Any) -> int | None:
    """How many elements a `map` works on at a time; None if it was not told."""
    calls = getattr(mapped, "_num_parallel_calls", None)
    return None if calls is None else int(calls)


def file_of(dataset: Any) -> str | None:
    """The file or folder that a transformation writes to, if it does."""
    if isinstance(dataset, Cache):
        return constant(dataset._filename).decode() or None
    if isinstance(dataset, Snapshot):
        return str(tf.compat.as_text(constant(tf.convert_to_tensor(dataset._path))))
    return None


# Structures of elements, in which tf.data takes a list for a tensor


def leaves(element: Any) -> list[Any]:
    """The members of an element, at any depth."""
    return list(nest.flatten(element))


def first(dataset: tf.data.Dataset) -> Any:
    """The first element of a dataset that has one."""
    return dataset.take(1).get_single_element()


def packed(like: Any, members: list[Any]) -> Any:
    """The members in the structure of another element."""
    return nest.pack_sequence_as(like, members)


# Functions of transformations


def functions(dataset: tf.data.Dataset) -> list[Any]:
    """The traced functions of a transformation."""
    return list(dataset._functions())


def call(function: Any, element: Any) -> Any:
    """Calls the function that `map` has traced on an element, as `map` does."""
    tensors = structure.to_tensor_list(function._input_structure, element)
    results = function.function(*tensors)
    return structure.from_compatible_tensor_list(function.output_structure, list(results))


def for_any_batch_size(mapped: Any) -> Any:
    """The function of a `map` of batches, traced for batches of any size."""
    (function,) = functions(mapped)
    spec = nest.map_structure(_of_any_size, function._input_structure)
    return function if spec == function._input_structure else traced_again(function, spec)


def _of_any_size(spec: Any) -> Any:
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def nodes(function: Any) -> list[Any]:
    """The definitions of all operations in a traced function, written out once."""
    if not hasattr(function, "_tnt_nodes"):
        definition = function.function.graph.as_graph_def()
        inner = (node for one in definition.library.function for node in one.node_def)
        function._tnt_nodes = [*definition.node, *inner]
    return list(function._tnt_nodes)


def is_seed(variable: Any) -> bool:
    """Whether a variable is the state of a Keras seed generator."""
    return "seed_generator_state" in variable.name


def is_generator(variable: Any, function: Any) -> bool:
    """Whether a variable is the state of a `tf.random.Generator` that a function draws from."""
    draws = any(node.op == "RngReadAndSkip" for node in nodes(function))
    return draws and variable.dtype == tf.int64 and variable.shape.rank == 1


def changes_state(function: Any) -> bool:
    """Whether a function writes to a variable, so that its calls depend on each other."""
    graph = function.function.graph
    writes = any(node.op.startswith("Assign") and "Variable" in node.op for node in nodes(function))
    return writes and not all(is_seed(variable) for variable in graph.variables)


def traced_again(function: Any, spec: Any = None) -> Any:
    """A function of a `map`, traced anew; if `spec` is given, for elements of that structure."""
    spec = function._input_structure if spec is None else spec
    return StructuredFunctionWrapper(function._func, "Dataset.map()", input_structure=spec)


def as_one(element: tuple[Any, ...], spec: Any) -> Any:
    """The element that `map` has passed to a function as its arguments."""
    return element if type(spec) is tuple else element[0]


def in_component(zipped: Any, index: int, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of elements of a `zip` that changes one component with `function`."""
    structure_of_zip = nest.map_structure(lambda _: 0, components(zipped))

    def change(element: Any) -> Any:
        members = list(nest.flatten_up_to(structure_of_zip, element))
        members[index] = function(members[index])
        return nest.pack_sequence_as(structure_of_zip, members)

    return change


def with_components(zipped: Any, new: list[tf.data.Dataset]) -> tf.data.Dataset:
    """The same `zip` of other datasets."""
    return tf.data.Dataset.zip(packed(components(zipped), new))


@contextmanager
def own_graph() -> Iterator[None]:
    """Traces functions of datasets in a graph that lives no longer than they do.

    TensorFlow keeps Python functions that they call, and the functions of a `scan`, with the
    graph around it all. By default that is the program's, which is there for ever.
    """
    with tf.Graph().as_default(), tf.__internal__.eager_context.eager_mode():
        yield


# Elements in boxes: a single tensor, whatever is in it, that can also be empty


def boxed(spec: Any, element: Any) -> tf.Tensor:
    """An element of this structure in a box."""
    return tf.raw_ops.OptionalFromValue(components=structure.to_tensor_list(spec, element))


def empty_box() -> tf.Tensor:
    """A box with nothing in it."""
    return tf.raw_ops.OptionalNone()


def has_element(box: tf.Tensor) -> tf.Tensor:
    """Whether something is in a box."""
    return tf.raw_ops.OptionalHasValue(optional=box)


def unboxed(spec: Any, box: tf.Tensor) -> Any:
    """The element of this structure that is in a box."""
    tensors = tf.raw_ops.OptionalGetValue(
        optional=box,
        output_types=structure.get_flat_tensor_types(spec),
        output_shapes=structure.get_flat_tensor_shapes(spec),
    )
    return structure.from_tensor_list(spec, tensors)


# Making transformations again


def over(dataset: tf.data.Dataset, replace: Replace) -> tf.data.Dataset:
    """The same transformation of what `replace` makes of its inputs.

    A shuffle starts its sequence of orders anew.
    """
    if isinstance(dataset, Shuffle):
        return shuffled(replace(dataset._input_dataset), dataset, dataset._seed, dataset._seed2)
    if isinstance(dataset, Options):
        return replace(dataset._input_dataset).with_options(dataset.options())
    return _constructed(dataset, {}, replace)


def with_file(dataset: tf.data.Dataset, name: str) -> tf.data.Dataset:
    """The same transformation of the same inputs, with another file or folder."""
    argument = "path" if isinstance(dataset, Snapshot) else "filename"
    return _constructed(dataset, {argument: name}, lambda source: source)


def batched_like(
    tagged: tf.data.Dataset, like: Any, batch_size: int
) -> tuple[tf.data.Dataset, Padding | None]:
    """Batches of tagged elements made as another dataset makes them, but for their size.

    Where batches are padded to their longest element, the padding says how to go on with that.
    """
    drop_remainder = drops_remainder(like)
    if not isinstance(like, PaddedBatch):
        calls = parallel_calls(like)
        return tagged.batch(batch_size, drop_remainder, num_parallel_calls=calls), None
    shapes = ([3], like._padded_shapes)
    values = (tf.constant(0, tf.int64), like._padding_values)
    padding = Padding.of(leaves(like._padded_shapes), leaves(like._padding_values))
    return tagged.padded_batch(batch_size, shapes, values, drop_remainder), padding


def is_free(seeded: Any) -> bool:
    """Whether a `shuffle` or `random` was given no seed."""
    return int(seeded._seed) == 0 and int(seeded._seed2) == 0


def shuffled(
    source: tf.data.Dataset, like: Any, seed: int | tf.Tensor, seed2: int | tf.Tensor
) -> tf.data.Dataset:
    """A shuffle of `source` that is like another one but for its seeds."""
    again = copy.copy(like)
    again._input_dataset = source
    again._seed, again._seed2 = (tf.cast(one, tf.int64) for one in (seed, seed2))
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


def random_numbers(like: Any, seed: int) -> tf.data.Dataset:
    """A dataset of random numbers like another one but for its seed."""
    return random_op._RandomDataset(
        seed, rerandomize_each_iteration=like._rerandomize, name=like._name
    )


def _constructed(
    dataset: tf.data.Dataset, changes: dict[str, Any], replace: Replace
) -> tf.data.Dataset:
    """Calls the class of a dataset with the arguments that it keeps as attributes."""
    arguments = {}
    for name, parameter in list(inspect.signature(type(dataset).__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        attribute = "_input_dataset" if name == "dataset" else f"_{name}"
        if name in changes:
            arguments[name] = changes[name]
        elif hasattr(dataset, attribute):
            arguments[name] = _argument(name, getattr(dataset, attribute), replace)
        elif name == "deterministic":  # an `interleave` does not keep it
            arguments[name] = True
        elif name == "row_splits_dtype":  # kept only in what the dataset yields
            arguments[name] = _row_splits_dtype(dataset.element_spec)
        elif parameter.default is parameter.empty:
            raise InputError(
                f"Tarantella does not know the transformation `{name_of(dataset)}` well enough to "
                "make it work alike on all ranks. Give every shuffle a seed "
                "(`shuffle(buffer_size, seed=42)`), set `deterministic=True`, and cache in memory."
            )
    return type(dataset)(**arguments)


def _argument(name: str, value: Any, replace: Replace) -> Any:
    if name == "deterministic":
        return _DETERMINISTIC.get(value, value)
    if isinstance(value, StructuredFunctionWrapper):
        return value._func
    if name == "buffer_size":  # prefetch() compares it with AUTOTUNE
        return int(value)
    return tf.nest.map_structure(
        lambda leaf: replace(unwrapped(leaf)) if isinstance(leaf, tf.data.Dataset) else leaf, value
    )


def _row_splits_dtype(element_spec: Any) -> tf.DType:
    for spec in tf.nest.flatten(element_spec):
        if isinstance(spec, tf.RaggedTensorSpec):
            return spec.row_splits_dtype
    return tf.int64


# The global seed, which TensorFlow lets users set but not read


def global_seed() -> int | None:
    """The seed given to `tf.random.set_seed`, or None."""
    return context.global_seed()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Lets random operations be made with another global seed for a while."""
    state = context.context()
    before = state._seed, getattr(state, "_rng", None)  # it has none until a seed is set
    tf.random.set_seed(seed)
    try:
        yield
    finally:
        state._seed, state._rng = before
