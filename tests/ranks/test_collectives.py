"""The collectives on real ranks, against numpy on what all ranks hold."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tarantella.comm import agreement, buffers, waiting
from tarantella.comm.agreement import check_same
from tarantella.comm.collectives import allgather, allreduce, barrier, broadcast
from tarantella.errors import InputError, MismatchError
from tarantella.runtime import world

pytestmark = pytest.mark.ranks(1, 2, 3)
several_ranks = pytest.mark.ranks(2, 3)

FLOATS = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "float64"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
COMPLEX = ["complex64", "complex128"]
NARROW = [name for name in FLOATS if ml_dtypes.finfo(name).bits <= 16]
DTYPES = [*FLOATS, *INTEGERS, *COMPLEX, "bool"]
SHAPES = [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4)]

Point = namedtuple("Point", "x y")


def held_by(rank: int, dtype: str = "float32", shape: tuple[int, ...] = (5, 7)) -> np.ndarray:
    """What a rank holds; every rank can compute every other's."""
    random = np.random.default_rng(rank)
    if dtype == "bool":
        return np.asarray(random.integers(0, 2, shape), bool)
    if dtype in INTEGERS:
        return np.asarray(random.integers(0, 30, shape), dtype)
    if dtype in COMPLEX:
        return np.asarray(random.normal(size=shape) + 1j * random.normal(size=shape), dtype)
    return np.asarray(random.normal(size=shape), dtype)


def held_by_all(dtype: str = "float32", shape: tuple[int, ...] = (5, 7)) -> np.ndarray:
    return np.stack([held_by(rank, dtype, shape) for rank in range(world.get_size())])


def assert_same_bits(result: Any, expected: Any) -> None:
    assert isinstance(result, np.ndarray)
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert result.tobytes() == expected.tobytes()


# Values


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX])
def test_allreduce_sums(dtype):
    for shape in SHAPES:
        result = allreduce(held_by(world.get_rank(), dtype, shape))
        assert result.dtype == dtype
        assert result.shape == shape
        every = held_by_all(dtype, shape)
        if dtype in NARROW:
            # The order of the sum in float32 may decide the last bit after rounding.
            tolerance = float(ml_dtypes.finfo(dtype).eps)
            result, every = result.astype("float32"), every.astype("float32")
        else:
            tolerance = 0 if dtype in INTEGERS else 4 * np.finfo(dtype).eps
        expected = every.sum(axis=0, dtype=every.dtype)
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_allreduce_takes_extremes(dtype):
    mine, every = held_by(world.get_rank(), dtype), held_by_all(dtype)
    assert_same_bits(allreduce(mine, "min"), every.min(axis=0))
    assert_same_bits(allreduce(mine, "max"), every.max(axis=0))


@pytest.mark.parametrize("dtype", ["float64", "complex128", "float16", "int8", "uint64"])
def test_allreduce_averages(dtype):
    result = allreduce(held_by(world.get_rank(), dtype), "mean")
    assert result.dtype == ("float64" if dtype in INTEGERS else dtype)
    work = "float32" if dtype == "float16" else dtype
    tolerance = 1e-3 if dtype == "float16" else 1e-14
    expected = held_by_all(dtype).astype(work).mean(axis=0)
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


def test_half_precision_is_rounded_once():
    # Rounded to float16 after each rank, 2048 + 1 + 1 stays 2048.
    mine = np.float16([2048 if world.get_rank() == 0 else 1])
    expected = np.float16([2048 + (world.get_size() - 1)])
    assert_same_bits(allreduce(mine), expected)


def test_half_precision_overflows_to_infinity_without_a_warning():
    result = allreduce(np.full(3, 60000, "float16"))
    assert np.all(np.isinf(result)) == (world.get_size() > 1)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_nan_wins(op, dtype):
    for sign in (1, -1):
        mine = np.array([1, -1, np.inf, -np.inf, 0], dtype)
        if world.get_rank() == world.get_size() - 1:
            mine[:4] = sign * np.nan
        result = allreduce(mine, op)
        assert np.isnan(result[:4].astype("float32")).all()
        assert result[4] == 0


def test_signed_zeros_and_infinities_are_ordered():
    mine = np.array([0.0, -np.inf] if world.get_rank() == 0 else [-0.0, np.inf])
    largest, smallest = allreduce(mine, "max"), allreduce(mine, "min")
    several = world.get_size() > 1
    assert not np.signbit(largest[0])
    assert np.signbit(smallest[0]) == several
    assert largest[1] == (np.inf if several else -np.inf)
    assert smallest[1] == -np.inf


