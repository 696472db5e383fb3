"""What logs show is of the global batch and the whole dataset, for every Keras metric."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest
from oracle import (
    assert_close,
    assert_trains_as_in_keras,
    batches,
    classification_data,
    computed_by_master,
)

import tarantella as tnt

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.ranks(2)]

ARGUMENTS: dict[str, dict[str, Any]] = {
    "BinaryIoU": {"target_class_ids": [0, 1], "threshold": 0.5},
    "IoU": {"num_classes": 3, "target_class_ids": [0, 2]},
    "MeanIoU": {"num_classes": 3},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0, 1]},
    "OneHotMeanIoU": {"num_classes": 3},
    "MeanRelativeError": {"normalizer": [1.0, 2.0, 3.0]},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "TopKCategoricalAccuracy": {"k": 2},
    "SparseTopKCategoricalAccuracy": {"k": 2},
}
# Base classes, which measure nothing by themselves, and those that are told what to measure.
NOT_FOR_COMPILE = {"Metric", "MeanMetricWrapper", "Mean", "Sum"}
# TensorFlow's operation behind these knows float32 only.
FLOAT32_ONLY = {"TopKCategoricalAccuracy", "SparseTopKCategoricalAccuracy"}
SPARSE_LABELS = {"IoU", "MeanIoU"}
# Keras itself fails to weigh the samples of more than one output.
NOT_WEIGHTED = {"BinaryIoU"}

ALL = sorted(
    name
    for name, cls in vars(keras.metrics).items()
    if inspect.isclass(cls)
    and issubclass(cls, keras.metrics.Metric)
    and name not in NOT_FOR_COMPILE
)


def _targets(name: str) -> np.ndarray:
    _x, y = classification_data()
    if name.startswith("Sparse"):
        return y
    if name in SPARSE_LABELS:
        return y[:, np.newaxis]
    return np.eye(3)[y]


def _model(name: str) -> keras.Model:
    inputs = keras.Input((5,))
    if name in SPARSE_LABELS:  # these compare whole numbers
        whole = keras.layers.Lambda(
            lambda x: keras.ops.clip(keras.ops.round(x[:, :1]), 0, 2), output_shape=(1,)
        )
        return keras.Model(inputs, whole(keras.layers.Dense(3)(inputs)))
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(inputs))


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_every_metric(weighted: bool) -> None:
    """Those of the same targets together, as tracing a model takes longer than all the rest."""
    x, _ = classification_data()
    weights = np.linspace(0.5, 1.5, len(x))
    left_out = FLOAT32_ONLY | (NOT_WEIGHTED if weighted else set())
    together: dict[str, list[str]] = {}
    for name in ALL:
        if name not in left_out:
            kind = "IoU" if name in SPARSE_LABELS else name.partition("Categorical")[0]
            together.setdefault(kind if kind in ("IoU", "Sparse") else "", []).append(name)
    for kind, names in together.items():
        keras.utils.set_random_seed(1)
        data = (x, _targets(kind), weights) if weighted else (x, _targets(kind))
        expected = computed_by_master(
            lambda kind=kind, names=names, data=data: _logs(_model(kind), names, data, eager=True)
        )
        keras.utils.set_random_seed(1)
        assert set(expected) == {"loss", *names}
        assert_close(_logs(tnt.Model(_model(kind)), names, data), expected)


def _logs(model: keras.Model, names: list[str], data: Any, eager: bool = False) -> dict[str, float]:
    metrics = [getattr(keras.metrics, name)(name=name, **ARGUMENTS.get(name, {})) for name in names]
    model.compile(
        weighted_metrics=metrics, loss=lambda y, p: keras.ops.mean(p, axis=-1), run_eagerly=eager
    )
    return dict(model.evaluate(batches(*data), verbose=0, return_dict=True))


def test_top_k_in_float32() -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    x, y = classification_data()
    assert_trains_as_in_keras(
        lambda: _model("SparseTopKCategoricalAccuracy"),
        lambda: {
            "optimizer": "sgd",
            "loss": "sparse_categorical_crossentropy",
            "metrics": [keras.metrics.SparseTopKCategoricalAccuracy(k=2)],
        },
        lambda: {"x": batches(x.astype("float32"), y)},
        tolerance=1e-5,
    )


def test_metrics_while_training() -> None:
    x, y = classification_data()
    assert_trains_as_in_keras(
        lambda: _model("AUC"),
        lambda: {
            "optimizer": "sgd",
            "loss": "categorical_crossentropy",
            "metrics": ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.F1Score()],
            "weighted_metrics": [keras.metrics.R2Score(), "mse"],
        },
        lambda: {
            "x": batches(x, np.eye(3)[y], np.linspace(0.1, 2, 13)),
            "validation_data": batches(x[:6], np.eye(3)[y[:6]]),
            "validation_freq": 2,
        },
    )


def test_logs_of_every_batch_are_global() -> None:
    x, y = classification_data()
    seen = []
    for wrap in (lambda model: model, tnt.Model):
        keras.utils.set_random_seed(1)
        model = wrap(_model("Sparse"))
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        logs_of_batches: list[dict[str, float]] = []
        record = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, seen=logs_of_batches: seen.append(
                {name: float(value) for name, value in logs.items()}
            )
        )
        model.fit(batches(x, y), epochs=2, verbose=0, callbacks=[record])
        seen.append(logs_of_batches)
    assert_close(seen[1], seen[0])
    assert len(seen[0]) == 8


def test_own_metric_says_how_its_state_combines() -> None:
    class Largest(keras.metrics.Metric):
        """Cannot be added up; says that the master's value stands for all."""

        def __init__(self) -> None:
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros", aggregation="only_first_replica")

        def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

        def result(self) -> Any:
            return self.value

    x, y = classification_data()
    model = tnt.Model(_model("Sparse"))
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=[Largest()])
    result = model.evaluate(batches(x, y), verbose=0, return_dict=True)["largest"]
    assert 0 < result <= 1
    assert tnt.allgather(result) == [result] * tnt.get_size()
