"""Each row of the table of hooks names what Keras calls, and hooks do nothing on their own.

A failure here after an update of Keras says which row of `tarantella.keras.hooks` to look at.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tarantella.errors import VersionError
from tarantella.internals import keras as internals
from tarantella.keras import hooks
from tarantella.keras.hooks import Hook
from tarantella.runtime import versions

VERSION = f"Keras {keras.__version__}, TensorFlow {tf.__version__}"

# The arguments that handlers know of.
ARGUMENTS = {
    hooks.REDUCE_LOSS: ["values", "sample_weight", "mask", "reduction", "dtype"],
    hooks.REGULARIZE: ["self", "x"],
    hooks.SCALE_LOSS: ["self", "loss"],
    hooks.APPLY_GRADIENTS: ["self", "grads", "trainable_variables"],
    hooks.METRIC_RESULT: ["self"],
    hooks.ASSIGN_VARIABLE: ["self", "value"],
    hooks.INITIALIZE_VARIABLE: ["self", "value"],
    hooks.SYNCHRONIZED_MOMENTS: ["x", "axes", "keepdims"],
    hooks.LAYER_MOMENTS: ["self", "inputs", "mask"],
    hooks.MAKE_FOLDERS: ["path"],
}


hooks.install()


class Calls:
    """Handlers that note what they are called with, and call the plain function."""

    def __init__(self, *rows: Hook) -> None:
        self.seen: list[tuple[Hook, Any]] = []
        self.handlers = {row: self._noting(row) for row in rows}

    def _noting(self, row: Hook) -> hooks.Handler:
        def note(plain: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.append((row, args))
            return plain(*args, **kwargs)

        return note

    def count(self, row: Hook) -> int:
        return sum(one is row for one, _ in self.seen)


@pytest.mark.parametrize("row", hooks.TABLE, ids=str)
def test_every_row_names_something_of_keras(row: Hook) -> None:
    definition = inspect.unwrap(inspect.getattr_static(row.owner, row.name))
    if isinstance(definition, staticmethod):
        definition = definition.__func__
    assert callable(definition), VERSION
    assert row.does.endswith(".")
    oldest, newest = (tuple(map(int, version.split("."))) for version in row.checked)
    assert oldest <= newest
    assert row.checked[1] == versions.VERSIONS["Keras"][1]
    if row in ARGUMENTS:
        assert list(inspect.signature(definition).parameters) == ARGUMENTS[row], VERSION


def test_every_handler_is_called_where_keras_does_it() -> None:
    calls = Calls(*hooks.TABLE)
    with hooks.handling(calls.handlers):
        keras.losses.MeanSquaredError()(np.ones((2, 3)), np.zeros((2, 3)), np.ones(2))
        assert calls.count(hooks.REDUCE_LOSS) == 1, VERSION
        regularizer = keras.regularizers.L2(0.1)
        keras.layers.Activation("linear", activity_regularizer=regularizer)(np.ones((2, 1)))
        assert calls.count(hooks.REGULARIZE) == 1, VERSION
        dense = keras.layers.Dense(2)
        dense.build((None, 3))
        keras.Variable([1.0, 2.0])
        assert calls.count(hooks.INITIALIZE_VARIABLE) == 3, VERSION
        dense.bias.assign(np.zeros(2))
        dense.bias.assign_add(np.ones(2))
        assert calls.count(hooks.ASSIGN_VARIABLE) == 2, VERSION
        layer = keras.layers.BatchNormalization(synchronized=True)
        layer(np.ones((2, 3)), training=True)
        assert calls.count(hooks.LAYER_MOMENTS) == 1, VERSION
        assert calls.count(hooks.SYNCHRONIZED_MOMENTS) == 1, VERSION
        metric = keras.metrics.MeanSquaredError()
        metric(np.ones((2, 3)), np.zeros((2, 3)))
        assert calls.count(hooks.UPDATE_METRIC) == 2, VERSION  # and that of its base class
        assert calls.count(hooks.METRIC_RESULT) == 1, VERSION
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(dense.bias * 2.0)
        gradients = tape.gradient(loss, [dense.bias.value])
        assert calls.count(hooks.TAKE_GRADIENTS) == 1, VERSION
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        optimizer.scale_loss(loss)
        optimizer.apply_gradients(zip(gradients, [dense.bias], strict=True))
        assert calls.count(hooks.SCALE_LOSS) == 1, VERSION
        assert calls.count(hooks.APPLY_GRADIENTS) == 2, VERSION  # and that of the inner one
    seen = len(calls.seen)
    dense.bias.assign(np.zeros(2))
    assert len(calls.seen) == seen


def test_a_function_that_keras_no_longer_has_is_an_error() -> None:
    renamed = Hook(internals.BaseOptimizer, "apply_renamed", "Nothing.", in_subclasses=True)
    with pytest.raises(VersionError, match="BaseOptimizer.apply_renamed"):
        hooks.install([renamed])


def test_installing_twice_wraps_once() -> None:
    def definitions() -> list[Any]:
        return [inspect.getattr_static(row.owner, row.name) for row in hooks.TABLE]

    before = definitions()
    hooks.install()
    assert all(one is other for one, other in zip(before, definitions(), strict=True))
    plain = hooks.unhooked(keras.metrics.Mean.update_state)
    assert plain is not keras.metrics.Mean.update_state
    assert hooks.unhooked(plain) is plain
    assert not hasattr(plain, "__wrapped__")


def test_classes_that_are_defined_later_are_hooked() -> None:
    class Count(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.count = self.add_variable((), "zeros")

        def update_state(self, by: int) -> None:
            self.count.assign_add(by)

        @tf.function
        def result(self) -> Any:
            return self.count + 0.0

    metric = Count()
    calls = Calls(hooks.UPDATE_METRIC, hooks.METRIC_RESULT)
    with hooks.handling(calls.handlers):
        assert float(metric(2)) == 2.0
    assert calls.seen == [(hooks.UPDATE_METRIC, (metric, 2)), (hooks.METRIC_RESULT, (metric,))]
    metric.update_state(3)
    assert float(metric.result()) == 5.0
    assert metric.result.get_concrete_function() is not None  # it is a tf.function still
    assert len(calls.seen) == 2


class CountsPositive(keras.metrics.Metric):
    """Needs AutoGraph in a `tf.function` of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.add_variable((), "zeros")

    def update_state(self, value: Any) -> None:
        if value > 0:
            self.count.assign_add(1.0)


