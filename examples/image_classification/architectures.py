"""The models of `keras.applications` that you can train, and what each of them needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

WEIGHT_DECAY = 1e-4
BATCH_NORM_MOMENTUM = 0.9

Normalize = Callable[[Any], Any]


@dataclass(frozen=True)
class Architecture:
    """A model of `keras.applications`.

    Attributes:
        build: Creates the model.
        image_size: Width and height of the images that it is usually trained with.
        normalize: Turns pixels from 0 to 255 into what the model takes.
    """

    build: Callable[..., keras.Model]
    image_size: int
    normalize: Normalize


def resnet(build: Callable[..., keras.Model]) -> Architecture:
    return Architecture(build, 224, keras.applications.resnet.preprocess_input)


def efficientnet(build: Callable[..., keras.Model], image_size: int) -> Architecture:
    """These have layers that normalize pixels."""
    return Architecture(build, image_size, normalize=lambda pixels: pixels)


def tiny(
    *,
    include_top: bool,
    weights: str | None,
    classes: int,
    input_shape: tuple[int, int, int],
    classifier_activation: str,
) -> keras.Model:
    """Three convolutions, to try things out; the same arguments as keras.applications."""
    assert include_top
    assert weights is None
    model = keras.Sequential([keras.Input(input_shape), keras.layers.Rescaling(1 / 128, -1)])
    for filters in (16, 32, 64):
        model.add(keras.layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False))
        model.add(keras.layers.BatchNormalization())
        model.add(keras.layers.ReLU())
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(classes, activation=classifier_activation))
    return model


ARCHITECTURES = {
    "tiny": Architecture(tiny, 32, normalize=lambda pixels: pixels),
    "resnet50": resnet(keras.applications.ResNet50),
    "resnet101": resnet(keras.applications.ResNet101),
    "resnet152": resnet(keras.applications.ResNet152),
    "efficientnetv2b0": efficientnet(keras.applications.EfficientNetV2B0, 224),
    "efficientnetv2b1": efficientnet(keras.applications.EfficientNetV2B1, 240),
    "efficientnetv2b2": efficientnet(keras.applications.EfficientNetV2B2, 260),
    "efficientnetv2b3": efficientnet(keras.applications.EfficientNetV2B3, 300),
    "efficientnetv2s": efficientnet(keras.applications.EfficientNetV2S, 384),
    "efficientnetv2m": efficientnet(keras.applications.EfficientNetV2M, 480),
    "efficientnetv2l": efficientnet(keras.applications.EfficientNetV2L, 480),
}


def build_model(
    architecture: Architecture, image_size: int, num_classes: int, sync_batch_norm: bool
) -> keras.Model:
    """A new model, with random weights, set up for training as in Goyal et al."""
    model = architecture.build(
        include_top=True,
        weights=None,
        classes=num_classes,
        input_shape=(image_size, image_size, 3),
        classifier_activation="softmax",
    )
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = BATCH_NORM_MOMENTUM
            layer.synchronized = sync_batch_norm
            if layer.name.endswith("_3_bn"):  # the last in a residual block of a ResNet:
                layer.gamma.assign(keras.ops.zeros_like(layer.gamma))  # blocks start as identities
    for weight in model.trainable_weights:
        if weight.name == "kernel":  # not biases, nor batch normalization
            weight.regularizer = keras.regularizers.L2(WEIGHT_DECAY / 2)  # its gradient is 2 * l2
    return model
