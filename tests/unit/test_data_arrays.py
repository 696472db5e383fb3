"""Batches of arrays are those of Keras, and cost the memory of a batch."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from tarantella.data import arrays

SAMPLES = 11
MIB = 2**20

Pair = namedtuple("Pair", "first second")


def _numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    values = np.random.default_rng(3).normal(scale=40, size=(SAMPLES, *shape))
    with np.errstate(invalid="ignore"):  # negative numbers in unsigned types
        return values.astype(dtype)


def _read_only() -> np.ndarray:
    array = _numbers(3)
    array.flags.writeable = False
    return array


def _unaligned() -> np.ndarray:
    buffer = np.zeros(SAMPLES * 12 + 1, np.uint8)
    array = buffer[1:].view(np.float32).reshape(SAMPLES, 3)
    array[:] = _numbers(3)
    assert not array.flags.aligned
    return array


def _memory_mapped(dtype: Any) -> np.ndarray:
    array = np.memmap("rows", dtype, "w+", shape=(SAMPLES, 3))
    array[:] = _numbers(3, dtype=dtype)
    return np.memmap("rows", dtype, "r", shape=(SAMPLES, 3))


class _ArrayLike:
    """What another library's array shows of itself."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.array, dtype)


def _frame(**columns: Any) -> Any:
    return pytest.importorskip("pandas").DataFrame(columns)


def _series(values: Any) -> Any:
    return pytest.importorskip("pandas").Series(values, index=np.arange(SAMPLES)[::-1])


DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ">f4", ">f8", ">i4",
]  # fmt: skip

KINDS: dict[str, Callable[[], Any]] = {
    **{f"array of {np.dtype(d)}": lambda d=d: _numbers(3, dtype=d) for d in DTYPES},
    "vector": lambda: _numbers(),
    "images": lambda: _numbers(4, 4, 3, dtype=np.uint8),
    "rows without entries": lambda: _numbers(0),
    "Fortran order": lambda: np.asfortranarray(_numbers(3, 2)),
    "strided": lambda: _numbers(6)[:, ::2],
    "reversed": lambda: _numbers(3)[::-1],
    "transposed float64": lambda: _numbers(3, 2, dtype=np.float64).transpose(0, 2, 1),
    "broadcast": lambda: np.broadcast_to(np.float32(2), (SAMPLES, 3)),
    "read-only": _read_only,
    "unaligned": _unaligned,
    "masked": lambda: np.ma.array(_numbers(3), mask=_numbers(3) > 0),
    "memory-mapped": lambda: _memory_mapped(np.float32),
    "memory-mapped float64": lambda: _memory_mapped(np.float64),
    "strings": lambda: np.array([f"é{i}" * i for i in range(SAMPLES)], dtype=object),
    "tensor": lambda: tf.constant(_numbers(3)),
    "tensor of float64": lambda: tf.constant(_numbers(3, dtype=np.float64)),
    "tensor of bfloat16": lambda: tf.cast(_numbers(3), tf.bfloat16),
    "tensor of integers": lambda: tf.range(SAMPLES),
    "tensor of strings": lambda: tf.strings.as_string(tf.range(SAMPLES)),
    "variable": lambda: tf.Variable(_numbers(3, dtype=np.float64)),
    "Keras variable": lambda: keras.Variable(_numbers(3)),
    "like an array": lambda: _ArrayLike(_numbers(3, dtype=np.float64)),
    "frame": lambda: _frame(a=_numbers(), b=_numbers()),
    "frame of float64": lambda: _frame(a=_numbers(dtype=np.float64)),
    "frame of mixed numbers": lambda: _frame(
        a=_numbers(dtype=np.int64) << 50, b=_numbers(dtype=np.float64)
    ),
    "frame of integers and floatx": lambda: _frame(a=_numbers(dtype=np.int64), b=_numbers()),
    "series": lambda: _series(_numbers(dtype=np.float64)),
    "series of integers": lambda: _series(_numbers(dtype=np.int16)),
}

STRUCTURES: dict[str, Callable[[], Any]] = {
    "x": lambda: (_numbers(3),),
    "x and y": lambda: (_numbers(3), _numbers(dtype=np.int64)),
    "weighted": lambda: (_numbers(3), _numbers(dtype=np.int64), np.linspace(0, 1, SAMPLES)),
    "weighted without y": lambda: (_numbers(3), None, np.linspace(0, 1, SAMPLES)),
    "list of one": lambda: ([_numbers(3)],),
    "lists": lambda: ([_numbers(3), [_numbers(), tf.range(SAMPLES)]], [_numbers()]),
    "tuple": lambda: ((_numbers(3), _numbers(2)), _numbers()),
    "named tuple": lambda: (Pair(_numbers(3), [_numbers(2)]), _numbers()),
    "dict": lambda: ({"b": _numbers(3), "a": [_numbers(), {"c": _numbers(2)}]}, _numbers()),
    "ordered dict": lambda: (OrderedDict(b=_numbers(3), a=_numbers()), _numbers()),
    "None as a part": lambda: (_numbers(3), {"a": _numbers(), "b": None}, {"a": None, "b": None}),
    "None in a list": lambda: ([_numbers(3), None],),
    "weights of several outputs": lambda: (
        _numbers(3),
        [_numbers(), _numbers(2)],
        np.linspace(0, 1, SAMPLES),
    ),
}


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def floatx() -> Iterator[Callable[[str], None]]:
    before = keras.config.floatx()
    yield keras.config.set_floatx
    keras.config.set_floatx(before)


