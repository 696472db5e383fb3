"""TensorFlow's private names: no other module uses them.

When TensorFlow drops one of them, nothing breaks but what needs it. A name that is gone raises
`MissingNameError` where it is used, and the caller does without: a `tf.data` pipeline is not taken
apart then, and finished batches are cut. `tests/unit/test_internals_tensorflow.py` takes each name
away in turn; `tests/unit/test_data_pipeline.py` checks that the names mean what we take them for.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any, Literal, get_args

import tensorflow as tf

from tarantella.errors import VersionError
from tarantella.runtime import servers, versions
from tarantella.runtime.log import LOGGER

# The classes of datasets, by the method of `tf.data.Dataset` that makes them.
BATCH = ("data.ops.batch_op._BatchDataset", "data.ops.batch_op._ParallelBatchDataset")
CACHE = ("data.ops.cache_op.CacheDataset",)
CONCATENATE = ("data.ops.concatenate_op._ConcatenateDataset",)
DENSE_TO_RAGGED = ("data.ops.ragged_batch_op._DenseToRaggedDataset",)  # in `ragged_batch`
DIRECTED_INTERLEAVE = ("data.ops.directed_interleave_op._DirectedInterleaveDataset",)
MAP = ("data.ops.map_op._MapDataset", "data.ops.map_op._ParallelMapDataset")
OPTIONS = ("data.ops.dataset_ops._OptionsDataset",)
PADDED_BATCH = ("data.ops.padded_batch_op._PaddedBatchDataset",)
PARALLEL_INTERLEAVE = ("data.ops.interleave_op._ParallelInterleaveDataset",)
PREFETCH = ("data.ops.prefetch_op._PrefetchDataset",)
RANDOM = ("data.ops.random_op._RandomDataset",)
REBATCH = ("data.ops.rebatch_op._RebatchDataset",)
REPEAT = ("data.ops.repeat_op._RepeatDataset",)
SHARD = ("data.ops.shard_op._ShardDataset",)
SHUFFLE = ("data.ops.shuffle_op._ShuffleDataset",)
SKIP = ("data.ops.skip_op._SkipDataset",)
SNAPSHOT = ("data.ops.snapshot_op._SnapshotDataset",)
TAKE = ("data.ops.take_op._TakeDataset",)
TENSORS = (
    "data.ops.from_tensors_op._TensorDataset",
    "data.ops.from_tensor_slices_op._TensorSliceDataset",
)
ZIP = ("data.ops.zip_op._ZipDataset",)

_PARALLEL = (BATCH[1], MAP[1])  # these keep `num_parallel_calls` and `deterministic`
_V1_ADAPTER = ("data.ops.dataset_ops.DatasetV1Adapter",)

# Arguments that a dataset was made with, which it keeps as attributes: `_batch_size`.
Argument = Literal[
    "batch_size", "batch_sizes", "buffer_size", "datasets", "deterministic", "drop_remainder",
    "filename", "input_dataset", "name", "num_parallel_calls", "padded_shapes", "padding_values",
    "path", "rerandomize", "reshuffle_each_iteration", "seed", "seed2", "selector_input", "tensors",
]  # fmt: skip

_FUNCTION = "data.ops.structured_function.StructuredFunctionWrapper"
_UNARY = "data.ops.dataset_ops.UnaryUnchangedStructureDataset"
_TO_TENSORS = "data.util.structure.to_tensor_list"
_FROM_TENSORS = "data.util.structure.from_compatible_tensor_list"
_FLATTEN_UP_TO = "data.util.nest.flatten_up_to"
_CONTEXT = "eager.context.context"
_IS_DETERMINISTIC = "framework.config.is_op_determinism_enabled"
_JOB = "worker"  # what the ranks are to TensorFlow's servers

# Every name that this module looks up in a module of `tensorflow.python`, and every attribute.
MODULE_NAMES = (
    *BATCH, *CACHE, *CONCATENATE, *DENSE_TO_RAGGED, *DIRECTED_INTERLEAVE, *MAP, *OPTIONS,
    *PADDED_BATCH, *PARALLEL_INTERLEAVE, *PREFETCH, *RANDOM, *REBATCH, *REPEAT, *SHARD, *SHUFFLE,
    *SKIP, *SNAPSHOT, *TAKE, *TENSORS, *ZIP, *_V1_ADAPTER,
    _FUNCTION, _UNARY, _TO_TENSORS, _FROM_TENSORS, _FLATTEN_UP_TO, _CONTEXT,
    _IS_DETERMINISTIC,
)  # fmt: skip
ATTRIBUTES = (
    *(f"_{name}" for name in get_args(Argument)),
    # of datasets
    "_common_args", "_dataset", "_functions", "_inputs",
    # of the functions of datasets
    "_func", "_function", "_input_structure", "function", "output_structure",
    # of graphs, of the eager context, and of TensorFlow itself
    "_get_function", "capture", "_rng", "_seed", "eager_context",
    "outer_graph", "experimental_acd_manager", "run_independently",
    "config", "configure_collective_ops", "enable_collective_ops",
)  # fmt: skip

# What marks a function of a dataset, and the operation whose input is the result of a graph.
DATASET_FUNCTION = {"_tf_data_function": True}
RESULT = "_Retval"
# What TensorFlow says if a model looks for a row that another rank has.
MISSING_ROW = re.compile(r"slice index -?\d+ of dimension 0 out of bounds")

# The operations that do nothing but call a function.
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# The attributes in which operations name functions: calls, branches and loops.
CALLED = {
    **dict.fromkeys(CALLS, ("f",)),
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("While", "StatelessWhile"), ("cond", "body")),
    **dict.fromkeys(("Case", "StatelessCase"), ("branches",)),
}

Replace = Callable[[tf.data.Dataset], tf.data.Dataset]

_NOT_THERE = object()
_told: set[str] = set()


class MissingNameError(VersionError):
    """This TensorFlow does not have a private name that Tarantella uses.

    Args:
        private_name: The name.
    """

    def __init__(self, private_name: str) -> None:
        super().__init__(str(versions.missing("TensorFlow", f"it has no `{private_name}`")))
        self.private_name = private_name


def tell_once(missing: MissingNameError, consequence: str) -> None:
    """Logs, once for each name, what is done without it."""
    name = missing.private_name
    if name not in _told:
        _told.add(name)
        LOGGER.info("TensorFlow %s has no `%s`: %s", tf.__version__, name, consequence)


@cache
def _found(path: str) -> Any:
    """A name in a module of `tensorflow.python`."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(f"tensorflow.python.{module}"), name)
    except (ImportError, AttributeError):
        raise MissingNameError(f"tensorflow.python.{path}") from None