def test_integers_wrap_and_python_integers_do_not():
    size = world.get_size()
    assert allreduce(np.array([127], "int8"))[0] == np.array(127 * size).astype("int8")
    for number in (2**63 - 1, -(2**63), -1, 0, 2**32, -(2**32) - 1):
        total = allreduce(number)
        assert type(total) is int
        assert total == number * size
    assert allreduce(np.int64(2**63 - 1)) == np.array([2**63 - 1] * size).sum()
    assert allreduce(2**62, "mean") == 2.0**62
    assert allreduce(-(2**63), "min") == -(2**63)


@pytest.mark.parametrize("size", [1, 100, 5_000, 100_000, 3_000_000])
def test_all_ranks_and_all_runs_have_the_same_bits(size):
    mine = held_by(world.get_rank(), "float32", (size,))
    first, second = allreduce(mine), allreduce(mine.copy())
    assert_same_bits(second, first)
    for other in allgather(first):
        assert_same_bits(other, first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_gives_the_roots_value(dtype):
    for root in range(world.get_size()):
        for shape in SHAPES:
            result = broadcast(held_by(world.get_rank(), dtype, shape), root)
            assert_same_bits(result, held_by(root, dtype, shape))


def test_broadcast_is_from_the_master_by_default():
    assert broadcast(world.get_rank()) == world.get_master_rank()


@pytest.mark.parametrize("dtype", DTYPES)
def test_allgather_gives_every_ranks_value(dtype):
    gathered = allgather(held_by(world.get_rank(), dtype))
    assert len(gathered) == world.get_size()
    for rank, result in enumerate(gathered):
        assert_same_bits(result, held_by(rank, dtype))


@pytest.mark.parametrize("trailing", [(), (3,), (0, 2)])
def test_allgather_takes_any_leading_size(trailing):
    gathered = allgather(held_by(world.get_rank(), shape=(world.get_rank(), *trailing)))
    for rank, result in enumerate(gathered):
        assert_same_bits(result, held_by(rank, shape=(rank, *trailing)))


def test_barrier_waits_for_the_last():
    last = world.get_size() - 1
    if world.get_rank() == last:
        time.sleep(0.3)
    began = time.time()
    barrier()
    ended = time.time()
    assert all(end >= allgather(began)[last] - 0.05 for end in allgather(ended))


# Kinds of values


def test_the_result_is_of_the_type_of_the_value():
    size = world.get_size()
    for value in (3, 2.5, 1 + 2j):
        for result in (allreduce(value), broadcast(value), allgather(value)[-1]):
            assert type(result) is type(value)
    assert allreduce(2.5) == 2.5 * size
    assert allreduce(world.get_rank() > 0, "max") is (size > 1)
    assert type(allreduce(1, "mean")) is float
    for scalar in (np.float32(2), np.int16(2), np.complex64(2), ml_dtypes.bfloat16(2)):
        result = allreduce(scalar)
        assert type(result) is type(scalar)
        assert result == 2 * size
        assert type(broadcast(scalar)) is type(scalar)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_give_tensors(dtype):
    import tensorflow as tf

    mine = tf.constant(held_by(world.get_rank(), dtype))
    results = [
        broadcast(mine),
        allgather(mine)[0],
        allreduce(mine, "sum" if dtype in COMPLEX else "max"),
    ]
    for result in results:
        assert isinstance(result, tf.Tensor)
        assert result.dtype == mine.dtype
        assert result.shape == mine.shape
    assert_same_bits(results[0].numpy(), held_by(0, dtype))
    assert_same_bits(results[1].numpy(), held_by(0, dtype))
    if dtype not in COMPLEX:
        assert_same_bits(results[2].numpy(), held_by_all(dtype).max(axis=0))


def test_variables_give_tensors_and_are_left_alone():
    import keras
    import tensorflow as tf

    mine = held_by(world.get_rank())
    for variable in (tf.Variable(mine), keras.Variable(mine)):
        for result in (allreduce(variable, "max"), broadcast(variable), allgather(variable)[0]):
            assert isinstance(result, tf.Tensor)
        assert_same_bits(allreduce(variable, "max").numpy(), held_by_all().max(axis=0))
        variable.assign(np.ones_like(mine))
        assert_same_bits(broadcast(variable).numpy(), np.ones_like(mine))


def test_empty_and_single_tensors():
    import tensorflow as tf

    for shape in SHAPES:
        mine = tf.constant(held_by(world.get_rank(), shape=shape))
        assert allreduce(mine).shape == shape
        assert_same_bits(np.asarray(broadcast(mine)), held_by(0, shape=shape))


def test_any_memory_layout_is_read_and_none_is_changed():
    mine = held_by(world.get_rank(), "float64", (6, 8))
    expected = held_by_all("float64", (6, 8)).max(axis=0)
    views = [lambda a: a[::2, ::-3], lambda a: a.T, np.asfortranarray, lambda a: a.astype(">f8")]
    for view in views:
        value = view(mine.copy())
        value.flags.writeable = False
        before = value.copy()
        for result in (allreduce(value, "max"), broadcast(value), allgather(value)[0]):
            assert result.flags.c_contiguous
            assert result.flags.writeable
            assert not np.shares_memory(result, value)
            result[...] = 0
        np.testing.assert_array_equal(value, before)
        np.testing.assert_array_equal(allreduce(value, "max"), view(expected))
        np.testing.assert_array_equal(broadcast(value), view(held_by(0, "float64", (6, 8))))


def test_structures_are_kept():
    rank, size = world.get_rank(), world.get_size()
    value = {
        "list": [1, np.float32([rank]), ()],
        "point": Point(rank, {"deep": (None, [])}),
        3: None,
        "ordered": OrderedDict(z=1, a=rank),
        "default": defaultdict(int, n=rank),
    }
    total = sum(range(size))
    expected = {
        "list": [size, np.float32([total]), ()],
        "point": Point(total, {"deep": (None, [])}),
        3: None,
        "ordered": OrderedDict(z=size, a=total),
        "default": defaultdict(int, n=total),
    }
    result = allreduce(value)
    assert result == expected
    assert list(result) == list(expected)
    assert type(result["ordered"]) is OrderedDict
    assert type(result["point"]) is Point
    assert result["default"].default_factory is int
    assert [entry["point"].x for entry in allgather(value)] == list(range(size))
    assert broadcast(value)["point"] == Point(0, {"deep": (None, [])})


def test_structures_without_leaves():
    for value in (None, [], {}, (), {"a": [None, ()]}):
        assert allreduce(value) == value
        assert broadcast(value) == value
        assert allgather(value) == [value] * world.get_size()


def test_the_order_of_a_dict_does_not_matter():
    rank = world.get_rank()
    names = ["b", "a", "c"] if rank % 2 else ["a", "b", "c"]
    result = allreduce({name: float(ord(name)) for name in names})
    assert result == {name: float(ord(name)) * world.get_size() for name in names}
    assert list(result) == names


def test_ranks_may_hold_the_same_in_different_types():
    import tensorflow as tf

    value = [1.0, np.float64(1), np.array(1.0), tf.constant(1.0, tf.float64)][world.get_rank()]
    result = allreduce(value)
    assert type(result) is type(value)
    assert float(result) == world.get_size()
    count = allreduce(2 if world.get_rank() else np.int64(1))
    assert count == 2 * world.get_size() - 1


def test_strings_are_sent():
    import tensorflow as tf

    def held(rank: int) -> dict[str, Any]:
        return {
            "text": "grüße \0 " * (rank + 1),
            "bytes": b"\xff\0\x01" * rank,
            "fixed": np.array([["é" * rank, "b"]]),
            "fixed bytes": np.array([b"x" * (rank + 1), b"\xff"]),
            "objects": np.array(["text", b"\xff\0", "t" * rank], object),
            "scalar": np.str_("s" * rank),
            "none": np.array([], str),
            "tensor": tf.constant([["a" * rank, "b"], ["", "d"]]),
            "single tensor": tf.constant("t" * rank),
        }

    def assert_equal(result: dict[str, Any], expected: dict[str, Any]) -> None:
        for name, want in expected.items():
            got = result[name]
            assert type(got) is type(want), name
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want), name)
            if isinstance(want, np.ndarray) and want.size:
                assert got.dtype == want.dtype, name
                assert [type(item) for item in got.flat] == [type(item) for item in want.flat]

    mine = held(world.get_rank())
    last = world.get_size() - 1
    assert_equal(broadcast(mine, last), held(last))
    for rank, result in enumerate(allgather(mine)):
        assert_equal(result, held(rank))


