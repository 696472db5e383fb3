# quickstart.py
import keras
import numpy as np
import tensorflow as tf

import tarantella as tnt  # line 1: this process is one of the ranks of the run

# Points on two spirals. The seeds make them, and the first weights, the same on every rank.
keras.utils.set_random_seed(1)
rng = np.random.default_rng(1)
spiral = rng.integers(0, 2, size=2500)
turn = rng.uniform(0.3, 2, size=2500)
angle = np.pi * (turn + spiral)
points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1)
points += rng.normal(0, 0.1, size=points.shape)
data = tf.data.Dataset.from_tensor_slices((points, spiral))
train, test = data.skip(500).shuffle(2000, seed=2).batch(64), data.take(500).batch(64)

model = keras.Sequential(
    [
        keras.Input((2,)),
        keras.layers.Dense(32, "tanh"),
        keras.layers.Dense(32, "tanh"),
        keras.layers.Dense(1, "sigmoid"),
    ]
)
model = tnt.Model(model)  # line 2: this model trains on all ranks
model.compile(keras.optimizers.Adam(0.02), loss="binary_crossentropy", metrics=["accuracy"])
model.fit(train, epochs=6, verbose=2)
loss, accuracy = model.evaluate(test, verbose=0)
if tnt.is_master_rank():
    print(f"test accuracy: {accuracy:.1%}")
