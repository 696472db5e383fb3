"""The transformations of a tf.data pipeline, to take it apart and put it together again.

This is the one module that knows TensorFlow's private dataset classes; its test
(`tests/unit/test_data_pipeline.py`) says which version of TensorFlow broke it.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
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
    structured_function,
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
ChangeSeeds = Callable[[int, int], tuple[int, int]]

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

# Datasets with an order of their own, as they are called inside of a function, and where they
# have their seeds among their inputs.
_ORDERING_NODES = {"ShuffleDataset": slice(2, 4), "RandomDataset": slice(0, 2)}
_PYTHON_NODES = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
# What calls functions with its own last inputs: all of them, or all but what it decides by.
_CALLING_NODES = (
    *("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf"),
    *("Case", "StatelessCase", "While", "StatelessWhile"),
)
_WRITING_NODES = re.compile(
    "Assign.*Variable|Resource(Scatter|StridedSliceAssign)|LookupTable(Insert|Remove|Import)"
)
# To look up the state of a shuffle, TensorFlow writes out all tensors that lie before it.
_MOST_WRITTEN_OUT = 64 * 2**20

_copies = itertools.count()


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


def for_any_batch_size(mapped: Any) -> Any | None:
    """The function of a `map` of batches, for batches of any size.

    It has to be traced again if it was traced for one size. None: what comes out then is not what
    was traced before, as a loop has changed what the function refers to.
    """
    (function,) = functions(mapped)
    spec = nest.map_structure(_of_any_size, function._input_structure)
    if spec == function._input_structure:
        return function
    if not _is_alike(function, _traced(function, function._input_structure)):
        return None
    return _traced(function, spec)


def _of_any_size(spec: Any) -> Any:
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _traced(function: Any, spec: Any) -> Any:
    return StructuredFunctionWrapper(function._func, "Dataset.map()", input_structure=spec)


def _is_alike(function: Any, other: Any) -> bool:
    """Whether two functions do the same with the same; if Python does it, we cannot know."""
    captured = zip(function.function.captured_inputs, other.function.captured_inputs, strict=False)
    return (
        all(one is another for one, another in captured)
        and not any(node.op in _PYTHON_NODES for node in nodes(function))
        and _written_out(function) == _written_out(other)
    )


def _written_out(function: Any) -> list[Any]:
    """A function's operations, without the names that TensorFlow counts up."""
    definition = function.function.graph.as_graph_def()
    inner = {one.signature.name: one for one in definition.library.function}

    def written(nodes: Iterable[NodeDef]) -> list[Any]:
        return [_written_node(node) for node in nodes]

    def _written_node(node: NodeDef) -> list[Any]:
        called = [inner[one.name] for one in _called(node) if one.name in inner]
        plain = NodeDef()
        plain.CopyFrom(node)
        for one in _called(plain):
            one.name = ""
        bodies = [[written(one.node_def), sorted(one.ret.items())] for one in called]
        return [plain.SerializeToString(deterministic=True), bodies]

    return written(definition.node)


def _called(node: NodeDef) -> Iterator[Any]:
    """The functions that a node refers to, as attributes with a `name`."""
    for attribute in node.attr.values():
        if attribute.HasField("func"):
            yield attribute.func
        yield from attribute.list.func


def nodes(function: Any) -> list[Any]:
    """The definitions of all operations in a traced function, written out once."""
    if not hasattr(function, "_tnt_nodes"):
        scopes = _scopes(function.function.graph.as_graph_def())
        function._tnt_nodes = [node for scope in scopes for node in scope]
    return list(function._tnt_nodes)


def _scopes(definition: GraphDef) -> list[Sequence[NodeDef]]:
    """The operations of a function, and those of each that it calls."""
    return [definition.node, *(one.node_def for one in definition.library.function)]


