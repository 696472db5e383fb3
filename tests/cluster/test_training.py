"""Training on several hosts gives the weights that plain Keras gives in one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from commands import Cluster

SCRIPT = """
import sys

import keras
import numpy as np

serial = sys.argv[1] == "serial"
if not serial:
    import tarantella as tnt

keras.config.set_floatx("float64")


def lenet5():
    return keras.Sequential([
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(20, 5, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(50, 5, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(500, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ])


def resnet50():
    model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
    return model


STEPS = {"lenet5": 6, "resnet50": 2}
BATCH = {"lenet5": 32, "resnet50": 12}
for name in sys.argv[2:]:
    steps, batch = STEPS[name], BATCH[name]
    keras.utils.set_random_seed(1)
    model = globals()[name]()
    random = np.random.default_rng(2)
    x = random.random((steps * batch - 1, *model.input_shape[1:]))
    y = random.integers(0, 10, len(x))
    if not serial:
        model = tnt.Model(model)
    model.compile(keras.optimizers.SGD(0.001, momentum=0.9), "sparse_categorical_crossentropy")
    history = model.fit(x, y, batch_size=batch, verbose=0).history["loss"]
    if serial or tnt.is_master_rank():
        np.savez(f"{sys.argv[1]}-{name}.npz", *model.get_weights(), loss=history)
"""


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file with what one process makes of a model."""
    folder = tmp_path_factory.mktemp("serial")
    (folder / "train.py").write_text(SCRIPT)

    @cache
    def train(model: str) -> Path:
        command = [sys.executable, "train.py", "serial", model]
        subprocess.run(command, cwd=folder, check=True, timeout=600)
        return folder / f"serial-{model}.npz"

    return train


@pytest.mark.parametrize(
    ("ranks", "model", "sums"),
    [
        (1, "lenet5", "host"),
        (2, "lenet5", "host"),
        (2, "lenet5", "ring"),  # as NCCL does between GPUs
        pytest.param(1, "resnet50", "host", marks=pytest.mark.long),
    ],
)
def test_two_hosts_train_as_one_process_does(
    ranks: int, model: str, sums: str, cluster: Cluster, serial: Callable[[str], Path]
) -> None:
    script = cluster.script(SCRIPT)
    options = ["--n-per-node", str(ranks), "-x", f"TNT_GPU_SUMS={sums}"]
    result = cluster.run(*options, "--", script, "hosts", model, timeout=600)
    assert result.returncode == 0, result.stderr
    ours = np.load(cluster.folder / f"hosts-{model}.npz")
    theirs = np.load(serial(model))
    assert ours.files == theirs.files
    for key in theirs.files:
        # Relative to the array. A bias in front of a normalization is 0, but for rounding.
        allowed = 1e-9 * np.abs(theirs[key]).max() + 1e-12
        np.testing.assert_allclose(ours[key], theirs[key], rtol=0, atol=allowed)


TYPES_OF_GRADIENTS = """
import sys
from pathlib import Path

import keras
import numpy as np

import tarantella as tnt


def sent():
    files = Path("/sys/class/net").glob("eth*/statistics/tx_bytes")
    return sum(int(file.read_text()) for file in files)


x, y = np.ones((8, 1000), "float32"), np.ones((8, 1000), "float32")
for gradient_type in (None, "float32"):
    inputs = keras.Input((1000,))
    model = tnt.Model(
        keras.Model(inputs, keras.layers.Dense(1000)(inputs)), gradient_type=gradient_type
    )
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=8, verbose=0)
    before = sent()
    model.fit(x, y, batch_size=8, epochs=5, verbose=0)
    print(tnt.get_rank(), sent() - before, flush=True)
"""


def test_gradients_of_16_bits_take_half_the_bytes(cluster: Cluster) -> None:
    """The option is the default of models, which can have a type of their own."""
    script = cluster.script(TYPES_OF_GRADIENTS)
    options = ["--gradient-type", "bfloat16", "--output-on-all-devices"]
    result = cluster.run(*options, "--", script, timeout=600)
    assert result.returncode == 0, result.stderr
    lines = [line.split()[-2:] for line in result.stdout.splitlines()]
    for rank in "01":
        half, whole = [int(number) for of_rank, number in lines if of_rank == rank]
        assert whole > 5 * 4e6  # a million gradients in float32, five times
        assert 0.45 < half / whole < 0.6