def test_many_leaves_of_many_sizes_and_dtypes():
    def held(rank: int) -> list[np.ndarray]:
        shapes = [(3,), (40_000,), (), (7, 5), (0,), (200, 300)]
        return [
            held_by(rank + 10 * i, dtype, s) for i, s in enumerate(shapes) for dtype in DTYPES[:-3]
        ]

    every = [held(rank) for rank in range(world.get_size())]
    mine = every[world.get_rank()]
    for result, expected in zip(broadcast(mine), every[0], strict=True):
        assert_same_bits(result, expected)
    for of_rank, expected_of_rank in zip(allgather(mine), every, strict=True):
        for result, expected in zip(of_rank, expected_of_rank, strict=True):
            assert_same_bits(result, expected)
    for result, *held_by_ranks in zip(allreduce(mine, "min"), *every, strict=True):
        assert_same_bits(result, np.stack(held_by_ranks).min(axis=0))


# Sizes


@pytest.mark.parametrize("message_bytes", [1, 24, 1000])
def test_messages_are_cut_into_pieces(monkeypatch, message_bytes):
    monkeypatch.setattr(buffers, "MESSAGE_BYTES", message_bytes)
    monkeypatch.setattr(buffers, "SMALL_BYTES", 40)
    value = [held_by(world.get_rank(), "float64", shape) for shape in [(3,), (101,), (2,), (0,)]]
    every = [held_by_all("float64", array.shape) for array in value]
    for result, expected in zip(allreduce(value, "max"), every, strict=True):
        assert_same_bits(result, expected.max(axis=0))
    for result, expected in zip(broadcast(value), every, strict=True):
        assert_same_bits(result, expected[0])
    for rank, of_rank in enumerate(allgather(value)):
        for result, expected in zip(of_rank, every, strict=True):
            assert_same_bits(result, expected[rank])