def test_autograph_converts_hooked_methods() -> None:
    hooks.install()
    metric = CountsPositive()
    update = tf.function(lambda value: metric.update_state(value))
    for value in (-1.0, 2.0, 3.0):
        update(tf.constant(value))
    assert float(metric.count.value) == 2.0


def test_handlers_hold_in_their_thread_only() -> None:
    calls = Calls(hooks.ASSIGN_VARIABLE)
    variable = keras.Variable(1.0)
    with hooks.handling(calls.handlers):
        thread = threading.Thread(target=variable.assign, args=(2.0,))
        thread.start()
        thread.join()
        assert not calls.seen
        with hooks.suspended(hooks.ASSIGN_VARIABLE):
            variable.assign(3.0)
            assert hooks.has_handler(hooks.ASSIGN_VARIABLE)
        assert not calls.seen
        variable.assign(4.0)
    assert len(calls.seen) == 1
    assert not hooks.has_handler(hooks.ASSIGN_VARIABLE)
    assert float(variable) == 4.0


def test_after_an_error_no_handler_is_left() -> None:
    calls = Calls(hooks.ASSIGN_VARIABLE)

    def fail() -> None:
        with hooks.handling(calls.handlers):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    keras.Variable(1.0).assign(2.0)
    assert not calls.seen


