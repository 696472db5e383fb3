"""What Tarantella uses of Keras's inside is there, and is what it takes it for.

A failure here after an update of Keras says what to look at in `tarantella.internals.keras`.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from tarantella.internals import keras as internals

VERSION = f"Keras {keras.__version__}, TensorFlow {tf.__version__}"


def test_train_step_scales_the_loss_and_applies_gradients() -> None:
    source = inspect.getsource(keras.Model.train_step)
    assert "scale_loss" in source, VERSION
    assert "apply_gradients" in source, VERSION


def test_added_losses_can_be_taken_and_given() -> None:
    class Adds(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(keras.ops.sum(inputs))
            return inputs

    model = keras.Sequential([Adds()])
    model(np.ones((2, 2)))
    assert [float(loss) for loss in internals.take_losses(model)] == [4.0], VERSION
    assert model.losses == [], VERSION
    internals.give_losses(model, [tf.constant(3.0)])
    assert [float(loss) for loss in model.losses] == [3.0], VERSION


def test_masks_travel_with_outputs() -> None:
    output = keras.layers.Embedding(3, 2, mask_zero=True)(np.array([[0, 1]]))
    assert internals.keras_mask(output).numpy().tolist() == [[False, True]], VERSION


@pytest.mark.parametrize(
    "activation", ["softmax", "sigmoid", tf.nn.softmax, tf.nn.sigmoid], ids=str
)
def test_losses_find_what_probabilities_were_computed_from(activation: Any) -> None:
    activation = keras.activations.get(activation)
    entropy = "binary_crossentropy" if "sigmoid" in str(activation) else "categorical_crossentropy"
    loss = getattr(keras.ops, entropy)

    @tf.function
    def loss_of(x: Any) -> Any:
        found = internals.logits_of(activation(x))
        assert found is not None, VERSION
        return loss([[1.0, 0.0]], internals.with_logits(tf.identity(activation(x)), found))

    assert float(tf.reduce_max(loss_of(tf.constant([[-60.0, 60.0]])))) > 50.0, VERSION


def test_metrics_can_be_built_without_recording() -> None:
    metric = keras.metrics.F1Score()
    internals.build_metric(metric, (np.eye(3), np.eye(3)), {})
    assert metric.variables, VERSION
    assert all(not np.any(variable.numpy()) for variable in metric.variables), VERSION


def test_metrics_of_keras_tell_whether_they_have_all_variables() -> None:
    for metric in (keras.metrics.F1Score(), keras.metrics.R2Score()):
        assert not internals.has_all_variables(metric), VERSION
        metric(np.eye(3), np.eye(3))
        assert internals.has_all_variables(metric), VERSION
    assert internals.has_all_variables(keras.metrics.Mean()), VERSION

    class Own(keras.metrics.Mean):
        pass

    assert not internals.has_all_variables(Own()), VERSION


def test_the_metrics_of_a_model_tell_whether_they_have_all_variables() -> None:
    for own, known in ("accuracy", True), (lambda y, p: p, True), (OwnMetric(), False):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
        model.compile(loss="mse", metrics=[own])
        seen: list[bool] = []
        for _ in range(2):
            seen.append(internals.has_all_variables(model._compile_metrics))
            model.test_on_batch(np.eye(3), np.eye(3))
        assert seen == [False, known], VERSION


class OwnMetric(keras.metrics.Metric):
    """Makes a variable when it sees data."""

    def update_state(self, y: object, y_pred: object, sample_weight: object = None) -> None:
        if not self.variables:
            self.add_variable((), "zeros")

    def result(self) -> float:
        return 0.0


def test_an_adapter_of_ours_is_taken_as_data() -> None:
    adapter = internals.data_adapters.get_data_adapter(np.ones((4, 1)), batch_size=2)
    assert isinstance(adapter, internals.DataAdapter), VERSION
    assert internals.data_adapters.get_data_adapter(adapter) is adapter, VERSION


def test_batch_normalization_has_axes_for_moments() -> None:
    layer = keras.layers.BatchNormalization(axis=1)
    layer.build((None, 3, 4))
    assert internals.reduction_axes(layer) == [0, 2], VERSION


def test_an_optimizer_knows_what_it_trains() -> None:
    optimizer, variable = keras.optimizers.SGD(), keras.Variable(np.ones(2))
    optimizer.build([variable])
    (trained,) = internals.trained_variables(optimizer)
    assert trained is variable, VERSION


def test_which_events_a_callback_handles() -> None:
    class Old(keras.callbacks.Callback):
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            pass

    given = keras.callbacks.LambdaCallback(on_train_batch_end=print)
    assert internals.handles(given, "train_batch_end")
    assert not internals.handles(given, "train_batch_begin")
    assert internals.handles(Old(), "train_batch_end")
    assert not internals.handles(Old(), "test_batch_end")
    assert internals.handles(keras.callbacks.ProgbarLogger(), "predict_batch_end")


def _stateful_callbacks() -> dict[str, Any]:
    return {
        "EarlyStopping": keras.callbacks.EarlyStopping("loss"),
        "History": keras.callbacks.History(),
        "ModelCheckpoint": keras.callbacks.ModelCheckpoint("{epoch}.keras", save_freq=100),
        "ReduceLROnPlateau": keras.callbacks.ReduceLROnPlateau("loss"),
        "SwapEMAWeights": keras.callbacks.SwapEMAWeights(),
    }


def test_callbacks_have_the_state_that_backups_keep(caplog: pytest.LogCaptureFixture) -> None:
    callbacks = _stateful_callbacks()
    assert set(callbacks) == set(internals.CALLBACK_STATE)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(use_ema=True), "mse")

    def check(*_: Any, **__: Any) -> None:
        for name, callback in callbacks.items():
            assert internals.callback_state(callback, name) is not None, (VERSION, caplog.text)

    # At the first moment at which a backup restores them, and whenever one is written.
    checks = keras.callbacks.LambdaCallback(on_epoch_begin=check, on_train_batch_end=check)
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[*callbacks.values(), checks])


def test_missing_state_of_a_callback_is_not_lost_silently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    renamed = keras.callbacks.ReduceLROnPlateau("loss")
    del renamed.cooldown_counter
    for _ in range(2):
        assert internals.callback_state(renamed, "ReduceLROnPlateau") is None
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "The state of ReduceLROnPlateau is not restored" in warning.message
    assert "`cooldown_counter`" in warning.message


def test_the_size_of_a_csv_log(tmp_path: Path) -> None:
    logger = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    logger.set_model(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    logger.on_train_begin()
    sizes = []
    for epoch in range(2):
        logger.on_epoch_end(epoch, {"loss": 1.0})
        sizes.append(internals.csv_size(logger))
    internals.shorten_csv(logger, sizes[0])
    logger.on_train_end()
    assert (tmp_path / "log.csv").stat().st_size == sizes[0] < sizes[1]


def test_keras_saves_to_another_class_of_hdf5_files_only_where_it_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    class File(h5py.File):
        def __init__(self, name: Any, *args: Any, **kwargs: Any) -> None:
            opened.append(Path(name).name)
            super().__init__(name, *args, **kwargs)

    chosen: list[Any] = [h5py.File]
    for module in (internals.saving_lib, internals.legacy_h5_format):
        monkeypatch.setattr(module, "h5py", h5py)  # put back in the end
    internals.install_hdf5_files(lambda: chosen[0])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.save_weights(tmp_path / "plain.weights.h5")
    chosen[0] = File
    model.save_weights(tmp_path / "model.weights.h5")
    model.save(tmp_path / "model.h5")
    assert opened == ["model.weights.h5", "model.h5"], VERSION


def test_the_seed_of_random_numbers_that_were_given_none() -> None:
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    assert internals.global_seed() is None
    keras.random.normal((2,))
    before = np.array(internals.global_seed())
    keras.random.normal((2,))
    assert (np.array(internals.global_seed()) != before).any()
    keras.utils.clear_session()  # an older Keras keeps the generator when a seed is set
    keras.utils.set_random_seed(1)
    internals.make_global_seed()
    keras.random.normal((2,))
    assert (np.array(internals.global_seed()) == before).all()


def test_limits_for_debugging() -> None:
    assert internals.limited(5, 7) == (5, 7)
    assert internals.limited(5, None) == (5, None)
    if not hasattr(keras.config, "set_max_epochs"):
        return  # in older versions of Keras
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    try:
        assert internals.limited(5, 7) == (2, 3)
        assert internals.limited(1, None) == (1, 3)
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)


def test_a_model_keeps_what_it_was_compiled_with(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with internals.kept_compile_arguments(model):
        model.save(tmp_path / "model.h5")
    assert model.get_compile_config()["optimizer"] is not None


def test_the_state_of_an_optimizer_in_hdf5(tmp_path: Path) -> None:
    loss = keras.losses.MeanSquaredError()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", loss)
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    path = str(tmp_path / "model.h5")
    model.save(path)
    loaded = keras.models.load_model(path)
    internals.restore_optimizer(loaded, path)
    for one, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))