@pytest.mark.long
@pytest.mark.ranks(2)
def test_more_elements_than_a_32_bit_count_holds():
    from mpi4py import MPI

    if not broadcast(_free_bytes() > 8 << 30):
        pytest.skip("needs 8 GiB of free memory")
    value = np.zeros(2**31 + 5, np.uint8)  # untouched zeros take no memory
    value[[0, 2**30, -1]] = world.get_rank() + 1
    places = [0, 1, 2**30, -2, -1]
    result = broadcast(value, root=1)
    assert result.size == value.size
    assert result[places].tolist() == [2, 0, 2, 0, 2]
    # In place, as new memory is what takes most of the time here.
    buffers.allreduce_arrays([result], MPI.SUM, world.communicator("collectives"))
    assert result[places].tolist() == [4, 0, 4, 0, 4]


def _free_bytes() -> int:
    """The memory that can be taken without harm; 0 where the system does not say."""
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


# Disagreements: an error on every rank, and the next collective works


@several_ranks
@pytest.mark.parametrize("collective", [allreduce, broadcast])
def test_other_shapes_are_named_on_every_rank(collective):
    columns = 5 if world.get_rank() == 1 else 4
    with pytest.raises(MismatchError) as caught:
        collective({"a": [np.ones((3, columns), "float32")], "b": 1})
    message = str(caught.value)
    assert collective.__name__ in message
    others = "rank 0 has" if world.get_size() == 2 else "ranks 0, 2 have"
    assert f"{others} float32 (3, 4), rank 1 has float32 (3, 5) for 'a'/0" in message
    assert allreduce(1) == world.get_size()


def _differing(rank: int) -> dict[str, tuple[Any, str]]:
    last = rank == world.get_size() - 1
    return {
        "dtype": (np.zeros(3, "float64" if last else "float32"), "float64 (3,)"),
        "number of dimensions": (np.zeros((3, 1) if last else 3), "(3, 1)"),
        "python type": (0.5 if last else 0, "int64 ()"),
        "list length": ([1] * (3 if last else 2), "a list of 3"),
        "list or tuple": ((1,) if last else [1], "a tuple of 1"),
        "keys": ({"a": 1, "b" if last else "c": 1}, "a dict with keys ('a', 'b')"),
        "none": (None if last else 1, "None"),
        "empty": ({} if last else {"a": 1}, "an empty dict"),
        "fields": (Point(1, 2) if last else (1, 2), "a Point with fields (x, y)"),
    }