def is_identity(mapped: tf.data.Dataset) -> bool:
    """Whether a `map` returns what it gets; TensorFlow takes such a one out."""
    (function,) = functions(mapped)
    graph = function.function.graph
    if len(graph.inputs) != len(graph.outputs) or function.function.captured_inputs:
        return False
    if any(op.type not in ("Placeholder", "Identity", "NoOp") for op in graph.get_operations()):
        return False
    return all(
        _origin(output) is one for output, one in zip(graph.outputs, graph.inputs, strict=True)
    )


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def is_seed(variable: Any) -> bool:
    """Whether a variable is the state of a Keras seed generator."""
    return "seed_generator_state" in variable.name


def generator_states(function: Any) -> list[Any]:
    """The variables that are the state of a `tf.random.Generator` that a function draws from."""
    concrete = function.function
    graph = concrete.graph
    drawn = _drawn_inputs(graph)
    first = len(graph.inputs) - len(concrete.captured_inputs)
    handles = [one for i, one in enumerate(concrete.captured_inputs) if first + i in drawn]
    return [
        variable
        for variable in graph.variables
        if any(variable.handle is handle for handle in handles)
    ]


def _drawn_inputs(graph: Any) -> set[int]:
    """The positions of those inputs of a graph that are states of generators it draws from."""
    places = {id(tensor): place for place, tensor in enumerate(graph.inputs)}
    drawn = []
    for op in graph.get_operations():
        if op.type == "RngReadAndSkip":
            drawn.append(op.inputs[0])
        elif op.type in _CALLING_NODES:
            for one in _called(op.node_def):
                body = graph._get_function(one.name).graph
                before = len(op.inputs) - len(body.inputs)
                drawn += [op.inputs[before + place] for place in _drawn_inputs(body)]
    return {places[id(one)] for one in map(_origin, drawn) if id(one) in places}


def changes_state(function: Any) -> bool:
    """Whether a function writes to a variable or table, so that its calls depend on each other."""
    writes = any(_WRITING_NODES.match(node.op) for node in nodes(function))
    return writes and not all(is_seed(variable) for variable in function.function.graph.variables)


# The seeds in functions


def seeds(function: Any) -> list[tuple[int, int]]:
    """The seeds of all random operations and datasets in a function; (0, 0) is none."""
    if hasattr(function, "_tnt_seeds"):
        return list(function._tnt_seeds)
    found: list[tuple[int, int]] = []

    def note(seed: int, seed2: int) -> tuple[int, int]:
        found.append((seed, seed2))
        return seed, seed2

    for scope in _scopes(function.function.graph.as_graph_def()):
        _change_seeds(scope, note)
    function._tnt_seeds = found
    return list(found)


def with_seeds(function: Any, change: ChangeSeeds) -> Any:
    """The same traced function with other seeds.

    It is not traced again: what it refers to may be something else by now.
    """
    concrete = function.function
    definition = concrete.graph.as_graph_def()
    for scope in _scopes(definition):
        _change_seeds(scope, change)
    _rename_functions(definition, f"_tnt_{next(_copies)}")
    own = concrete.graph.inputs[: len(concrete.graph.inputs) - len(concrete.captured_inputs)]

    @tf.function(
        input_signature=[tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in own],
        autograph=False,
        experimental_attributes={"_tf_data_function": True},
    )
    def changed(*tensors: tf.Tensor) -> Any:
        graph = tf.compat.v1.get_default_graph()
        inputs = [*tensors, *map(graph.capture, concrete.captured_inputs)]
        names = [tensor.name for tensor in concrete.graph.inputs]
        return tf.graph_util.import_graph_def(
            definition,
            input_map=dict(zip(names, inputs, strict=True)),
            return_elements=[tensor.name for tensor in concrete.graph.outputs],
            name="",
        )

    again = copy.copy(function)
    for written_out in ("_tnt_nodes", "_tnt_seeds"):
        vars(again).pop(written_out, None)
    again._function = changed.get_concrete_function()
    again._original = function  # keeps Python functions that it calls
    return again