def _taken(data: tuple[Any, ...], shuffle: Any, batch_size: int = 4) -> tf.data.Dataset:
    """As Tarantella makes them: Keras's order of the indices, and our rows."""
    packed = ArrayDataAdapter(*data)._inputs
    assert arrays.can_take(packed)
    rows = arrays.ArrayRows(packed, keras.config.floatx())
    assert len(rows) == SAMPLES
    indices = ArrayDataAdapter(np.arange(len(rows)), batch_size=batch_size, shuffle=shuffle)
    return indices.get_tf_dataset().map(rows.take, num_parallel_calls=2)


def _epochs(make: Callable[[], tf.data.Dataset]) -> tuple[Any, list[Any]]:
    tf.random.set_seed(5)
    dataset = make()
    return dataset.element_spec, [batch for _ in range(2) for batch in dataset]


def _assert_same(ours: Any, expected: Any) -> None:
    tf.nest.assert_same_structure(ours, expected)
    for one, other in zip(tf.nest.flatten(ours), tf.nest.flatten(expected), strict=True):
        if other is None:
            assert one is None
            continue
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def _assert_as_in_keras(data: tuple[Any, ...], shuffle: Any = False) -> None:
    spec, expected = _epochs(
        lambda: ArrayDataAdapter(*data, batch_size=4, shuffle=shuffle).get_tf_dataset()
    )
    our_spec, ours = _epochs(lambda: _taken(data, shuffle))
    assert our_spec == spec
    assert len(ours) == len(expected) == 6
    for one, other in zip(ours, expected, strict=True):
        _assert_same(one, other)


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_keras(kind: str, shuffle: Any) -> None:
    _assert_as_in_keras((KINDS[kind](),), shuffle)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize(
    "kind", ["array of float64", "array of float32", "tensor", "Fortran order", "frame", "series"]
)
def test_floats_are_cast_to_floatx(kind: str, name: str, floatx: Callable[[str], None]) -> None:
    floatx(name)
    _assert_as_in_keras((KINDS[kind](),), True)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures_are_those_of_keras(structure: str) -> None:
    _assert_as_in_keras(STRUCTURES[structure](), True)


def test_spec_says_what_take_gives() -> None:
    rows = arrays.ArrayRows(
        ([_numbers(3, dtype=np.float64)], {"a": None, "b": tf.range(11)}), "float32"
    )
    assert rows.spec == (
        (tf.TensorSpec([None, 3], tf.float32),),
        {"a": None, "b": tf.TensorSpec([None], tf.int32)},
    )


def test_batches_of_any_size_are_given_static_shapes() -> None:
    rows = arrays.ArrayRows({"a": _numbers(3), "b": tf.constant(_numbers(3))}, "float32")
    fixed = tf.data.Dataset.range(8).batch(4, drop_remainder=True).map(rows.take).element_spec
    free = tf.data.Dataset.range(8).batch(4).map(rows.take).element_spec
    assert {tuple(spec.shape) for spec in fixed.values()} == {(4, 3)}
    assert {tuple(spec.shape) for spec in free.values()} == {(None, 3)}


def test_rows_in_any_order_and_more_than_once() -> None:
    x = _numbers(3)
    rows = arrays.ArrayRows(x, "float32")
    for order in ([5], [3, 4, 5], [5, 4, 3], [2, 2, 2], [0, 10, 0]):
        np.testing.assert_array_equal(rows.take(tf.constant(order, tf.int64)), x[order])


def test_a_batch_is_no_view_of_the_array() -> None:
    x = arrays._aligned_empty((8, 16), np.dtype(np.float32))
    batch = arrays.ArrayRows(x, "float32").take(tf.range(8, dtype=tf.int64))
    assert not np.shares_memory(np.asarray(batch), x)


def test_batches_need_no_copy_to_become_tensors() -> None:
    for shape in [(3,), (5, 7), (4, 4, 3)]:
        assert arrays._aligned_empty(shape, np.dtype(np.float64)).ctypes.data % 64 == 0