@several_ranks
@pytest.mark.parametrize("case", _differing(0))
def test_other_structures_and_dtypes_are_refused(case):
    value, named = _differing(world.get_rank())[case]
    for collective in (allreduce, broadcast, allgather):
        if collective is allgather:
            named = named.replace("(3,)", "(*)").replace("(3, 1)", "(*, 1)")
        with pytest.raises(MismatchError, match="all ranks must have the same") as caught:
            collective(value)
        assert named in str(caught.value)
        barrier()


@several_ranks
def test_allgather_refuses_other_trailing_sizes():
    with pytest.raises(MismatchError, match=r"float32 \(\*, 3\).*float32 \(\*, 4\)"):
        allgather(np.zeros((2, 4 if world.get_rank() else 3), "float32"))


@several_ranks
def test_other_calls_and_arguments_are_refused():
    rank = world.get_rank()
    calls = [
        (lambda: allreduce(1), lambda: broadcast(1), "rank 0 is at allreduce(op='sum')"),
        (lambda: barrier(), lambda: allgather(1), "rank 0 is at barrier()"),
        (lambda: allreduce(1, "sum"), lambda: allreduce(1, "max"), "at allreduce(op='max')"),
        (lambda: broadcast(1, root=0), lambda: broadcast(1, root=1), "at broadcast(root=1)"),
        (lambda: check_same(1, "the model"), lambda: barrier(), "rank 0 is at the model"),
    ]
    for of_first, of_others, named in calls:
        with pytest.raises(MismatchError, match="not at the same point") as caught:
            (of_others if rank else of_first)()
        assert named in str(caught.value)
    assert allreduce(1) == world.get_size()


# What is refused


class Unknown:
    pass


REFUSED = {
    "a class of the user": (Unknown(), "Unknown"),
    "a set": ({1, 2}, "builtins.set"),
    "dates": (np.array(["2020-01-01"], "datetime64[D]"), "datetime64"),
    "objects": (np.array([1, None], object), "object that are not strings"),
    "records": (np.zeros(2, [("a", "i4")]), "arrays of"),
    "masked arrays": (np.ma.array([1, 2]), "MaskedArray"),
    "large integers": (2**63, "64 bits"),
}


def assert_refused(value: Any, named: str) -> None:
    for collective in (allreduce, broadcast, allgather):
        with pytest.raises(InputError) as caught:
            collective({"a": [1, value]})
        assert named in str(caught.value)
        assert "for 'a'/1" in str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_sent_is_named_on_every_rank(case):
    assert_refused(*REFUSED[case])


def test_tensors_that_are_not_dense_are_refused():
    import tensorflow as tf

    assert_refused(tf.sparse.from_dense([0, 1]), "not dense")
    assert_refused(tf.ragged.constant([[1], [2, 3]]), "not dense")
    assert_refused(tf.IndexedSlices(tf.zeros((1, 2)), tf.constant([0])), "not dense")


def test_tensors_without_a_value_are_refused():
    import keras
    import tensorflow as tf

    with tf.Graph().as_default():
        symbolic = tf.constant(1.0)
    assert_refused(symbolic, "symbolic")
    assert_refused(keras.Input((3,)), "KerasTensor")


@several_ranks
@pytest.mark.parametrize("collective", [allreduce, broadcast, allgather])
def test_a_value_refused_on_one_rank_is_reported_on_all(collective):
    with pytest.raises(InputError) as caught:
        collective([Unknown() if world.get_rank() == 1 else 1.0])
    message = str(caught.value)
    assert "Unknown cannot be sent to other ranks" in message
    assert ("rank 1 failed" in message) == (world.get_rank() != 1)
    assert allreduce(1) == world.get_size()


def test_operations_without_meaning_are_refused():
    cases = [
        (np.array([True]), "sum", "op='max' for any"),
        (True, "mean", "booleans have no mean"),
        (1j, "max", "complex numbers have no max"),
        ("text", "sum", "strings cannot be reduced"),
        (1, "product", "op='product' is not one of sum, mean, min, max"),
    ]
    for value, op, named in cases:
        with pytest.raises(InputError) as caught:
            allreduce(value, op)
        assert named in str(caught.value)


@pytest.mark.parametrize("root", [-1, 1000, "first", 1.5])
def test_a_root_that_is_no_rank_is_refused(root):
    with pytest.raises(InputError, match="is not a rank; ranks go from 0 to"):
        broadcast(1, root)