def _change_seeds(scope: Sequence[NodeDef], change: ChangeSeeds) -> None:
    constants = {node.name: node for node in scope if node.op == "Const"}
    for node in scope:
        if "seed" in node.attr and "seed2" in node.attr:
            new = change(node.attr["seed"].i, node.attr["seed2"].i)
            node.attr["seed"].i, node.attr["seed2"].i = new
            continue
        # Those of a dataset are inputs; we see them where they are constants of the same function.
        inputs = [
            name.split(":")[0]
            for word, places in _ORDERING_NODES.items()
            if node.op.startswith(word)
            for name in node.input[places]
        ]
        held = map(constants.get, inputs)
        given = [node for node in held if node is not None]
        if len(given) == 2:
            old = [int(tf.make_ndarray(node.attr["value"].tensor)) for node in given]
            for one, value in zip(given, change(*old), strict=True):
                one.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64, ()))


def _rename_functions(definition: GraphDef, suffix: str) -> None:
    names = {one.signature.name for one in definition.library.function}
    for scope in _scopes(definition):
        for node in scope:
            if node.op in names:
                node.op += suffix
            for one in _called(node):
                one.name += suffix if one.name in names else ""
    for function in definition.library.function:
        function.signature.name += suffix
    definition.library.ClearField("gradient")


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


def over(
    dataset: tf.data.Dataset, replace: Replace, traced: list[Any] | None = None
) -> tf.data.Dataset:
    """The same transformation of what `replace` makes of its inputs.

    A shuffle goes on with the dataset's own sequence of orders: a pass over one of them is a
    pass over both.

    Args:
        dataset: The dataset.
        replace: What makes its inputs.
        traced: Its functions, if others are to take their place.
    """
    if isinstance(dataset, Shuffle):
        source = replace(dataset._input_dataset)
        seeds = (dataset._seed, dataset._seed2)
        return _shuffled(source, dataset, seeds, seed_generator(dataset))
    if isinstance(dataset, Options):
        return replace(dataset._input_dataset).with_options(dataset.options())
    return _constructed(dataset, {}, replace, functions(dataset) if traced is None else traced)


