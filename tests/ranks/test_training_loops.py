"""A custom training loop gives on several ranks what it gives in one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import assert_close, batches, classification_data, small_model

import tarantella as tnt
from tarantella.errors import MismatchError
from tarantella.keras.distributed_dataset import DistributedDataset

on_ranks = pytest.mark.ranks(1, 2)
float64 = pytest.mark.usefixtures("float64")

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "ftrl": lambda: keras.optimizers.Ftrl(0.05),
    "clipping": lambda: keras.optimizers.AdamW(0.05, global_clipnorm=0.01),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.05), initial_scale=4.0, dynamic_growth_steps=3
    ),
    "loss_scale_factor": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
    "accumulation": lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2),
    "ema": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3
    ),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
}

ALIKE = ("ema", "ftrl", "momentum", "schedule")  # for these the sums are as for Adam

STEPS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda step: step,
    "function": tf.function,
    "relaxed_function": tf.function(reduce_retracing=True),
}


def shuffled_batches() -> tf.data.Dataset:
    """Batches of 4, 4, 4 and 1 samples, in another order each epoch."""
    return tf.data.Dataset.from_tensor_slices(classification_data()).shuffle(13, 5).batch(4)


def embedding_model() -> keras.Model:
    """A model with a sparse gradient."""
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Embedding(7, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


def embedded_batches() -> tf.data.Dataset:
    x, y = classification_data()
    return batches((np.abs(x) * 3).astype("int64") % 7, y)


def values_of(variables: list[Any]) -> list[np.ndarray]:
    return [np.array(variable) for variable in variables]


class Loop:
    """Two epochs of a loop as a user writes it; the same with and without Tarantella."""

    def __init__(
        self,
        optimizer: Any,
        data: Any,
        model: keras.Model,
        decorate: Callable[[Any], Any] = STEPS["relaxed_function"],
    ) -> None:
        loss_function = keras.losses.SparseCategoricalCrossentropy()

        @decorate
        def train_step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_function(y, model(x, training=True)) + sum(model.losses)
                scaled_loss = optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled_loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        self.losses = []
        for _ in range(2):
            for x, y in data:
                loss = float(train_step(x, y))
                if isinstance(data, DistributedDataset):
                    loss = tnt.allreduce(loss * data.share)
                self.losses.append(loss)
        optimizer.finalize_variable_values(model.trainable_variables)
        self.weights = values_of(model.weights)
        self.state = values_of(optimizer.variables)


def assert_loop_gives_the_serial_result(
    make_optimizer: Callable[[], Any],
    data: Callable[[], Any] = shuffled_batches,
    make_model: Callable[[], keras.Model] = small_model,
    decorate: Callable[[Any], Any] = STEPS["relaxed_function"],
) -> None:
    keras.utils.set_random_seed(42)
    serial = Loop(make_optimizer(), data(), make_model(), decorate)
    keras.utils.set_random_seed(42 + tnt.get_rank())
    model = tnt.Model(make_model())
    keras.utils.set_random_seed(42)
    optimizer = tnt.keras.optimizers.Optimizer(make_optimizer())
    ours = Loop(optimizer, tnt.distribute_dataset(data()), model, decorate)
    assert_close(ours.losses, serial.losses)
    assert_close(ours.weights, serial.weights)
    assert_close(ours.state, serial.state)


@float64
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name in ALIKE else name for name in OPTIMIZERS],
)
def test_optimizer_gives_the_serial_result(name: str) -> None:
    assert_loop_gives_the_serial_result(OPTIMIZERS[name])


@float64
@on_ranks
@pytest.mark.parametrize("decorate", STEPS)
def test_step_gives_the_serial_result(decorate: str) -> None:
    assert_loop_gives_the_serial_result(OPTIMIZERS["momentum"], decorate=STEPS[decorate])


@float64
@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ["momentum", "adam", "loss_scale"])
def test_sparse_gradients_give_the_serial_result(name: str) -> None:
    assert_loop_gives_the_serial_result(OPTIMIZERS[name], embedded_batches, embedding_model)


@float64
@pytest.mark.ranks(2)
def test_batches_of_a_py_dataset() -> None:
    x, y = classification_data()

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            return x[4 * index : 4 * index + 4], y[4 * index : 4 * index + 4]

    distributed = tnt.distribute_dataset(Batches())
    assert len(distributed) == 4
    for _ in range(2):
        sizes = [tnt.allreduce(len(x) * (distributed.share > 0)) for x, _ in distributed]
        assert sizes == [4, 4, 4, 1]


@pytest.mark.ranks(1, 2)
def test_none_in_batches_of_a_generator_stays_none() -> None:
    def generate() -> Iterator[Any]:
        for _ in range(2):
            yield np.ones((3, 2)), None

    distributed = tnt.distribute_dataset(generate())
    assert [y for _, y in distributed] == [None, None]


@pytest.mark.ranks(3)
def test_gradients_of_a_rank_without_samples_count_for_nothing() -> None:
    variable = keras.Variable(np.ones(3))
    optimizer = tnt.keras.optimizers.Optimizer(keras.optimizers.SGD(1.0))
    distributed = tnt.distribute_dataset(batches(np.ones(3), batch_size=1))
    for _ in distributed:
        gradient = tf.ones(3) if tnt.is_master_rank() else tf.fill([3], np.nan)
        optimizer.apply([gradient], [variable])
    assert_close(np.array(variable), np.full(3, -2.0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("decorate", STEPS)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(decorate: str) -> None:
    variable = keras.Variable(np.ones(3))
    optimizer = tnt.keras.optimizers.Optimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    )

    @STEPS[decorate]
    def apply(gradient: Any) -> None:
        optimizer.apply([gradient], [variable])

    apply(tf.fill([3], np.inf if tnt.get_rank() == 1 else 1.0))
    assert_close(np.array(variable), np.ones(3))
    assert float(optimizer.dynamic_scale) == 4.0
    apply(tf.fill([3], 4.0))
    assert_close(np.array(variable), np.zeros(3))


@pytest.mark.ranks(3)
def test_outside_of_a_distributed_dataset_all_ranks_count_alike() -> None:
    variable = keras.Variable(np.zeros(2))
    optimizer = tnt.keras.optimizers.Optimizer(keras.optimizers.SGD(1.0))
    for _ in tnt.distribute_dataset(batches(np.ones(3), batch_size=1)):
        pass
    optimizer.apply([tf.fill([2], float(tnt.get_rank()))], [variable])
    assert_close(np.array(variable), np.full(2, -(tnt.get_size() - 1) / 2))


@pytest.mark.ranks(2)
def test_a_loop_inside_a_loop_leaves_the_outer_share() -> None:
    variable = keras.Variable(np.zeros(2))
    optimizer = tnt.keras.optimizers.Optimizer(keras.optimizers.SGD(1.0))
    inner = tnt.distribute_dataset(batches(np.ones(6), batch_size=6))
    for _ in tnt.distribute_dataset(batches(np.ones(1))):
        for _ in inner:
            pass
        optimizer.apply([tf.fill([2], 1.0 + tnt.get_rank())], [variable])
    assert_close(np.array(variable), np.full(2, -1.0))


@float64
@pytest.mark.ranks(2)
def test_several_optimizers_in_functions_that_call_each_other() -> None:
    variables = [keras.Variable(np.zeros(3)) for _ in range(8)]
    optimizers = [tnt.keras.optimizers.Optimizer(keras.optimizers.SGD(1.0)) for _ in variables]

    def applied(i: int) -> Callable[[], None]:
        @tf.function
        def apply() -> None:
            optimizers[i].apply([tf.fill([3], tf.constant(i, tf.float64))], [variables[i]])

        return apply

    functions = [applied(i) for i in range(len(variables))]

    @tf.function
    def step() -> None:
        for function in functions:
            function()
        for i, variable in enumerate(variables):
            optimizers[i].apply([tf.fill([3], tf.constant(10.0 * i, tf.float64))], [variable])

    for _ in range(3):
        step()
    for i, variable in enumerate(variables):
        assert_close(np.array(variable), np.full(3, -33.0 * i))


@pytest.mark.ranks(2)
def test_variables_without_a_gradient_stay() -> None:
    variables = [keras.Variable(np.ones(2)) for _ in range(2)]
    optimizer = tnt.keras.optimizers.Optimizer(keras.optimizers.SGD(1.0))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply_gradients(zip([None, tf.ones(2)], variables, strict=True))
    assert_close(values_of(variables), [np.ones(2), np.zeros(2)])


@pytest.mark.ranks(2)
def test_a_gradient_on_one_rank_only_is_an_error() -> None:
    variables = [keras.Variable(np.ones(2)) for _ in range(2)]
    optimizer = tnt.keras.optimizers.Optimizer(keras.optimizers.SGD(1.0))
    gradients = [None if tnt.is_master_rank() else tf.ones(2), tf.ones(2)]
    with pytest.raises(MismatchError, match="rank 0 has .no gradient.* for 'variable 0'"):
        optimizer.apply(gradients, variables)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("decorate", STEPS)
def test_weights_that_differ_are_an_error_that_names_the_way_out(decorate: str) -> None:
    keras.utils.set_random_seed(tnt.get_rank())
    optimizer = tnt.keras.optimizers.Optimizer("sgd")
    with pytest.raises(MismatchError, match=r"tnt\.Model.*set_random_seed"):
        Loop(optimizer, shuffled_batches(), small_model(), STEPS[decorate])


@pytest.mark.ranks(2)
def test_learning_rates_that_differ_are_an_error() -> None:
    plain = keras.optimizers.SGD(0.1 * (1 + tnt.get_rank()))
    with pytest.raises(MismatchError, match="the state of the optimizer"):
        tnt.keras.optimizers.Optimizer(plain).apply([tf.ones(2)], [keras.Variable(np.ones(2))])


# The optimizer is the one that was passed in, and more.


@pytest.mark.ranks(1, 2)
def test_it_is_the_optimizer_it_was_made_from() -> None:
    plain = keras.optimizers.Adam(0.1, beta_1=0.5)
    optimizer = tnt.keras.optimizers.Optimizer(plain)
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert isinstance(optimizer, tnt.keras.optimizers.Optimizer)
    assert optimizer.get_config() == plain.get_config()
    optimizer.apply([tf.ones(2)], [keras.Variable(np.ones(2))])
    assert plain.built
    assert int(plain.iterations) == 1
    assert plain.variables == optimizer.variables
    plain.learning_rate = 0.2
    assert float(optimizer.learning_rate) == pytest.approx(0.2)
    again = type(optimizer).from_config(optimizer.get_config())
    assert isinstance(again, tnt.keras.optimizers.Optimizer)
    assert again.beta_1 == 0.5
    assert isinstance(tnt.keras.optimizers.Optimizer("adam"), keras.optimizers.Adam)


@keras.saving.register_keras_serializable("custom_loops")
class OwnOptimizer(keras.optimizers.SGD):
    pass


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("cls", [keras.optimizers.Adam, OwnOptimizer])
def test_what_is_saved_is_the_plain_optimizer(cls: Any, shared_tmp_path: Path) -> None:
    optimizer = tnt.keras.optimizers.Optimizer(cls(0.01))
    assert keras.optimizers.serialize(optimizer) == keras.optimizers.serialize(
        cls.from_config(optimizer.get_config())
    )
    model = tnt.Model(small_model(regularized=False))
    model.compile(optimizer, "sparse_categorical_crossentropy")
    model.fit(batches(*classification_data()), verbose=0)
    model.save(shared_tmp_path / "model.keras")
    loaded = keras.models.load_model(shared_tmp_path / "model.keras").optimizer
    assert type(loaded) is cls
    assert_close(values_of(loaded.variables), values_of(model.optimizer.variables))


@float64
@pytest.mark.ranks(1, 2)
def test_fit_of_a_tnt_model_sums_once() -> None:
    def fitted(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
        keras.utils.set_random_seed(42)
        model = tnt.Model(small_model())
        model.compile(wrap(keras.optimizers.Adam(0.05)), "sparse_categorical_crossentropy")
        history = model.fit(batches(*classification_data()), epochs=2, verbose=0).history
        return history, model.get_weights()

    assert_close(fitted(tnt.keras.optimizers.Optimizer), fitted(lambda optimizer: optimizer))


@float64
@pytest.mark.ranks(2)
def test_a_checkpoint_holds_the_optimizer(shared_tmp_path: Path) -> None:
    optimizer = tnt.keras.optimizers.Optimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    variable = keras.Variable(np.ones(2))
    optimizer.apply([tf.ones(2, tf.float64)], [variable])
    state = values_of(optimizer.variables)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer)
    path = checkpoint.write(str(shared_tmp_path / f"rank{tnt.get_rank()}"))
    optimizer.apply([tf.ones(2, tf.float64)], [variable])
    checkpoint.read(path)
    assert_close(values_of(optimizer.variables), state)


@pytest.mark.ranks(1, 2)
def test_wrapping_twice_is_an_error() -> None:
    optimizer = tnt.keras.optimizers.Optimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match=r"is a tnt\.keras\.optimizers\.Optimizer already"):
        tnt.keras.optimizers.Optimizer(optimizer)


@pytest.mark.parametrize(
    ("thing", "name"), [(3, "int"), (keras.optimizers.Adam, "the class Adam"), (None, "NoneType")]
)
def test_wrapping_something_else_is_an_error(thing: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"takes a Keras optimizer, not {name}\. Make one"):
        tnt.keras.optimizers.Optimizer(thing)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="no optimizer named 'adan'"):
        tnt.keras.optimizers.Optimizer("adan")


# Datasets


@pytest.mark.ranks(1, 2)
def test_the_parts_are_the_batches_in_their_order() -> None:
    dataset = tf.data.Dataset.range(13).shuffle(13).batch(5)
    distributed = tnt.distribute_dataset(dataset)
    assert distributed.cardinality() == len(distributed) == 3
    assert distributed.element_spec.dtype == tf.int64
    epochs = []
    for _ in range(2):
        parts = [
            np.concatenate(tnt.allgather(part.numpy()[: 13 * (distributed.share > 0)]))
            for part in distributed
        ]
        assert [len(part) for part in parts] == [5, 5, 3]
        epochs.append(np.concatenate(parts).tolist())
        assert sorted(epochs[-1]) == list(range(13))
    assert epochs[0] != epochs[1]


@pytest.mark.ranks(1, 2)
def test_a_dataset_without_end() -> None:
    distributed = tnt.distribute_dataset(tf.data.Dataset.range(4).repeat().batch(4))
    assert distributed.cardinality() == tf.data.INFINITE_CARDINALITY
    with pytest.raises(TypeError, match="infinite"):
        len(distributed)
    for step, _ in enumerate(distributed):
        if step == 5:
            break
    assert distributed.share == 1 / tnt.get_size()


@pytest.mark.ranks(1, 2)
def test_a_loop_inside_a_function_is_an_error() -> None:
    distributed = tnt.distribute_dataset(tf.data.Dataset.range(4).batch(2))

    @tf.function
    def train() -> None:
        for _ in distributed:
            pass

    with pytest.raises(ValueError, match="write the loop outside, and decorate the function"):
        train()


def test_distributing_twice_is_an_error() -> None:
    distributed = tnt.distribute_dataset(tf.data.Dataset.range(4).batch(2))
    with pytest.raises(ValueError, match="distributed already"):
        tnt.distribute_dataset(distributed)


def test_importing_tarantella_does_not_import_keras() -> None:
    code = "import sys, tarantella as tnt; tnt.keras; assert 'keras' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
