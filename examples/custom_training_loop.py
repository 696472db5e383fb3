"""A training loop without `fit`, on as many ranks as you like.

    tarantella -n 2 --no-gpu -- custom_training_loop.py --epochs=10

The loop is that of one process, except for three lines, which hand the model, the optimizer and
the dataset to Tarantella. Each rank then gets its micro-batch of every global batch, and the
optimizer applies the gradients of all ranks. The accuracy is the same on any number of ranks.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tarantella as tnt

SAMPLES_TO_TEST = 300


def main() -> None:
    args = parse_args()
    keras.utils.set_random_seed(args.seed)
    (x, y), (x_test, y_test) = digits()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(args.batch_size)

    model = tnt.Model(classifier())
    optimizer = tnt.keras.optimizers.Optimizer(keras.optimizers.Adam(args.learning_rate))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(reduce_retracing=True)  # the last batch may be smaller
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))  # the mean over the micro-batch
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    batches = tnt.distribute_dataset(dataset)
    for epoch in range(args.epochs):
        losses = []
        for images, labels in batches:
            loss = train_step(images, labels)
            # A rank's loss is weighted by its share of the batch; the sum is the global loss.
            losses.append(tnt.allreduce(float(loss) * batches.share))
        say(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")

    correct = np.argmax(model.predict(x_test, verbose=0), axis=1) == y_test
    say(f"test accuracy: {np.mean(correct):.2%}")


def classifier() -> keras.Model:
    layers = keras.layers
    return keras.Sequential([keras.Input((64,)), layers.Dense(64, "relu"), layers.Dense(10)])


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Scans of handwritten digits, 8x8 pixels in one row: for training, and for the test."""
    scans, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed=0).permutation(len(scans))
    x, y = (scans[order] / 16).astype("float32"), labels[order]
    train, test = slice(SAMPLES_TO_TEST, None), slice(SAMPLES_TO_TEST)
    return (x[train], y[train]), (x[test], y[test])


def say(message: str) -> None:
    if tnt.is_master_rank():
        print(message, flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on digits in a custom loop.")
    parser.add_argument("--batch_size", type=int, default=64, help="global batch size (64)")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs (10)")
    parser.add_argument("--learning_rate", type=float, default=0.003, help="of Adam (0.003)")
    parser.add_argument("--seed", type=int, default=42, help="weights (42)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