def _attribute(owner: Any, name: str) -> Any:
    value = getattr(owner, name, _NOT_THERE)
    if value is _NOT_THERE:
        raise MissingNameError(f"{type(owner).__name__}.{name}")
    return value


# Datasets


def is_a(dataset: tf.data.Dataset, *kinds: tuple[str, ...]) -> bool:
    """Whether a dataset is a transformation of one of these kinds, such as `SHUFFLE`."""
    return isinstance(dataset, tuple(_found(path) for kind in kinds for path in kind))


def unwrapped(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset itself, where it is wrapped in the interface of TensorFlow 1."""
    while is_a(dataset, _V1_ADAPTER):
        dataset = _attribute(dataset, "_dataset")
    return dataset


def sources(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The datasets that this one is a transformation of."""
    return [unwrapped(source) for source in _attribute(unwrapped(dataset), "_inputs")()]


def members(structure: Any, element: Any) -> list[Any]:
    """What an element has in the place of each leaf of a structure, which is the outer one."""
    return list(_found(_FLATTEN_UP_TO)(structure, element))


def map_inline(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """What `dataset.map(function)` is, computed in the thread that asks for an element.

    That is for a function that costs less than handing its operations to other threads.
    """
    try:
        mapped = _found(MAP[0])
    except MissingNameError:
        return dataset.map(function)
    made: tf.data.Dataset = mapped(dataset, function, use_inter_op_parallelism=False)
    return made


def argument(dataset: tf.data.Dataset, name: Argument) -> Any:
    """An argument that a dataset was made with."""
    return _attribute(dataset, f"_{name}")


def parallel_calls(dataset: tf.data.Dataset) -> int | None:
    """How many elements a `map` or `batch` works on at a time; None if it was not told."""
    return int(argument(dataset, "num_parallel_calls")) if is_a(dataset, _PARALLEL) else None


def is_nondeterministic(dataset: tf.data.Dataset) -> bool:
    """Whether a transformation was made with `deterministic=False`, as far as it keeps that."""
    if is_a(dataset, _PARALLEL):
        return argument(dataset, "deterministic") == "false"
    return getattr(dataset, "_deterministic", None) == "false"


def made_again(
    dataset: tf.data.Dataset, replace: Replace, traced: list[Any], **changes: Any
) -> tf.data.Dataset:
    """Calls the class of a dataset with the arguments that it keeps as attributes.

    Args:
        dataset: The dataset.
        replace: What makes its inputs of those it has.
        traced: Its functions.
        **changes: Other values for arguments.
    """
    arguments = {}
    for name, parameter in list(inspect.signature(type(dataset).__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        attribute = "_input_dataset" if name == "dataset" else f"_{name}"
        kept = getattr(dataset, attribute, _NOT_THERE)
        if name in changes:
            arguments[name] = changes[name]
        elif kept is not _NOT_THERE:
            arguments[name] = _kept_argument(name, kept, replace)
        elif name == "deterministic":  # an `interleave` does not keep it
            arguments[name] = True
        elif name == "row_splits_dtype":  # kept only in what the dataset yields
            arguments[name] = _row_splits_dtype(dataset.element_spec)
        elif parameter.default is parameter.empty:
            raise MissingNameError(f"{type(dataset).__name__}.{attribute}")
    with _already_traced(traced) if traced else nullcontext():
        return type(dataset)(**arguments)


def _kept_argument(name: str, value: Any, replace: Replace) -> Any:
    if name == "deterministic":
        return {"default": None, "true": True, "false": True}.get(value, value)
    if isinstance(value, _found(_FUNCTION)):
        return _attribute(value, "_func")
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


def shuffled_again(
    source: tf.data.Dataset, like: Any, seeds: tuple[Any, Any], generator: tf.Tensor
) -> tf.data.Dataset:
    """A `shuffle` like another one, with these seeds and the state of this seed generator."""
    again = copy.copy(like)
    again._input_dataset = source
    again._seed, again._seed2 = (tf.cast(one, tf.int64) for one in seeds)
    again._like = like  # which the generator may belong to
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(source),
        buffer_size=argument(again, "buffer_size"),
        seed=again._seed,
        seed2=again._seed2,
        seed_generator=generator,
        reshuffle_each_iteration=argument(again, "reshuffle_each_iteration"),
        **_attribute(again, "_common_args"),
    )
    _found(_UNARY).__init__(again, source, variant)
    return again


# The functions of datasets


def functions(dataset: tf.data.Dataset) -> list[Any]:
    """The traced functions of a transformation."""
    return list(_attribute(dataset, "_functions")())


def concrete(function: Any) -> Any:
    """The `ConcreteFunction` that the function of a dataset was traced to."""
    return _attribute(function, "function")


def input_spec(function: Any) -> Any:
    """The structure of the elements that the function of a dataset takes."""
    return _attribute(function, "_input_structure")


def call(function: Any, element: Any) -> Any:
    """Calls the function that `map` has traced on an element, as `map` does."""
    tensors = _found(_TO_TENSORS)(input_spec(function), element)
    results = concrete(function)(*tensors)
    return _found(_FROM_TENSORS)(_attribute(function, "output_structure"), list(results))


def traced_again(function: Any, spec: Any) -> Any:
    """The function of a `map`, traced again for elements of another structure."""
    return _found(_FUNCTION)(_attribute(function, "_func"), "Dataset.map()", input_structure=spec)


def with_concrete(function: Any, new: Any) -> Any:
    """The function of a dataset with another `ConcreteFunction`."""
    _attribute(function, "_function")
    again = copy.copy(function)
    again._function = new
    again._original = function  # keeps Python functions that it calls
    return again


@contextmanager
def _already_traced(traced: list[Any]) -> Iterator[None]:
    """Gives a dataset that is made meanwhile these functions, in this order.

    Otherwise it would trace them, and find what they refer to as it is now, not as it was.
    """
    thread, trace = threading.get_ident(), _found(_FUNCTION)
    following = itertools.cycle(traced)
    module, _, name = _FUNCTION.rpartition(".")
    owner = import_module(f"tensorflow.python.{module}")

    def take(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return trace(*args, **kwargs)
        return next(following)

    setattr(owner, name, take)
    try:
        yield
    finally:
        setattr(owner, name, trace)


# The global seed, which TensorFlow lets users set but not read


def global_seed() -> int | None:
    """The seed given to `tf.random.set_seed`, or None."""
    seeds: list[int | None] = []

    @tf.function(autograph=False)
    def read() -> None:  # the graph of a function takes over the global seed
        seeds.append(tf.compat.v1.get_default_graph().seed)

    read.get_concrete_function()
    return seeds[0]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Makes random operations that are created meanwhile use another global seed."""
    try:
        state = _found(_CONTEXT)()
        before = _attribute(state, "_seed"), getattr(state, "_rng", None)  # none until it is seeded
    except MissingNameError:
        if global_seed() is not None:
            raise
        state = None
    tf.random.set_seed(seed)
    try:
        yield
    finally:
        if state is None:
            tf.random.set_seed(None)
        else:
            state._seed, state._rng = before


# Graphs


def called_graph(operation: tf.Operation, attribute: str = "f") -> Any | None:
    """The graph of the function that an attribute of an operation names, if it is known."""
    return _graph_of(operation, operation.get_attr(attribute).name)


def called_graphs(operation: tf.Operation) -> list[Any]:
    """The graphs of all functions that an operation may call, as far as they are known."""
    named = [operation.get_attr(attribute) for attribute in CALLED.get(operation.type, ())]
    functions = [one for each in named for one in (each if isinstance(each, list) else [each])]
    graphs = [_graph_of(operation, function.name) for function in functions]
    return [graph for graph in graphs if graph is not None]


def _graph_of(operation: tf.Operation, name: str) -> Any | None:
    try:
        function = function_in(operation.graph, name)
    except MissingNameError as missing:
        tell_once(missing, "functions that call others are not analyzed.")
        return None
    return None if function is None else function.graph


def enclosing_graphs() -> list[Any] | None:
    """The graph being traced, and those of the functions that trace it; None if unknown."""
    graph = tf.compat.v1.get_default_graph()
    graphs = []
    while (outer := getattr(graph, "outer_graph", _NOT_THERE)) is not _NOT_THERE:
        graphs.append(graph)
        graph = outer
    return graphs or None


def run_independently(operation: tf.Operation) -> None:
    """Makes TensorFlow run an operation for its effects, but not in the order of the program.

    Where TensorFlow has no such thing, the operation stays in program order: right, but slower.
    """
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    run = getattr(manager, "run_independently", None)
    if run is not None:
        run(operation)


def function_in(graph: Any, name: str) -> Any:
    """The function that is called by this name in a graph, with its `graph`; None if unknown."""
    return _attribute(graph, "_get_function")(name)


def captured(graph: Any, tensor: tf.Tensor) -> tf.Tensor:
    """What stands for a tensor from outside in the graph of a function."""
    return _attribute(graph, "capture")(tensor)


@contextmanager
def own_graph() -> Iterator[None]:
    """Traces functions of datasets in a graph that lives no longer than they do.

    TensorFlow keeps Python functions that they call, and the functions of a `scan`, with the graph
    around it all. By default that is the program's graph, which is never freed.
    """
    eager_mode = _eager_mode()
    if eager_mode is None:
        yield
    else:
        with tf.Graph().as_default(), eager_mode():
            yield


def _eager_mode() -> Any | None:
    try:
        return _attribute(tf.__internal__, "eager_context").eager_mode
    except MissingNameError as missing:
        tell_once(missing, "what datasets hold is freed only when the program ends.")
        return None


def may_be_deterministic() -> bool:
    """Whether the user wants deterministic operations, of which the time of day is none."""
    try:
        return bool(_found(_IS_DETERMINISTIC)())
    except MissingNameError as missing:
        tell_once(missing, "the summary does not tell how long steps wait for their data.")
        return True


# Servers


class _ServerDef:
    """What TensorFlow has to know of its server, put together when it starts the server.

    By then, users have set devices and threads as they want them.
    """

    def __init__(self, eager_context: Any, addresses: Sequence[str], rank: int) -> None:
        self._context = eager_context
        self._definition = tf.train.ServerDef(
            cluster=tf.train.ClusterSpec({_JOB: list(addresses)}).as_cluster_def(),
            job_name=_JOB,
            task_index=rank,
            protocol="grpc",
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._definition, name)

    def SerializeToString(self) -> bytes:  # noqa: N802, as protocol buffers call it
        servers.release_port()
        self._definition.default_session_config.CopyFrom(_attribute(self._context, "config"))
        serialized: bytes = self._definition.SerializeToString()
        return serialized


def start_server(addresses: Sequence[str], rank: int) -> None:
    """Makes TensorFlow start a server with its first operation; collectives need it.

    `tf.distribute.MultiWorkerMirroredStrategy` does the same, and also starts a service that ends
    all ranks, with a page of messages each, when it misses one of them.

    Args:
        addresses: The address of each rank's server.
        rank: This rank.

    Raises:
        RuntimeError: If TensorFlow has begun to work already.
    """
    eager_context = _found(_CONTEXT)()
    configure = _attribute(eager_context, "configure_collective_ops")
    enable = _attribute(eager_context, "enable_collective_ops")
    _attribute(type(eager_context), "config")  # needed when it starts, which is too late for errors
    configure(
        collective_leader=f"/job:{_JOB}/replica:0/task:0",
        scoped_allocator_enabled_ops=(),
        device_filters=(f"/job:{_JOB}/task:{rank}",),
    )
    enable(_ServerDef(eager_context, addresses, rank))