def test_inner_handlers_take_the_place_of_outer_ones() -> None:
    outer, inner = Calls(hooks.ASSIGN_VARIABLE, hooks.REDUCE_LOSS), Calls(hooks.ASSIGN_VARIABLE)
    with hooks.handling(outer.handlers), hooks.handling(inner.handlers):
        keras.Variable(1.0).assign(2.0)
        keras.losses.MeanSquaredError()(np.ones((2, 3)), np.zeros((2, 3)))
    assert [row for row, _ in outer.seen] == [hooks.REDUCE_LOSS]
    assert [row for row, _ in inner.seen] == [hooks.ASSIGN_VARIABLE]


def test_hooked_classes_look_as_before() -> None:
    update = keras.metrics.Mean.update_state
    assert update.__name__ == "update_state"
    assert update.__qualname__ == "Mean.update_state"
    assert list(inspect.signature(update).parameters) == ["self", "values", "sample_weight"]
    assert pickle.loads(pickle.dumps(update)) is update
    assert (
        keras.metrics.MeanSquaredError.update_state is keras.metrics.MeanMetricWrapper.update_state
    )
    metric = keras.metrics.CategoricalAccuracy()
    assert keras.metrics.deserialize(keras.metrics.serialize(metric)).name == metric.name
    assert float(copy.deepcopy(keras.Variable(3.0)).value) == 3.0
    assert internals.is_default(keras.callbacks.Callback().on_train_batch_end)


@contextmanager
def without_hooks() -> Iterator[None]:
    """Puts Keras's own functions in place of the hooks, and the hooks back."""
    with pytest.MonkeyPatch.context() as patch:
        for row in hooks.TABLE:
            for owner in hooks._owners(row):
                definition = vars(owner)[row.name]
                if isinstance(definition, staticmethod):
                    definition = staticmethod(hooks.unhooked(definition.__func__))
                elif not isinstance(definition, hooks._HookedDescriptor):
                    definition = hooks.unhooked(definition)
                patch.setattr(owner, row.name, definition)
        yield


def trained() -> tuple[Any, list[Any]]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, activity_regularizer=keras.regularizers.L2(0.1))(inputs)
    outputs = keras.layers.Dense(1)(keras.layers.BatchNormalization(synchronized=True)(hidden))
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    model.compile(optimizer, keras.losses.Huber(reduction="sum"), metrics=["mae"])
    x = np.linspace(-1.0, 1.0, 30).reshape(10, 3)
    history = model.fit(x, x.sum(axis=1), batch_size=4, epochs=2, shuffle=False, verbose=0).history
    return history, [np.array(variable) for variable in [*model.weights, *optimizer.variables]]


def test_plain_keras_trains_as_without_hooks() -> None:
    history, variables = trained()
    with without_hooks():
        expected_history, expected_variables = trained()
    assert history == expected_history
    for one, other in zip(variables, expected_variables, strict=True):
        np.testing.assert_array_equal(one, other)


def test_messages_of_keras_name_another_path(capfd: pytest.CaptureFixture[str]) -> None:
    def say() -> None:
        internals.io_utils.print_msg("Saved artifact at '/a/.b'.")

    with hooks.messages_about("/a/.b", "model"):
        say()
        thread = threading.Thread(target=say)
        thread.start()
        thread.join()
    say()
    lines = [line for line in capfd.readouterr().out.splitlines() if line]
    assert lines == ["Saved artifact at 'model'.", *["Saved artifact at '/a/.b'."] * 2]


def test_the_functions_that_datasets_read_from_can_be_wrapped() -> None:
    def batches() -> Any:
        yield (np.ones((2, 1)),)

    def doubled(begin: Any) -> Any:
        return lambda: (tree_map(batch) for batch in begin())

    def tree_map(batch: Any) -> Any:
        return keras.tree.map_structure(lambda leaf: 2 * leaf, batch)

    with hooks.generators_read_with(doubled):
        adapter = internals.data_adapters.get_data_adapter(batches())
        wrapped = adapter.get_tf_dataset()
    plain = internals.data_adapters.get_data_adapter(batches()).get_tf_dataset()
    values = [float(next(iter(dataset))[0][0, 0]) for dataset in (wrapped, plain)]
    assert values == [2.0, 1.0]