def test_a_variable_is_taken_as_it_was() -> None:
    variable = tf.Variable([[1.0], [2.0]])
    rows = arrays.ArrayRows(variable, "float32")
    variable.assign_add([[1.0], [1.0]])
    assert rows.take(tf.constant([1, 0], tf.int64)).numpy().tolist() == [[2.0], [1.0]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.ragged.constant([[1], [2, 3]]),
        lambda: tf.sparse.from_dense(np.eye(3)),
        lambda: pytest.importorskip("scipy.sparse").csr_matrix(np.eye(3)),
        lambda: np.array(["a", "b"]),
        lambda: np.array(["a", 1], dtype=object),
        lambda: np.array([["a"], ["b"]], dtype=object),
        lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
        lambda: np.float32(1),
        lambda: [1.0, 2.0],
        lambda: _frame(a=["a", "b"]),
        lambda: _frame(a=[1, 2], b=[True, False]),
        lambda: _frame(a=[1, None]).astype("Int64"),
        lambda: pytest.importorskip("pandas").Series([1, None], dtype="Int64"),
    ],
)
def test_all_else_is_left_to_keras(make: Callable[[], Any]) -> None:
    assert not arrays.can_take((_numbers(3), make()))


def test_nothing_is_left_to_keras() -> None:
    assert not arrays.can_take((None, None))


@pytest.mark.parametrize("kind", KINDS)
def test_split_data_give_the_batches_of_keras(kind: str) -> None:
    data = (KINDS[kind](), [None, KINDS[kind]()][1:])
    theirs = keras.src.trainers.data_adapters.array_slicing.train_validation_split(data, 0.3)
    for half, expected in zip(arrays.split(data, 7), theirs, strict=True):
        rows = arrays.ArrayRows(half, keras.config.floatx())
        ours = rows.take(tf.range(len(rows), dtype=tf.int64))
        whole = ArrayDataAdapter(*expected, batch_size=SAMPLES).get_tf_dataset()
        _assert_same(ours, next(iter(whole)))


@pytest.mark.parametrize(
    "kind", ["array of float64", "Fortran order", "memory-mapped", "frame", "series"]
)
def test_split_arrays_are_views(kind: str) -> None:
    array = KINDS[kind]()
    for half in arrays.split(array, 7):
        assert np.shares_memory(np.asarray(half), np.asarray(array))


def test_split_tensors_are_views() -> None:
    tensor = tf.constant(_numbers(3))
    for half in arrays.split(tensor, 7):
        assert np.shares_memory(half, np.asarray(tensor))


def test_arrays_are_let_go_with_the_dataset() -> None:
    x = _numbers(3)
    released = weakref.ref(x)
    iterator = iter(_taken(([x, tf.constant(x)],), True))
    del x
    gc.collect()
    assert len(list(iterator)) == 3
    del iterator
    gc.collect()
    assert released() is None


# Memory


def _status(key: str) -> int:
    """A line of the process's status, in bytes."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024


def _peak_growth(work: Callable[[], Any]) -> int:
    """By how much resident memory grows above what it was, at its highest."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # makes the peak what is resident now
    except OSError:
        pytest.skip("the peak of resident memory cannot be set back here")
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


ROWS, COLUMNS = 2048, 32 * 1024  # 256 MiB of float32


def _large(dtype: Any = np.float32) -> np.ndarray:
    return np.ones((ROWS, COLUMNS * 4 // np.dtype(dtype).itemsize), dtype)


def _large_file(dtype: Any = np.float32) -> np.ndarray:
    np.memmap("large", dtype, "w+", shape=(ROWS, COLUMNS)).flush()
    return np.memmap("large", dtype, "r", shape=(ROWS, COLUMNS))


def _large_unaligned() -> np.ndarray:
    buffer = np.ones(ROWS * COLUMNS * 4 + 1, np.uint8)
    return buffer[1:].view(np.float32).reshape(ROWS, COLUMNS)


def _large_frame() -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({str(i): np.ones(16 * ROWS) for i in range(COLUMNS // 32)})


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    "make",
    [
        _large,
        lambda: _large(np.float64),
        lambda: np.asfortranarray(_large(np.float64)),
        lambda: _large()[:, ::-1],
        lambda: _large(">f4"),
        _large_unaligned,
        _large_file,
        lambda: _large_file(np.float64),
        lambda: tf.ones((ROWS, COLUMNS)),
        lambda: tf.Variable(tf.ones((ROWS, COLUMNS))),
        lambda: keras.Variable(tf.ones((ROWS, COLUMNS))),
        _large_frame,
    ],
    ids=[
        "float32", "float64", "Fortran order", "strided", "swapped bytes", "unaligned",
        "memory-mapped", "memory-mapped float64", "tensor", "variable", "Keras variable", "frame",
    ],
)  # fmt: skip
def test_a_large_array_is_never_copied_whole(make: Callable[[], Any]) -> None:
    whole = make()

    def take() -> None:
        head, tail = arrays.split(whole, ROWS - 5)
        for half in (whole, head, tail):
            rows = arrays.ArrayRows(half, "float32")
            for shuffle in (False, True):
                order = ArrayDataAdapter(np.arange(len(rows)), batch_size=4, shuffle=shuffle)
                for _ in order.get_tf_dataset().map(rows.take).take(8):
                    pass

    take_little = arrays.ArrayRows(np.ones((8, 4), np.float32), "float32")
    list(tf.data.Dataset.range(8).batch(4).map(take_little.take))  # what is needed in any case
    assert _peak_growth(take) < 64 * MIB
