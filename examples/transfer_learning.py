"""Transfer learning from a saved model: what it learned from some digits helps with the others.

    tarantella -n 2 --no-gpu -- transfer_learning.py --samples=100

First a model learns the digits 0 to 4 and is saved; yours may come from plain Keras, long ago and
elsewhere. Then it is loaded, gets a new last layer for the digits 5 to 9, and learns these from a
few samples: first only the new layer, with the rest frozen, then the whole model, with a small
learning rate. Freezing, compiling again and fitting again work as in plain Keras.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import tarantella as tnt

LOSS = "sparse_categorical_crossentropy"


def main() -> None:
    args = parse_args()
    keras.utils.set_random_seed(42)
    scans, labels = load_digits(return_X_y=True)
    x = (scans / 16).astype("float32")
    if not args.base.exists():
        learn_base(x[labels < 5], labels[labels < 5], args.base)

    others = labels >= 5
    x, y = x[others], labels[others] - 5
    few, rest = slice(args.samples), slice(args.samples, None)

    base = keras.models.load_model(args.base)
    features = keras.Model(base.inputs, base.layers[-2].output)
    features.trainable = False
    plain = keras.Sequential([features, keras.layers.Dense(5, "softmax")])
    model = tnt.Model(plain)

    model.compile(keras.optimizers.Adam(0.01), LOSS, metrics=["accuracy"])
    model.fit(x[few], y[few], batch_size=20, epochs=20, verbose=0)
    say(f"new layer only: accuracy {model.evaluate(x[rest], y[rest], verbose=0)[1]:.2%}")

    features.trainable = True
    model.compile(keras.optimizers.Adam(0.001), LOSS, metrics=["accuracy"])
    model.fit(x[few], y[few], batch_size=20, epochs=20, verbose=0)
    say(f"whole model: accuracy {model.evaluate(x[rest], y[rest], verbose=0)[1]:.2%}")


def learn_base(x: np.ndarray, y: np.ndarray, file: Path) -> None:
    """Trains a model on all ranks, and saves it. What is saved is a plain Keras model."""
    layers = keras.layers
    plain = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Reshape((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(32, "relu"),
            layers.Dense(5, "softmax"),
        ]
    )
    model = tnt.Model(plain)
    model.compile(keras.optimizers.Adam(0.003), LOSS, metrics=["accuracy"])
    model.fit(x, y, batch_size=64, epochs=5, verbose=0)
    model.save(file)
    say(f"base: accuracy {model.evaluate(x, y, verbose=0)[1]:.2%}, saved as {file}")


def say(message: str) -> None:
    if tnt.is_master_rank():
        print(message, flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn new digits from a model of others.")
    parser.add_argument(
        "--base", type=Path, default=Path("base.keras"), help="the saved model (base.keras)"
    )
    parser.add_argument("--samples", type=int, default=100, help="samples of the new digits (100)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