def set_apart(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset, not to be fused with the transformation that comes next.

    TensorFlow makes one of a `shuffle` and a `repeat` that follow each other, which draws other
    numbers. They must not come to do so where something between them was taken out.
    """
    return dataset.with_options(tf.data.Options())


def with_file(dataset: tf.data.Dataset, name: str) -> tf.data.Dataset:
    """The same transformation of the same inputs, with another file or folder."""
    argument = "path" if isinstance(dataset, Snapshot) else "filename"
    return _constructed(dataset, {argument: name}, lambda source: source, functions(dataset))


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


def reshuffles(shuffle: Any) -> bool:
    """Whether each pass has an order of its own."""
    return shuffle._reshuffle_each_iteration is not False  # None, where it was not stated


def has_light_input(dataset: tf.data.Dataset) -> bool:
    """Whether few enough tensors lie before a dataset that TensorFlow can write them all out."""
    tensors = [
        tensor
        for one in ancestors(dataset)
        for tensor in (
            *nest.flatten(getattr(one, "_tensors", [])),
            *(tensor for f in functions(one) for tensor in f.function.captured_inputs),
        )
        if isinstance(tensor, tf.Tensor) and tensor.dtype not in (tf.variant, tf.resource)
    ]
    sizes = (tensor.shape.num_elements() * (tensor.dtype.size or 64) for tensor in tensors)
    return sum(sizes) <= _MOST_WRITTEN_OUT


def seed_generator(shuffle: Any) -> tf.Tensor:
    """What gives a `shuffle` the seeds of its passes, one after the other."""
    if not reshuffles(shuffle):
        return gen_dataset_ops.dummy_seed_generator()
    return _resource(shuffle)


def is_filled(cache: Any) -> bool:
    """Whether a `cache` in memory has all elements already.

    Only a cache that has not begins to read its source, when an iterator is made. So we make one
    of the same memory with a source of ours, and see whether that was begun.
    """
    source, untouched = (tf.data.Dataset.range(64).shuffle(64, seed=1) for _ in range(2))
    memory = gen_dataset_ops.cache_dataset_v2(
        source._variant_tensor, filename="", cache=_resource(cache), **source._common_args
    )
    iter(dataset_ops._VariantDataset(memory, source.element_spec))
    return [int(i) for i in source] == [int(i) for i in untouched]


def _own_seed_generator(shuffle: Any, seeds: tuple[Any, Any]) -> tf.Tensor:
    """The same for all copies of a `shuffle` that do not share its own."""
    attributes = vars(shuffle)
    if "_tnt_generator" not in attributes:
        seed, seed2 = seeds
        attributes["_tnt_generator"] = gen_dataset_ops.anonymous_seed_generator(
            seed=seed, seed2=seed2, reshuffle=reshuffles(shuffle)
        )
    handle: tf.Tensor = attributes["_tnt_generator"][0]
    return handle


def says_in_order(interleaved: tf.data.Dataset) -> bool:
    """Whether a parallel `interleave` was not told that its order does not matter."""
    attributes = vars(interleaved)
    if "_tnt_in_order" not in attributes:
        node, _ = _written(interleaved)
        attributes["_tnt_in_order"] = node.attr["deterministic"].s != b"false"
    return bool(attributes["_tnt_in_order"])


def _resource(dataset: Any) -> tf.Tensor:
    """The resource that a dataset has made for itself, the last argument of its operation."""
    attributes = vars(dataset)
    if "_tnt_resource" not in attributes:
        node, by_name = _written(dataset)
        attributes["_tnt_resource"] = _value(by_name[node.input[-1]])
    handle: tf.Tensor = attributes["_tnt_resource"]
    return handle


def _written(dataset: tf.data.Dataset) -> tuple[NodeDef, dict[str, NodeDef]]:
    """The operation of a dataset, and all before it by name, as TensorFlow writes them out."""
    written = gen_dataset_ops.dataset_to_graph_v2(
        dataset._variant_tensor, external_state_policy=1, strip_device_assignment=True
    )
    definition = GraphDef.FromString(written.numpy())
    by_name = {node.name: node for node in definition.node}
    (result,) = (node for node in definition.node if node.op == "_Retval")
    return by_name[result.input[0]], by_name


def _value(constant: NodeDef) -> tf.Tensor:
    """The value of a node that is a constant; NumPy knows no handles of resources."""
    definition = GraphDef(node=[constant])

    @tf.function(autograph=False)
    def value() -> tf.Tensor:
        return tf.graph_util.import_graph_def(
            definition, return_elements=[f"{constant.name}:0"], name=""
        )[0]

    return value()


def shuffled(source: tf.data.Dataset, like: Any, seed: int | None = None) -> tf.data.Dataset:
    """A shuffle of `source` that is like another one, with orders of its own.

    Its seed is that of the other one, if no other is given.
    """
    seeds = (like._seed, like._seed2) if seed is None else (0, seed)
    return _shuffled(source, like, seeds, _own_seed_generator(like, seeds))


def _shuffled(
    source: tf.data.Dataset,
    like: Any,
    seeds: tuple[Any, Any],
    generator: tf.Tensor,
) -> tf.data.Dataset:
    again = copy.copy(like)
    again._input_dataset = source
    again._seed, again._seed2 = (tf.cast(one, tf.int64) for one in seeds)
    again._like = like  # which the generator may belong to
    variant = gen_dataset_ops.shuffle_dataset_v3(
        source._variant_tensor,
        buffer_size=again._buffer_size,
        seed=again._seed,
        seed2=again._seed2,
        seed_generator=generator,
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
    dataset: tf.data.Dataset, changes: dict[str, Any], replace: Replace, traced: list[Any]
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
    with _already_traced(traced) if traced else nullcontext():
        return type(dataset)(**arguments)


@contextmanager
def _already_traced(traced: list[Any]) -> Iterator[None]:
    """Lets a dataset that is made in the meantime have these functions, in this order.

    Otherwise it would trace them, and find what they refer to as it is now, not as it was.
    """
    thread, trace = threading.get_ident(), StructuredFunctionWrapper
    following = itertools.cycle(traced)

    def take(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return trace(*args, **kwargs)
        return next(following)

    structured_function.StructuredFunctionWrapper = take
    try:
        yield
    finally:
        structured_function.StructuredFunctionWrapper = trace


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
