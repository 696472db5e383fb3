"""ImageNet, or images in the same layout: found, read, cropped and batched.

It recognizes two layouts:

    train-00000-of-01024 ...          TFRecords, in the folder itself or in its folders
    validation-00000-of-00128 ...     train and validation
    train/<class>/*.JPEG              image files (or *.jpg, *.jpeg, *.png), in a folder for each
    val/<class>/*.JPEG                class (validation/<class>, if there is no val)

Everything is written as for one process. Images are read, decoded and cropped in a `map` of single
samples; with Tarantella, each rank does that only for its own samples.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import tensorflow as tf

import tarantella as tnt

IMAGENET_CLASSES = 1000
ENDINGS = (".jpeg", ".jpg", ".png")
SPLITS = ("train", "validation")
FOLDERS = {"train": ("train",), "validation": ("val", "validation")}

# Evaluation uses the centre of an image: 224 of 256 pixels.
MARGIN = 256 / 224
# Size of the shuffle buffer in records, of about 110 kB each: 1 GB on every rank.
SHUFFLE_BUFFER = 10_000
FILES_AT_A_TIME = 16


class Images(Protocol):
    """Images in one of the layouts; `split` is "train" or "validation"."""

    num_classes: int

    def count(self, split: str) -> int:
        """The number of images."""

    def samples(self, split: str, num_samples: int, shuffle_seed: int | None) -> tf.data.Dataset:
        """`num_samples` pairs of an encoded image and its label; reshuffled in every epoch."""


class TFRecords:
    """Images in TFRecord files, where labels start at 1: 0 stands for "background"."""

    def __init__(self, files: dict[str, list[Path]], num_classes: int | None) -> None:
        self.num_classes = num_classes or IMAGENET_CLASSES
        self._files = {split: [str(file) for file in files[split]] for split in SPLITS}
        # One rank counts, and tells the others: there may be many ranks, and a million records.
        counts = [0 for _ in SPLITS]
        if tnt.is_master_rank():
            counts = [count_all_records(files[split]) for split in SPLITS]
        self._counts = dict(zip(SPLITS, tnt.broadcast(counts), strict=True))

    def count(self, split: str) -> int:
        return self._counts[split]

    def samples(self, split: str, num_samples: int, shuffle_seed: int | None) -> tf.data.Dataset:
        files = tf.data.Dataset.from_tensor_slices(self._files[split])
        all_of_them = num_samples == self.count(split)
        if (
            shuffle_seed is not None and all_of_them
        ):  # otherwise, use the same images in every epoch
            files = files.shuffle(len(self._files[split]), seed=shuffle_seed)
        records = files.interleave(
            tf.data.TFRecordDataset,
            cycle_length=FILES_AT_A_TIME,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        records = records.take(num_samples)
        records = records.apply(tf.data.experimental.assert_cardinality(num_samples))
        if shuffle_seed is not None:
            records = records.shuffle(min(num_samples, SHUFFLE_BUFFER), seed=shuffle_seed)
        return records.map(parse_record, num_parallel_calls=tf.data.AUTOTUNE)


class Folders:
    """Images in a folder for each class. Classes are numbered in the order of their names."""

    def __init__(self, files: dict[str, list[Path]], num_classes: int | None) -> None:
        classes = {split: sorted({file.parent.name for file in files[split]}) for split in SPLITS}
        unknown = sorted(set(classes["validation"]) - set(classes["train"]))
        if unknown:
            fail(f"class {unknown[0]} has images to validate with, but none to train with")
        self.num_classes = num_classes or len(classes["train"])
        if self.num_classes < len(classes["train"]):
            fail(
                f"--num_classes {num_classes}: there are {len(classes['train'])} folders of images"
            )
        self._labels = {name: label for label, name in enumerate(classes["train"])}
        self._files = {split: in_fixed_order(files[split]) for split in SPLITS}

    def count(self, split: str) -> int:
        return len(self._files[split])

    def samples(self, split: str, num_samples: int, shuffle_seed: int | None) -> tf.data.Dataset:
        files = self._files[split][:num_samples]
        labels = [self._labels[file.parent.name] for file in files]
        dataset = tf.data.Dataset.from_tensor_slices(([str(file) for file in files], labels))
        if shuffle_seed is not None:
            dataset = dataset.shuffle(num_samples, seed=shuffle_seed)
        return dataset.map(
            lambda file, label: (tf.io.read_file(file), label), num_parallel_calls=tf.data.AUTOTUNE
        )


# Finding


def find_images(data_dir: Path, num_classes: int | None = None) -> Images:
    """The images in a folder, whichever layout they have.

    Args:
        data_dir: The folder.
        num_classes: The number of classes; by default, what the layout says.
    """
    records = {split: find_records(data_dir, split) for split in SPLITS}
    if all(records.values()):
        return TFRecords(records, num_classes)
    files = {split: find_image_files(data_dir, split) for split in SPLITS}
    if all(files.values()):
        return Folders(files, num_classes)
    return fail(
        f"--data_dir {data_dir}: neither TFRecords (train-00000-of-... and validation-00000-of-...)"
        " nor folders of images (train/<class>/*.JPEG and val/<class>/*.JPEG) found"
    )


def find_records(data_dir: Path, split: str) -> list[Path]:
    folders = (data_dir, data_dir / split)
    return first_found(sorted(folder.glob(f"{split}-*-of-*")) for folder in folders)


def find_image_files(data_dir: Path, split: str) -> list[Path]:
    folders = [data_dir / name for name in FOLDERS[split]]
    return first_found(
        sorted(file for file in folder.glob("*/*") if file.suffix.lower() in ENDINGS)
        for folder in folders
    )


def first_found(lists: Iterable[list[Path]]) -> list[Path]:
    return next(filter(None, lists), [])


def in_fixed_order(files: Sequence[Path]) -> list[Path]:
    """The files in a fixed random order, so that the first ones come from all classes."""
    return [files[i] for i in np.random.default_rng(seed=0).permutation(len(files))]


# Reading


def count_all_records(files: Sequence[Path]) -> int:
    with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
        return sum(pool.map(count_records, files))


def count_records(file: Path) -> int:
    """The number of records in a file, reading only their lengths.

    A record is its length (8 bytes), a checksum of that (4), the content and its checksum (4).
    """
    count, position, size = 0, 0, file.stat().st_size
    with file.open("rb", buffering=0) as content:
        while position + 8 <= size:
            content.seek(position)
            (length,) = struct.unpack("<Q", content.read(8))
            position += 8 + 4 + length + 4
            count += 1
    if position != size:
        fail(f"{file}: not a TFRecord file, or its end is missing")
    return count


def parse_record(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    features = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }
    parsed = tf.io.parse_single_example(record, features)
    return parsed["image/encoded"], parsed["image/class/label"] - 1


# Preparing


def decode(encoded: tf.Tensor) -> tf.Tensor:
    """Pixels from 0 to 255, in three channels, even for greyscale images."""
    return tf.io.decode_image(encoded, channels=3, expand_animations=False)


def resize(image: tf.Tensor, height: Any, width: Any) -> tf.Tensor:
    return tf.image.resize(image, (height, width), method="bilinear", antialias=True)


def for_training(encoded: tf.Tensor, image_size: int, seed: tf.Tensor) -> tf.Tensor:
    """A random crop, 8 % to 100 % of the image, stretched to a square; one in two is mirrored.

    The random numbers depend only on the seed.
    """
    crop_seed, flip_seed = tf.unstack(tf.random.split(seed, 2))
    image = decode(encoded)
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.shape(image),
        bounding_boxes=tf.zeros((1, 0, 4)),  # the object may be anywhere
        seed=crop_seed,
        min_object_covered=0,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.08, 1),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    image = resize(tf.slice(image, begin, size), image_size, image_size)
    return tf.image.stateless_random_flip_left_right(image, flip_seed)


def for_evaluation(encoded: tf.Tensor, image_size: int) -> tf.Tensor:
    """The centre of the image, without its margins."""
    image = decode(encoded)
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2], tf.float32))
    scale = round(MARGIN * image_size) / tf.minimum(height, width)
    new_height, new_width = (tf.cast(tf.round(scale * side), tf.int32) for side in (height, width))
    image = resize(image, new_height, new_width)
    top, left = (new_height - image_size) // 2, (new_width - image_size) // 2
    return tf.image.crop_to_bounding_box(image, top, left, image_size, image_size)


# Batches


def load_dataset(
    images: Images,
    dataset_type: str,
    *,
    num_samples: int,
    batch_size: int,
    image_size: int,
    normalize: Callable[[Any], Any],
    drop_remainder: bool = False,
    shuffle_seed: int = 0,
) -> tf.data.Dataset:
    """Batches of images with their labels, to train with or to validate with.

    Args:
        images: Where they come from.
        dataset_type: "train" or "validation". The former are shuffled and augmented.
        num_samples: The number of images.
        batch_size: The global batch size; the number of ranks does not matter here.
        image_size: The resulting width and height.
        normalize: Turns pixels from 0 to 255 into what the model takes.
        drop_remainder: Whether to drop a last batch that is not full.
        shuffle_seed: Determines the order, and the augmentation of each image.
    """

    # The random numbers for an image depend on its position in this epoch: they are the same on
    # any number of ranks, and differ for the same image in the next epoch.
    def augmented(position: tf.Tensor, sample: tuple[tf.Tensor, tf.Tensor]) -> Any:
        encoded, label = sample
        seed = tf.stack([tf.constant(shuffle_seed, tf.int64), position])
        return normalize(for_training(encoded, image_size, seed)), label

    def centred(encoded: tf.Tensor, label: tf.Tensor) -> Any:
        return normalize(for_evaluation(encoded, image_size)), label

    if dataset_type == "train":
        dataset = images.samples("train", num_samples, shuffle_seed).enumerate()
        dataset = dataset.map(augmented, num_parallel_calls=tf.data.AUTOTUNE)
    else:
        dataset = images.samples("validation", num_samples, None)
        dataset = dataset.map(centred, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(batch_size, drop_remainder=drop_remainder).prefetch(tf.data.AUTOTUNE)


def synthetic_dataset(
    *,
    num_samples: int,
    batch_size: int,
    image_size: int,
    num_classes: int,
    normalize: Callable[[Any], Any],
    drop_remainder: bool = False,
) -> tf.data.Dataset:
    """Batches of random pixels, always the same, with meaningless labels."""

    def sample(number: tf.Tensor) -> Any:
        seed = tf.stack([tf.constant(0, tf.int64), number])
        pixels = tf.random.stateless_uniform((image_size, image_size, 3), seed, 0, 255)
        return normalize(pixels), number % num_classes

    dataset = tf.data.Dataset.range(num_samples)
    dataset = dataset.map(sample, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(batch_size, drop_remainder=drop_remainder).prefetch(tf.data.AUTOTUNE)


def fail(message: str) -> NoReturn:
    sys.exit(f"train_imagenet_main.py: {message}")