@several_ranks
def test_a_bad_argument_on_one_rank_is_reported_on_all():
    with pytest.raises(InputError, match="op='plus'"):
        allreduce(1, "plus" if world.get_rank() == 0 else "sum")
    with pytest.raises(InputError, match="root=99"):
        broadcast(1, 99 if world.get_rank() == 0 else 0)
    barrier()


def test_tracing_is_refused():
    import tensorflow as tf

    with pytest.raises(InputError, match=r"allreduce.* inside a tf\.function"):
        tf.function(lambda x: allreduce(x))(tf.constant(1.0))
    with pytest.raises(InputError, match=r"allgather.* inside a tf\.function"):
        tf.function(lambda x: allgather(x), autograph=False)(tf.constant(1.0))
    with pytest.raises(InputError, match=r"barrier.* inside a tf\.function"):
        tf.function(lambda: barrier(), autograph=False)()


# Threads, and what the rest of the library uses


def test_threads_take_turns():
    results: list[np.ndarray] = []

    def reduce() -> None:
        for _ in range(10):
            results.append(allreduce(held_by(world.get_rank(), "int64", (10_000,))))

    threads = [threading.Thread(target=reduce) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 40
    for result in results:
        np.testing.assert_array_equal(result, held_by_all("int64", (10_000,)).sum(axis=0))


@several_ranks
def test_buffers_of_a_request_that_nobody_waits_for_live_as_long_as_it_does():
    comm = world.communicator("control")
    sent, received = np.ones(1000), np.empty(1000)
    target = weakref.ref(received)
    if world.get_rank() == 0:
        waiting.keep_until_done(comm.Iallreduce(sent, received), received)
        del received
        gc.collect()
        assert target() is not None  # MPI is going to write there
        barrier()
    else:
        barrier()
        comm.Iallreduce(sent, received).Wait()
    [waiting.wait_polling(request, None) for request, _ in waiting._unfinished]
    waiting.keep_until_done(comm.Ibarrier(), None)
    assert world.get_rank() > 0 or target() is None


def test_one_rank_needs_no_mpi(monkeypatch):
    def no_communicator(purpose: str) -> None:
        raise AssertionError(purpose)

    if world.get_size() == 1:
        monkeypatch.setattr(world, "communicator", no_communicator)
    value = {"a": np.arange(3.0), "s": "text"}
    barrier()
    check_same([1], "something")
    result = allgather(value)[0]
    assert_same_bits(result["a"], value["a"])
    assert not np.shares_memory(result["a"], value["a"])
    assert allreduce(np.float32([2, 4]), "mean").tolist() == [2, 4]


@several_ranks
def test_check_same_says_where_descriptions_differ():
    check_same({"shapes": [[1, 2], [3]], "name": "a", "none": None, "flag": True}, "the model")
    check_same((1, 2) if world.get_rank() else [1, 2], "what JSON writes alike")
    last = world.get_size() - 1
    with pytest.raises(MismatchError) as caught:
        check_same({"shapes": [[1, 2], [3 + (world.get_rank() == last)]]}, "the weights")
    assert str(caught.value).startswith("the weights: rank")
    assert f"rank {last} has 4 for 'shapes'/1/0" in str(caught.value)
    with pytest.raises(MismatchError, match='rank 0 has "a"'):
        check_same("ab"[world.get_rank() > 0], "the name")
    with pytest.raises(MismatchError):
        check_same(world.get_rank(), "the rank", world.communicator("control"))


@several_ranks
def test_broadcast_arrays_fills_arrays_in_place():
    comm = world.communicator("control")
    shapes = [(3, 4), (), (0, 2), (100, 300), (7,)]
    arrays = [held_by(world.get_rank(), dtype, s) for s in shapes for dtype in DTYPES]
    kept = list(arrays)
    if world.get_rank() == 1:
        for array in arrays:
            array.flags.writeable = False  # the root's arrays are only read
    buffers.broadcast_arrays(arrays, comm, root=1)
    expected = [held_by(1, dtype, s) for s in shapes for dtype in DTYPES]
    for array, same, want in zip(arrays, kept, expected, strict=True):
        assert array is same
        assert_same_bits(array, want)


def test_ranks_are_listed_briefly():
    assert agreement._ranges([0, 1, 2, 5]) == "0-2, 5"
    assert agreement._by_rank(["a", "b", "a"], "has", "have") == "ranks 0, 2 have a, rank 1 has b"
