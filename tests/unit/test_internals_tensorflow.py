"""When TensorFlow drops a private name, only what needs it falls back, and says so once."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from tarantella.data import order
from tarantella.data.batch_size import find_batch_size, is_unbatched, may_be_batched
from tarantella.data.split import split
from tarantella.errors import InputError
from tarantella.graph import compiling
from tarantella.internals import tensorflow as internals
from tarantella.internals.tensorflow import MissingNameError
from tarantella.runtime.log import LOGGER

_range = tf.data.Dataset.range

NAMES = [path.rpartition(".")[2] for path in internals.MODULE_NAMES] + list(internals.ATTRIBUTES)
# What no dataset below needs: a look at the eager context and a graph of one's own have nothing to
# do with it, and a dataset of random numbers is made again only if it has no seed. Calls of Python
# functions have tests of their own, in test_graph_host_call.py; servers, in test_graph_engine.py;
# deterministic operations, in test_reproducibility.py.
ELSEWHERE = {
    *("context", "_rng", "eager_context", "_rerandomize", "_name"),
    *("outer_graph", "experimental_acd_manager", "run_independently"),
    *("config", "configure_collective_ops", "enable_collective_ops"),
    "is_op_determinism_enabled",
}
# Attributes that made_again() reads by the names of the arguments of a class.
KEPT = ["_count", "_num_shards", "_index"]  # and `_map_func`, see below


class PrivateNames:
    """Takes private names away, and notes those that are asked for."""

    def __init__(self) -> None:
        self.gone: set[str] = set()
        self.asked: set[str] = set()

    def getattr(self, owner: Any, name: str, *default: Any) -> Any:
        self.asked.add(name)
        if name not in self.gone:
            return getattr(owner, name, *default)
        if default:
            return default[0]
        raise AttributeError(name)


@contextmanager
def _watched() -> Iterator[PrivateNames]:
    names = PrivateNames()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals, "getattr", names.getattr, raising=False)
        patch.setattr(internals, "_told", set())
        internals._found.cache_clear()
        yield names
    internals._found.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def no_global_seed() -> None:
    tf.random.set_seed(None)  # a test of another module may have set one


@pytest.fixture
def private_names() -> Iterator[PrivateNames]:
    with _watched() as names:
        yield names


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(LOGGER, "propagate", True)
    with caplog.at_level("INFO", LOGGER.name):
        yield caplog


def _add_one(i: tf.Tensor) -> tf.Tensor:
    return i + 1


def _mapped(n: int = 14) -> tf.data.Dataset:
    return _range(n).map(_add_one, num_parallel_calls=2)


@tf.function
def _draw() -> tf.Tensor:
    return _generator.uniform([])


_generator = tf.random.Generator.from_seed(5)
_one = tf.constant(1.0)

# The first member of each element is not random.
DATASETS: dict[str, Callable[[Path], tf.data.Dataset]] = {
    "elements": lambda _: (
        tf.data.Dataset.from_tensor_slices(np.arange(14))
        .map(_add_one, num_parallel_calls=2)
        .shuffle(14, seed=3)
        .skip(1)
        .shard(2, 0)
        .prefetch(1)
        .batch(4, num_parallel_calls=2)
    ),
    "batches": lambda _: (
        _mapped().cache().batch(4).with_options(tf.data.Options()).repeat(2).take(3)
    ),
    "TensorFlow 1": lambda _: tf.compat.v1.data.Dataset.range(14).map(_add_one).batch(4),
    "padded": lambda _: (
        _mapped()
        .map(lambda i: (i, tf.range(i % 5)))
        .padded_batch(4, padding_values=(None, tf.constant(-1, tf.int64)))
    ),
    "ragged": lambda _: _mapped().map(lambda i: (i, tf.range(i % 5))).ragged_batch(4),
    "rebatch": lambda _: _mapped().batch(3).rebatch(4),
    "several": lambda _: tf.data.Dataset.sample_from_datasets(
        [_mapped().batch(4), _mapped(6).batch(4).concatenate(_mapped(3).batch(2))], seed=3
    ),
    "zip": lambda _: tf.data.Dataset.zip(
        (_mapped().batch(4), tf.data.Dataset.zip((_mapped(), _range(14))).batch(4))
    ),
    "interleave": lambda _: (
        _range(4).interleave(lambda i: _range(3), num_parallel_calls=2).map(_add_one).batch(4)
    ),
    "draws": lambda _: _range(14).map(lambda i: (i, _one + tf.random.uniform([], seed=3))).batch(4),
    "generator": lambda _: _range(14).map(lambda i: (i, _draw())).batch(4),
    "filter": lambda _: _mapped().filter(lambda i: i % 3 != 1).batch(4),
    "fixed size": lambda _: (
        _mapped().batch(4, drop_remainder=True).map(lambda batch: (batch * 2, batch))
    ),
    "cache in a file": lambda folder: _mapped().cache(str(folder / "cache")).batch(4),
    "snapshot": lambda folder: _mapped().snapshot(str(folder / "snapshot")).batch(4),
}


def _first_member(element: Any) -> list[int]:
    return [int(i) for i in tf.nest.flatten(element)[0]]


def _together(make: Callable[[], tf.data.Dataset], size: int = 2) -> list[list[int]]:
    """The batches that the micro-batches of all ranks make."""
    everyones = []
    for rank in range(size):
        order._uses = itertools.count()  # as on a rank of its own
        everyones.append(list(split(make(), rank, size).micro_batches))
    return [
        [i for one in step for i in _first_member(one.data)[: int(one.count)]]
        for step in zip(*everyones, strict=True)
    ]


class Usual(NamedTuple):
    """What a dataset gives, and which names it takes to split it, with all names there."""

    plain: list[list[int]]
    together: list[list[int]]
    names: set[str]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Usual]:
    found = {}
    for name, make in DATASETS.items():
        plain, ranks = (tmp_path_factory.mktemp("usual") for _ in range(2))
        with _watched() as names:
            together = _together(partial(make, ranks))
        found[name] = Usual([_first_member(one) for one in make(plain)], together, names.asked)
    return found


@pytest.mark.parametrize("name", DATASETS)
def test_micro_batches_make_the_batches(name: str, usual: dict[str, Usual]) -> None:
    assert usual[name].together == usual[name].plain


@pytest.mark.parametrize("gone", sorted({*NAMES, *KEPT} - ELSEWHERE))
def test_without_a_name_batches_are_cut(
    gone: str,
    usual: dict[str, Usual],
    private_names: PrivateNames,
    log: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    # Only parallel transformations must have this one.
    datasets = ["filter"] if gone == "_deterministic" else DATASETS
    name = next(name for name in datasets if gone in usual[name].names)
    private_names.gone.add(gone)
    assert _together(lambda: DATASETS[name](tmp_path)) == usual[name].plain
    about = [one.getMessage() for one in log.records if "has no" in one.getMessage()]
    assert len(about) == 1
    assert f"{gone}`: " in about[0]
    assert "cuts its micro-batch" in about[0] or gone == "_get_function"


def test_without_a_name_to_make_a_map_again_a_snapshot_is_an_error(
    private_names: PrivateNames, tmp_path: Path
) -> None:
    """All ranks would write the same files."""
    private_names.gone.add("_map_func")
    with pytest.raises(InputError, match="its own cache file"):
        split(DATASETS["snapshot"](tmp_path), 0, 2)


def test_every_name_that_is_looked_up_is_in_the_list() -> None:
    source = inspect.getsource(internals)
    attributes = re.findall(r'attr(?:ibute)?\(\w[\w.]*, "(\w+)"', source)
    assert attributes
    assert set(attributes) <= set(internals.ATTRIBUTES)
    paths = re.findall(r'"((?:data|eager|framework)\.[\w.]+)"', source)
    assert set(paths) == set(internals.MODULE_NAMES)


@pytest.mark.parametrize("gone", ["_PaddedBatchDataset", "_selector_input", "_input_structure"])
def test_an_order_left_to_chance_is_still_that_of_all_ranks(
    gone: str, private_names: PrivateNames
) -> None:
    private_names.gone.add(gone)
    batches = _together(lambda: _range(14).shuffle(14).map(_add_one).batch(4))
    assert sorted(i for batch in batches for i in batch) == list(range(1, 15))


@pytest.mark.parametrize("gone", ["_ShuffleDataset", "_inputs"])
def test_where_the_order_cannot_be_told_the_message_asks_for_seeds(
    gone: str, private_names: PrivateNames, log: pytest.LogCaptureFixture
) -> None:
    private_names.gone.add(gone)
    own = split(_mapped().batch(4), 0, 2)
    assert "Seed every `shuffle`" in log.text
    assert all(int(one.fingerprint) for one in own.micro_batches)


@pytest.mark.parametrize(
    ("gone", "transformation", "make"),
    [
        ("_rerandomize", "random", lambda: tf.data.Dataset.random().take(8).batch(4)),
        ("_batch_size", "batch", lambda: _range(14).shuffle(14).map(_add_one).batch(4)),
    ],
)
def test_an_order_that_cannot_be_made_common_is_an_error(
    gone: str,
    transformation: str,
    make: Callable[[], tf.data.Dataset],
    private_names: PrivateNames,
) -> None:
    private_names.gone.add(gone)
    with pytest.raises(InputError, match=f"`{transformation}` .*{gone}.* every shuffle a seed"):
        split(make(), 0, 2)


def test_a_batch_size_that_cannot_be_told(private_names: PrivateNames) -> None:
    private_names.gone.add("_inputs")
    dataset = _range(9).batch(4).prefetch(1)
    assert find_batch_size(dataset) is None
    assert may_be_batched(dataset)
    assert is_unbatched(_range(9))
    assert not is_unbatched(_range(9).batch(4).enumerate())


def test_data_that_cannot_be_read_may_not_restart(private_names: PrivateNames) -> None:
    assert order.restarts_each_pass(_range(9).batch(4))
    private_names.gone.add("_functions")
    assert not order.restarts_each_pass(_range(9).batch(4))


def test_what_a_function_calls_is_not_known(
    private_names: PrivateNames, log: pytest.LogCaptureFixture
) -> None:
    graph = tf.function(_draw).get_concrete_function().graph
    (call,) = [op for op in graph.get_operations() if op.type in internals.CALLS]
    assert internals.called_graph(call) is not None
    private_names.gone.add("_get_function")
    assert internals.called_graph(call) is None
    assert internals.called_graph(call) is None
    assert log.text.count("has no `FuncGraph._get_function`") == 1


@pytest.mark.parametrize("where", ["call", "branch", "case", "loop"])
def test_what_calls_branches_and_loops_do_is_found(where: str) -> None:
    def loop(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda x: x < 9.0, lambda x: [tf.sin(x) + 2.0], [x])[0]

    ways = {
        "call": lambda x: tf.function(loop)(x),
        "branch": lambda x: tf.cond(x > 0.0, lambda: loop(x), lambda: x),
        "case": lambda x: tf.switch_case(tf.cast(x, tf.int32), [lambda: x, lambda: loop(x)]),
        "loop": loop,
    }
    graph = tf.function(ways[where]).get_concrete_function(tf.TensorSpec((), tf.float32)).graph
    assert compiling.has_operation(graph, ("Sin",))
    assert compiling.has_operation(graph, ("While", "StatelessWhile"))
    assert not compiling.has_operation(graph, ("Cos",))


@pytest.mark.parametrize("gone", ["context", "_seed"])
def test_the_global_seed_is_kept_without_a_look_at_the_context(
    gone: str, private_names: PrivateNames
) -> None:
    tf.random.set_seed(None)
    private_names.gone.add(gone)
    with order.common_seed():
        assert internals.global_seed() is not None
    assert internals.global_seed() is None
    tf.random.set_seed(3)
    with order.common_seed():
        assert internals.global_seed() == 3
    with pytest.raises(MissingNameError), internals.seeded(4):
        pass
    assert internals.global_seed() == 3
    tf.random.set_seed(None)


def test_without_eager_mode_there_is_no_graph_of_its_own(
    private_names: PrivateNames, log: pytest.LogCaptureFixture
) -> None:
    program = tf.compat.v1.get_default_graph()
    with internals.own_graph():
        assert tf.executing_eagerly()
        assert tf.compat.v1.get_default_graph() is not program
    private_names.gone.add("eager_context")
    with internals.own_graph():
        assert tf.executing_eagerly()
        assert tf.compat.v1.get_default_graph() is program
    assert "has no `" in log.text
