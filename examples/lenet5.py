"""LeNet-5 learns handwritten digits, on as many ranks as you like.

    tarantella -n 2 --no-gpu -- lenet5.py --batch_size=64 --number_epochs=15

Plain `python lenet5.py` trains the same model in one process, to the same accuracy. The two lines
that Tarantella needs are marked "line 1" and "line 2".
"""

from __future__ import annotations

import argparse
import gzip
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import keras
import numpy as np
import tensorflow as tf

import tarantella as tnt  # line 1: this process is now one rank of the run

Images = tuple[np.ndarray, np.ndarray]  # pixels in [0, 1] of shape (n, 28, 28, 1), labels (n,)
IDX_FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def main() -> None:
    args = parse_args()
    keras.utils.set_random_seed(args.seed)
    name, train, val, test = load_data(args)
    epochs = args.number_epochs or (15 if name == "digits" else 4)

    model = tnt.Model(lenet5())  # line 2: from here on, everything is as in Keras
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rate=args.learning_rate, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )

    # The batch size is the global one: each rank works on its micro-batch of every batch.
    train_dataset = tf.data.Dataset.from_tensor_slices(train)
    train_dataset = train_dataset.shuffle(len(train[0]), seed=args.seed)
    train_dataset = train_dataset.batch(args.batch_size).prefetch(tf.data.AUTOTUNE)
    val_dataset = tf.data.Dataset.from_tensor_slices(val).batch(args.batch_size)
    test_dataset = tf.data.Dataset.from_tensor_slices(test).batch(args.batch_size)

    model.fit(train_dataset, validation_data=val_dataset, epochs=epochs, verbose=args.verbose)
    loss, accuracy = model.evaluate(test_dataset, verbose=0)
    say(f"test loss: {loss:.4f}, test accuracy: {accuracy:.2%}")


def lenet5() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(6, 5, padding="same", activation="tanh"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Conv2D(16, 5, activation="tanh"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(120, activation="tanh"),
            keras.layers.Dense(84, activation="tanh"),
            keras.layers.Dense(10, activation="softmax"),
        ],
        name="lenet5",
    )


def load_data(args: argparse.Namespace) -> tuple[str, Images, Images, Images]:
    """MNIST if this machine has it, else scikit-learn's digits. Nothing is ever downloaded."""
    mnist = load_mnist(args.data_dir)
    name = "MNIST" if mnist else "digits"
    (x, y), (x_test, y_test) = mnist or load_digits()

    val_size = len(x) // 10 if args.val_size is None else args.val_size
    train_size = len(x) - val_size if args.train_size is None else args.train_size
    test_size = len(x_test) if args.test_size is None else args.test_size
    if train_size < 1 or train_size + val_size > len(x):
        fail(
            f"--train_size {train_size} and --val_size {val_size} do not fit: "
            f"the {name} data has {len(x)} images to train and validate with"
        )
    if test_size > len(x_test):
        fail(f"--test_size {test_size}: the {name} data has {len(x_test)} images to test with")

    source = "MNIST" if mnist else "scikit-learn's digits (no MNIST found)"
    say(f"data: {source}; images: {train_size} train, {val_size} validate, {test_size} test")
    in_train, in_val = slice(train_size), slice(train_size, train_size + val_size)
    test = (x_test[:test_size], y_test[:test_size])
    return name, (x[in_train], y[in_train]), (x[in_val], y[in_val]), test


def load_mnist(data_dir: Path | None) -> tuple[Images, Images] | None:
    """MNIST from `data_dir`, or else from Keras's cache of downloads."""
    keras_home = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras"))
    folder = data_dir or keras_home / "datasets"
    if (folder / "mnist.npz").is_file():
        with np.load(folder / "mnist.npz") as arrays:
            parts = [arrays[key] for key in ("x_train", "y_train", "x_test", "y_test")]
    else:
        paths = [find_idx_file(folder, stem) for stem in IDX_FILES]
        if None in paths:
            if data_dir:
                fail(
                    f"--data_dir {data_dir}: it has neither mnist.npz nor the four idx-ubyte files"
                )
            return None
        parts = [read_idx(path) for path in paths if path]
    x_train, y_train, x_test, y_test = parts
    return (as_pixels(x_train / 255), y_train), (as_pixels(x_test / 255), y_test)


def find_idx_file(folder: Path, stem: str) -> Path | None:
    """`train-images-idx3-ubyte` and the like, as distributed: compressed or not."""
    candidates = [folder / f"{stem}-ubyte{ending}" for ending in ("", ".gz")]
    return next((path for path in candidates if path.is_file()), None)


def read_idx(path: Path) -> np.ndarray:
    """Reads MNIST's own format: 0, 0, type, number of dimensions, the dimensions, the bytes."""
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    rank = content[3]
    shape = np.frombuffer(content, ">i4", count=rank, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)


def load_digits() -> tuple[Images, Images]:
    """1797 scans of 8x8 pixels, resized to MNIST's; in a fixed order, the last 300 for the test."""
    try:
        from sklearn.datasets import load_digits as load_scans
    except ImportError:
        fail(
            "no MNIST found: pass its folder as --data_dir, or install scikit-learn for its digits"
        )
    scans, labels = load_scans(return_X_y=True)
    images = tf.image.resize(scans.reshape(-1, 8, 8, 1) / 16, (28, 28)).numpy()
    order = np.random.default_rng(seed=0).permutation(len(images))
    x, y = as_pixels(images[order]), labels[order]
    return (x[:-300], y[:-300]), (x[-300:], y[-300:])


def as_pixels(images: np.ndarray) -> np.ndarray:
    return images.reshape(-1, 28, 28, 1).astype("float32")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description="Train LeNet-5 on handwritten digits."
    )
    add = parser.add_argument
    add("--batch_size", type=at_least(1), default=64, help="global batch size (default: 64)")
    add("--number_epochs", type=at_least(1), help="default: 15 for the digits, 4 for MNIST")
    add("--learning_rate", type=positive, default=0.02, help="default: 0.02")
    add("--train_size", type=at_least(1), help="images to train with (default: the rest)")
    add("--val_size", type=at_least(1), help="images to validate with (default: a tenth)")
    add("--test_size", type=at_least(1), help="images to test with (default: all)")
    add("--data_dir", type=Path, help="folder with MNIST: mnist.npz, or its four idx-ubyte files")
    add("--seed", type=at_least(0), default=42, help="weights and order of images (default: 42)")
    add("--verbose", type=int, choices=(0, 1, 2), default=2, help="as in Keras (default: 2)")
    return parser.parse_args()


def at_least(smallest: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {smallest}")
        return int(text)

    return integer


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def say(message: str) -> None:
    """Prints once, however many ranks there are."""
    if tnt.is_master_rank():
        print(message, flush=True)


def fail(message: str) -> NoReturn:
    raise SystemExit(f"lenet5.py: {message}")


if __name__ == "__main__":
    main()
