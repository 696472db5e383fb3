"""A function is taken to work row by row only if it gives for some rows what it gives for all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from tarantella.data.rowwise import what_mixes_rows

Function = Callable[..., Any]

ROWS = 6
CUTS = [(0, 1), (0, 4), (2, 5), (5, 6)]
SOURCE = np.random.default_rng(5)
IMAGES = SOURCE.uniform(1, 255, (ROWS, 8, 8, 3)).astype(np.float32)
TABLE = SOURCE.uniform(0, 1, (ROWS, 3)).astype(np.float32)  # as many columns as CUTS has in one
LABELS = np.array([3, 1, 4, 1, 5, 9], np.int32)
TEXTS = np.array(["a 1", "B 2", " c 3", "d", "a 5", "f 6"])
RECORDS = np.array(
    [
        tf.train.Example(
            features=tf.train.Features(
                feature={
                    "x": tf.train.Feature(
                        float_list=tf.train.FloatList(value=[row, 2.0 * row, 1.0])
                    )
                }
            )
        ).SerializeToString()
        for row in range(ROWS)
    ]
)

WORDS = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a 1", "d"], [1, 2]), 0)
MATRIX = tf.Variable(SOURCE.uniform(0, 1, (3, 4)).astype(np.float32))
COUNTER = tf.Variable(0, dtype=tf.int32)
GENERATOR = tf.random.Generator.from_seed(3)


def _rows(x: tf.Tensor) -> tf.Tensor:
    return tf.shape(x)[0]


@tf.function
def _halved(x: tf.Tensor) -> tf.Tensor:
    return x / 2


@tf.function
def _projected(x: tf.Tensor) -> tf.Tensor:
    return tf.matmul(_halved(x), MATRIX)


@tf.function
def _reversed(x: tf.Tensor) -> tf.Tensor:
    return tf.reverse(x, [0])


def _branches(condition: Function, one: Function, other: Function) -> Function:
    return lambda x: tf.cond(condition(x), lambda: one(x), lambda: other(x))


def _asserted(x: tf.Tensor) -> tf.Tensor:
    tf.debugging.assert_equal(_rows(x), tf.size(x) // 3)
    tf.debugging.Assert(tf.reduce_all(x > -1), [x])
    return tf.debugging.check_numerics(x, "x")


def _advance(x: tf.Tensor, by: Any) -> tf.Tensor:
    COUNTER.assign_add(by)
    return x


def _with_seed_from_counter(shape: Function) -> Function:
    def drawn(x: tf.Tensor) -> tf.Tensor:
        COUNTER.assign_add(1)
        return x + tf.random.stateless_uniform(shape(x), tf.stack([COUNTER, 7]))

    return drawn


def _fixed_size(x: tf.Tensor) -> tf.Tensor:
    x = x * 2
    x.set_shape([ROWS, 3])
    return x / tf.cast(tf.shape(x)[0], tf.float32)


def _layer(layer: Any, **arguments: Any) -> Function:
    if isinstance(layer, keras.layers.Normalization):
        layer.build((None, 3))
    return lambda x: layer(x, **arguments)


DETERMINISTIC: dict[str, tuple[Any, Function]] = {
    # shapes of one rank, and constants
    "scaling": (IMAGES, lambda x: x / 255 - 0.5),
    "channel means": (IMAGES, lambda x: x - tf.constant([1.0, 2.0, 3.0])),
    "a leading 1": (TABLE, lambda x: x + tf.ones([1, 3])),
    "two inputs": ((TABLE, LABELS), lambda x, y: (x * tf.cast(y, tf.float32)[:, None], y)),
    "a constant scalar output": (TABLE, lambda x: (x, tf.constant(4.0))),
    "a structure": (TABLE, lambda x: {"x": x, "more": (x + 1,)}),
    "where": (TABLE, lambda x: tf.where(x > 0.5, x, 0.0)),
    "zeros like": (TABLE, lambda x: tf.concat([tf.zeros_like(x), tf.ones_like(x)], 1)),
    "filled": (TABLE, lambda x: tf.concat([x, tf.fill([_rows(x), 2], 7.0)], -1)),
    "broadcast": (TABLE, lambda x: x + tf.broadcast_to([1.0, 2.0, 3.0], tf.shape(x))),
    # reshaping
    "flatten": (IMAGES, lambda x: tf.reshape(x, [_rows(x), -1])),
    "flatten by -1": (IMAGES, lambda x: tf.reshape(x, [-1, 192])),
    "pixels and back": (
        IMAGES,
        lambda x: tf.reshape(tf.reshape(x, [-1, 3]) * [1.0, 2.0, 3.0], [-1, 8, 8, 3]),
    ),
    "reshape like": (IMAGES, lambda x: tf.reshape(tf.reshape(x, [_rows(x), -1]), tf.shape(x))),
    "unstacked shape": (IMAGES, lambda x: tf.reshape(x, [*tf.unstack(tf.shape(x))[:2], 24])),
    "tensordot": (IMAGES, lambda x: tf.tensordot(x, MATRIX, 1)),
    "expand and squeeze": (TABLE, lambda x: tf.squeeze(tf.expand_dims(x, 1), 1)),
    "transpose": (IMAGES, lambda x: tf.transpose(x, [0, 3, 1, 2])),
    "columns": (TABLE, lambda x: (x[:, 0], x[..., 1:], x[:, ::-1], x[:, tf.newaxis])),
    "slice": (IMAGES, lambda x: tf.slice(x, [0, 2, 2, 0], [-1, 4, 4, 3])),
    "slice of all rows": (TABLE, lambda x: tf.slice(x, [0, 1], [_rows(x), 2])),
    "stack": (TABLE, lambda x: tf.stack(tf.unstack(x, axis=1), axis=-1)),
    "split": (TABLE, lambda x: tf.concat(tf.split(x, 3, 1)[::-1], 1)),
    "pad and tile": (TABLE, lambda x: tf.tile(tf.pad(x, [[0, 0], [1, 2]]), [1, 2])),
    "roll and reverse": (TABLE, lambda x: tf.roll(tf.reverse(x, [1]), 1, 1)),
    # working along other axes than that of the rows
    "mean of each image": (IMAGES, lambda x: x - tf.reduce_mean(x, [1, 2, 3], keepdims=True)),
    "reductions": (TABLE, lambda x: tf.reduce_max(x, 1) + tf.reduce_sum(x, -1)),
    "softmax": (TABLE, lambda x: tf.nn.softmax(x)),
    "argmax": (TABLE, lambda x: tf.one_hot(tf.argmax(x, 1), 3)),
    "cumsum": (TABLE, lambda x: tf.cumsum(x, 1)),
    "sort": (TABLE, lambda x: tf.sort(x)),
    "matmul": (TABLE, lambda x: tf.matmul(x, MATRIX)),
    "batch matmul": (IMAGES, lambda x: tf.matmul(x, x, transpose_b=True)),
    "einsum": (IMAGES, lambda x: tf.einsum("bhwc,cd->bdw", x, MATRIX)),
    # looking up
    "one hot": (LABELS, lambda y: tf.one_hot(y, 10)),
    "gather columns": (TABLE, lambda x: tf.gather(x, [2, 0], axis=1)),
    "gather a row's own": ((TABLE, LABELS), lambda x, y: tf.gather(x, y % 3, batch_dims=1)),
    "gather from a constant": (LABELS, lambda y: tf.gather(tf.range(10) * 2, y)),
    "embedding": (LABELS, lambda y: tf.nn.embedding_lookup(MATRIX, y % 3)),
    "table": (TEXTS, lambda s: WORDS.lookup(s)),
    # texts
    "texts": (TEXTS, lambda s: tf.strings.regex_replace(tf.strings.lower(s), "[0-9]", "n")),
    "text of a number": (LABELS, lambda y: tf.strings.to_number(tf.strings.as_string(y) + "0")),
    "examples": (
        RECORDS,
        lambda s: tf.io.parse_example(s, {"x": tf.io.FixedLenFeature([3], tf.float32)})["x"],
    ),
    # images
    "resize": (IMAGES, lambda x: tf.image.resize(x, [4, 6])),
    "grayscale": (IMAGES, tf.image.rgb_to_grayscale),
    "standardization": (IMAGES, tf.image.per_image_standardization),
    "flip": (IMAGES, tf.image.flip_left_right),
    "contrast": (IMAGES, lambda x: tf.image.adjust_contrast(x, 2.0)),
    "hue": (IMAGES, lambda x: tf.image.adjust_hue(x / 255, 0.1)),
    "convolution": (
        IMAGES,
        lambda x: tf.nn.max_pool2d(
            tf.nn.conv2d(x, IMAGES[0][None, :3, :3, 0, None] * tf.ones([1, 1, 3, 1]), 1, "SAME"),
            2,
            2,
            "SAME",
        ),
    ),
    "one draw by a fixed seed": (
        IMAGES,
        lambda x: tf.image.stateless_random_brightness(x, 0.5, seed=[1, 2]),
    ),
    # functions
    "calls": (TABLE, _projected),
    "a condition on the shape": (
        IMAGES,
        _branches(lambda x: tf.shape(x)[1] > 4, lambda x: x, lambda x: x * 2),
    ),
    "assertions": (TABLE, _asserted),
    "unused mixing": (TABLE, lambda x: (x, tf.reduce_sum(x))[0]),
    # Keras
    "Rescaling": (IMAGES, _layer(keras.layers.Rescaling(1 / 255))),
    "Resizing": (IMAGES, _layer(keras.layers.Resizing(4, 4))),
    "CenterCrop": (IMAGES, _layer(keras.layers.CenterCrop(4, 4))),
    "Normalization": (
        IMAGES,
        _layer(keras.layers.Normalization(mean=[1.0, 2, 3], variance=[1.0, 4, 9])),
    ),
    "StringLookup": (TEXTS, _layer(keras.layers.StringLookup(vocabulary=["a 1", "d"]))),
    "CategoryEncoding": (LABELS, _layer(keras.layers.CategoryEncoding(10, output_mode="one_hot"))),
    "vgg16": (IMAGES, keras.applications.vgg16.preprocess_input),
}

DRAWN_FOR_EACH_ROW: dict[str, tuple[Any, Function]] = {
    "noise": (TABLE, lambda x: x + tf.random.normal(tf.shape(x))),
    "noise of one number": (TABLE, lambda x: x * tf.random.uniform([_rows(x), 1])),
    "dropout": (TABLE, lambda x: tf.nn.dropout(x, 0.5)),
    "random flip": (IMAGES, tf.image.random_flip_left_right),
    "generator": (TABLE, lambda x: x + GENERATOR.normal(tf.shape(x))),
    "a seed that is counted": (TABLE, _with_seed_from_counter(tf.shape)),
    **{
        type(layer).__name__: (IMAGES, _layer(layer, training=True))
        for layer in (
            keras.layers.RandomFlip(),
            keras.layers.RandomRotation(0.1),
            keras.layers.RandomZoom(0.1),
            keras.layers.RandomTranslation(0.1, 0.1),
            keras.layers.RandomContrast(0.1),
            keras.layers.RandomBrightness(0.1),
            keras.layers.GaussianNoise(0.1),
        )
    },
}

MIXING: dict[str, tuple[Any, Function, str]] = {
    "mean of the batch": (TABLE, lambda x: x - tf.reduce_mean(x), "Mean"),
    "mean of the columns": (TABLE, lambda x: x - tf.reduce_mean(x, 0), "Mean"),
    "mean along a negative axis": (TABLE, lambda x: x - tf.reduce_mean(x, -2), "Mean"),
    "softmax of the batch": (LABELS, lambda y: tf.nn.softmax(tf.cast(y, tf.float32)), "Softmax"),
    "sort of the batch": (LABELS, lambda y: tf.sort(y), "TopKV2"),
    "outer product": (LABELS, lambda y: y[:, None] * y, "Mul"),
    "vector with matrix": (
        (TABLE, LABELS),
        lambda x, y: x * tf.cast(y[:3], tf.float32),
        "StridedSlice",
    ),
    "a constant for each row": (TABLE, lambda x: x + tf.ones([ROWS, 1]), "AddV2"),
    "a constant of more ranks": (LABELS, lambda y: y + tf.ones([2, 1], tf.int32), "AddV2"),
    "mixup": (TABLE, lambda x: (x + tf.reverse(x, [0])) / 2, "ReverseV2"),
    "mixup by roll": (TABLE, lambda x: (x + tf.roll(x, 1, 0)) / 2, "Roll"),
    "shuffle": (TABLE, lambda x: tf.random.shuffle(x), "RandomShuffle"),
    "gather of rows": (TABLE, lambda x: tf.gather(x, tf.range(_rows(x))), "Range"),
    "gather by the count": (TABLE, lambda x: (x, tf.gather([1.0, 2.0], _rows(x) % 2)), "FloorMod"),
    "first row": (TABLE, lambda x: x - x[0], "StridedSlice"),
    "first rows": (TABLE, lambda x: x[:2], "StridedSlice"),
    "every other row": (TABLE, lambda x: x[::2], "StridedSlice"),
    "ellipsis of nothing": (TABLE, lambda x: x[..., 0:1, :], "StridedSlice"),
    "some rows": (TABLE, lambda x: tf.boolean_mask(x, x[:, 0] > 0.5), "Where"),
    "rows next to each other": (TABLE, lambda x: tf.reshape(x, [-1, 6]), "Reshape"),
    "cut in other places": (
        IMAGES,
        lambda x: tf.reshape(x, [-1, 8, 3]),
        "made of the batch's rows",
    ),
    "an impossible shape": (IMAGES, lambda x: tf.reshape(x, tf.shape(x[:, 0])), "Reshape"),
    "rows as columns": (TABLE, lambda x: tf.reshape(x, [3, -1]), "Reshape"),
    "transpose": (TABLE, lambda x: tf.transpose(x), "Transpose"),
    "squeeze of whatever is 1": (TABLE[:, :1], lambda x: tf.squeeze(x), "Squeeze"),
    "twice": (TABLE, lambda x: tf.concat([x, x], 0), "ConcatV2"),
    "padding rows": (TABLE, lambda x: tf.pad(x, [[0, 1], [0, 0]]), "Pad"),
    "tiled rows": (TABLE, lambda x: tf.tile(x, [2, 1]), "Tile"),
    "gram matrix": (TABLE, lambda x: tf.matmul(x, x, transpose_b=True), "MatMul"),
    "covariance": (TABLE, lambda x: tf.matmul(x, x, transpose_a=True), "MatMul"),
    "einsum over rows": (TABLE, lambda x: tf.einsum("bi,bj->ij", x, x), "Einsum"),
    "contrast of a batch of one": (
        IMAGES[..., 0],
        lambda x: tf.raw_ops.AdjustContrastv2(images=x, contrast_factor=2.0),
        "AdjustContrastv2",
    ),
    "number of rows": (TABLE, lambda x: x / tf.cast(_rows(x), tf.float32), "Cast"),
    "number of rows as output": (TABLE, lambda x: (x, _rows(x)), "not made of the batch's rows"),
    "text by the count": (TEXTS, lambda s: (s, tf.strings.substr("abc", 0, _rows(s))), "Substr"),
    "place in the batch": (TABLE, lambda x: (x, tf.range(_rows(x))), "Range"),
    "reshaped constant": (TABLE, lambda x: (x, tf.reshape(tf.range(6), [_rows(x)])), "Reshape"),
    "a constant as output": (TABLE, lambda x: (x, tf.ones([2])), "not made of the batch's rows"),
    "only a scalar": (TABLE, lambda x: tf.constant(1), "no output has rows"),
    "one draw": (TABLE, lambda x: x + tf.random.uniform([]), "RandomUniform"),
    "one draw of a row": (TABLE, lambda x: x + tf.random.uniform([3]), "RandomUniform"),
    "one draw of a generator": (
        TABLE,
        lambda x: x + GENERATOR.uniform([]),
        "StatelessRandomUniformV2",
    ),
    "one draw by a counted seed": (TABLE, _with_seed_from_counter(lambda x: []), "StatelessRandom"),
    "draws by place": (
        TABLE,
        lambda x: x + tf.random.stateless_uniform(tf.shape(x), [1, 2]),
        "StatelessRandomUniformV2",
    ),
    "a state with rows in it": (LABELS, lambda y: _advance(y, tf.reduce_sum(y)), "AssignAdd"),
    "a state with the count in it": (LABELS, lambda y: _advance(y, _rows(y)), "AssignAdd"),
    "a state under a condition": (
        LABELS,
        _branches(lambda y: y[0] > 1, lambda y: _advance(y, 1), lambda y: y),
        "AssignAdd",
    ),
    "a condition on values": (
        TABLE,
        _branches(lambda x: tf.reduce_sum(x) > 3, lambda x: x, lambda x: x * 2),
        "Sum",
    ),
    "a branch that mixes": (
        IMAGES,
        _branches(lambda x: tf.shape(x)[1] > 4, lambda x: x, _reversed),
        "ReverseV2",
    ),
    "a call that mixes": (TABLE, lambda x: _reversed(_halved(x)), "ReverseV2"),
    "python": (
        TABLE,
        lambda x: tf.ensure_shape(tf.numpy_function(lambda v: v, [x], tf.float32), [None, 3]),
        "PyFunc",
    ),
    "loop": (TABLE, lambda x: tf.map_fn(lambda row: row, x), "TensorList"),
    "words": (TEXTS, lambda s: tf.strings.split(s).to_tensor(), "StringSplitV2"),
    "ragged result": (TEXTS, lambda s: tf.strings.split(s), "StringSplitV2"),
    "a size that is set": (TABLE, _fixed_size, "Mul"),
    "a size that is ensured": (TABLE, lambda x: tf.ensure_shape(x, [ROWS, 3]), "EnsureShape"),
    "print": (TABLE, lambda x: (x, tf.print(x))[0], "Print"),
    "MixUp": (IMAGES, _layer(keras.layers.MixUp(), training=True), "BroadcastArgs"),
    "RandomCrop": (IMAGES, _layer(keras.layers.RandomCrop(4, 4), training=True), "StatelessRandom"),
}


def _map(data: Any, function: Function, batch_size: int = ROWS) -> tuple[Any, str | None]:
    """The function of a `map` over batches, and what mixes rows in it."""
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(batch_size).map(function)
    return dataset, what_mixes_rows(dataset._map_func.function)


def _assert_same_for_rows(data: Any, function: Function) -> None:
    graph = _map(data, function)[0]._map_func.function
    inputs = [tf.constant(leaf) for leaf in tf.nest.flatten(data)]
    whole = graph(*inputs)
    for begin, end in CUTS:
        part = graph(*(leaf[begin:end] for leaf in inputs))
        for some, every in zip(tf.nest.flatten(part), tf.nest.flatten(whole), strict=True):
            expected = every[begin:end] if every.shape.rank else every
            assert some.shape == expected.shape
            if every.dtype == tf.string:
                assert some.numpy().tolist() == expected.numpy().tolist()
            else:
                np.testing.assert_allclose(some, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_works_row_by_row(name: str) -> None:
    data, function = DETERMINISTIC[name]
    assert _map(data, function)[1] is None
    _assert_same_for_rows(data, function)


@pytest.mark.parametrize("name", DRAWN_FOR_EACH_ROW)
def test_may_draw_for_each_row(name: str) -> None:
    assert _map(*DRAWN_FOR_EACH_ROW[name])[1] is None


@pytest.mark.parametrize("name", MIXING)
def test_mixes_rows(name: str) -> None:
    data, function, reason = MIXING[name]
    assert reason in (_map(data, function)[1] or "nothing")


def test_a_known_number_of_rows_is_refused() -> None:
    dataset = tf.data.Dataset.from_tensor_slices(TABLE).batch(2, drop_remainder=True)
    assert what_mixes_rows(dataset.map(lambda x: x)._map_func.function) == (
        "an input of the shape (2, 3)"
    )


def test_ragged_input_is_refused() -> None:
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])).ragged_batch(2)
    reason = what_mixes_rows(ragged.map(lambda x: x * 2)._map_func.function)
    assert reason is not None
    assert "ragged" in reason


def test_a_function_is_not_run() -> None:
    before = int(COUNTER)
    _map(TABLE, lambda x: _advance(x, 1))
    assert int(COUNTER) == before


@pytest.mark.parametrize("shape", [[None, None, 3], [None, None, None]])
def test_other_dimensions_may_be_unknown(shape: list[int | None]) -> None:
    spec = tf.TensorSpec(shape, tf.float32)
    flat = tf.function(lambda x: tf.reshape(x, [tf.shape(x)[0], -1])).get_concrete_function(spec)
    assert what_mixes_rows(flat) is None
    unknown = tf.function(lambda x: tf.reshape(x, [-1, tf.shape(x)[1]]))
    assert what_mixes_rows(unknown.get_concrete_function(spec)) == "Reshape"


# Any program of these; they read what was computed before, and the batch is a cube of 6.
OPERATIONS: list[Function] = [
    lambda x, y: x + y,
    lambda x, y: x * tf.reduce_mean(y),
    lambda x, y: x + tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
    lambda x, y: tf.where(x > 2.0, x, y),
    lambda x, y: tf.matmul(x, y),
    lambda x, y: tf.transpose(x),
    lambda x, y: tf.stack([x, y], axis=-1),
    lambda x, y: tf.stack([x, y], axis=-2),
    lambda x, y: tf.reshape(x, [-1, 6]),
    lambda x, y: tf.reshape(x, [6, -1]),
    lambda x, y: tf.reshape(x, [-1, 2, 3]),
    lambda x, y: tf.reshape(x, tf.shape(y)),
    lambda x, y: tf.reshape(x, [tf.shape(y)[0], -1]),
    lambda x, y: tf.reshape(x, [-1, tf.shape(y)[0]]),
    lambda x, y: tf.reshape(x, [tf.size(y)]),
    lambda x, y: tf.broadcast_to(x, tf.shape(y)),
    lambda x, y: tf.fill(tf.shape(x), tf.cast(tf.shape(y)[-1], tf.float32)),
    lambda x, y: tf.ones([1, tf.shape(x)[0]]),
    lambda x, y: tf.cast(tf.shape(x), tf.float32)[-1:],
    lambda x, y: tf.gather(x, tf.cast(y, tf.int32) % 2),
    lambda x, y: tf.tensordot(x, y, 1),
    lambda x, y: tf.expand_dims(x, 1),
    lambda x, y: tf.expand_dims(x, 0),
    lambda x, y: tf.squeeze(x),
    *(lambda x, y, axis=axis: tf.reduce_max(x, axis) for axis in (0, 1, -1, -2)),
    *(lambda x, y, axis=axis: tf.cumsum(x, axis) for axis in (0, -1)),
    *(lambda x, y, axis=axis: tf.concat([x, y], axis) for axis in (0, 1, -1)),
    lambda x, y: x[:, 1:],
    lambda x, y: x[..., 0],
    lambda x, y: x[..., tf.newaxis],
    lambda x, y: x[: tf.shape(y)[1]],
    lambda x, y: tf.nn.softmax(x),
    lambda x, y: tf.einsum("ij,jk->ik", x, y),
    lambda x, y: tf.einsum("ijk,il->ijl", x, y),
    lambda x, y: tf.tile(x, [tf.shape(y)[1] // 3, 1]),
    lambda x, y: tf.tile(x, [1, tf.shape(y)[1] // 3]),
    lambda x, y: tf.reshape(x, [-1, 4]),
    lambda x, y: tf.slice(x, [0, 1], [tf.shape(y)[0], 2]),
    lambda x, y: tf.gather(x, tf.cast(y, tf.int32) % 2, batch_dims=1),
    lambda x, y: tf.gather(x, tf.cast(y, tf.int32) % 2, axis=-1),
    lambda x, y: tf.split(x, 2, -1)[1],
]
CUBE = SOURCE.uniform(0, 4, (ROWS, ROWS, ROWS)).astype(np.float32)
STEPS = st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=st.lists(STEPS, min_size=1, max_size=5))
def test_what_is_accepted_gives_the_same_for_some_rows(program: list[Any]) -> None:
    def run(x: tf.Tensor) -> tf.Tensor:
        values = [tf.constant(CUBE[0]), x[:, 0, 0], x[:, 0], x]
        for operation, one, other in program:
            with suppress(ValueError, TypeError, IndexError):  # a step that cannot be made
                values.append(
                    operation(values[-1 - one % len(values)], values[-1 - other % len(values)])
                )
        return values[-1]

    spec = tf.TensorSpec([None, ROWS, ROWS], tf.float32)
    function = tf.function(run, autograph=False).get_concrete_function(spec)
    try:
        whole = function(tf.constant(CUBE))
    except tf.errors.OpError:
        reject()
    if what_mixes_rows(function) is None:
        for begin, end in CUTS:
            part = function(tf.constant(CUBE[begin:end]))
            expected = whole[begin:end] if whole.shape.rank else whole
            assert part.shape == expected.shape
            np.testing.assert_allclose(part, expected, rtol=1e-4, atol=1e-4)
