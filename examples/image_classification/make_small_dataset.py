"""Makes a small dataset in the layout of ImageNet: coloured shapes, as JPEGs.

    python make_small_dataset.py --output_dir=small

There are four classes, which a model learns to tell apart in a minute. `small/tfrecords` has the
images as TFRecords, `small/folders` the same images in a folder for each class. The same options
give the same files, byte for byte.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

# Names as in ImageNet, and what the images show.
CLASSES = {
    "n00000001": "red disc",
    "n00000002": "green square",
    "n00000003": "blue stripes",
    "n00000004": "yellow checks",
}
COLOURS = np.array([(210, 50, 50), (50, 180, 70), (50, 80, 210), (220, 200, 60)])
SIDES = (48, 80)  # the range of widths and heights
SHARDS = {"train": 4, "validation": 2}
FOLDERS = {"train": "train", "validation": "val"}


def main() -> None:
    args = parse_args()
    draw = np.random.default_rng(args.seed)
    for split, count in (("train", args.train_images), ("validation", args.val_images)):
        labels = draw.permutation(np.arange(count) % len(CLASSES))
        images = [tf.io.encode_jpeg(picture(label, draw), quality=90).numpy() for label in labels]
        write_records(args.output_dir / "tfrecords", split, images, labels)
        write_folders(args.output_dir / "folders" / FOLDERS[split], images, labels)
        print(f"{split}: {count} images of {len(CLASSES)} classes in {args.output_dir}")


def picture(label: int, draw: np.random.Generator) -> np.ndarray:
    """A shape in the colour of its class, somewhere on a noisy grey background."""
    height, width = draw.integers(*SIDES, size=2, endpoint=True)
    ground = draw.integers(60, 160) + np.zeros((height, width, 3))
    colour = COLOURS[label] + draw.integers(-30, 30, size=3)
    pixels = np.where(shape(label, height, width, draw)[..., None], colour, ground)
    pixels += draw.normal(0, 12, size=pixels.shape)
    return np.clip(pixels, 0, 255).astype(np.uint8)


def shape(label: int, height: int, width: int, draw: np.random.Generator) -> np.ndarray:
    """Which pixels belong to the shape: a disc, a square, stripes or checks."""
    side = min(height, width)
    radius = side * draw.uniform(0.3, 0.45)
    y = np.arange(height)[:, None] - height / 2 - draw.uniform(-0.1, 0.1) * side
    x = np.arange(width)[None, :] - width / 2 - draw.uniform(-0.1, 0.1) * side
    cell = radius / 2
    return [
        x**2 + y**2 < radius**2,
        np.maximum(abs(x), abs(y)) < radius,
        (x + 0 * y) // cell % 2 == 0,
        (x // cell + y // cell) % 2 == 0,
    ][label]


def write_records(folder: Path, split: str, images: list[bytes], labels: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shards = SHARDS[split]
    for shard in range(shards):
        name = folder / f"{split}-{shard:05d}-of-{shards:05d}"
        with tf.io.TFRecordWriter(str(name)) as writer:
            for number in range(shard, len(images), shards):
                writer.write(record(number, images[number], int(labels[number])))


def record(number: int, image: bytes, label: int) -> bytes:
    """One image, with the features of ImageNet's records."""
    synset, text = list(CLASSES.items())[label]
    height, width, channels = tf.io.extract_jpeg_shape(image).numpy()
    features = {
        "image/encoded": [image],
        "image/format": [b"JPEG"],
        "image/colorspace": [b"RGB"],
        "image/filename": [file_name(number, synset).encode()],
        "image/height": [height],
        "image/width": [width],
        "image/channels": [channels],
        "image/class/label": [label + 1],  # 0 would be "background"
        "image/class/synset": [synset.encode()],
        "image/class/text": [text.encode()],
        "image/object/class/label": [label + 1],
        "image/object/bbox/xmin": [0.0],
        "image/object/bbox/ymin": [0.0],
        "image/object/bbox/xmax": [1.0],
        "image/object/bbox/ymax": [1.0],
    }
    encoded = {name: feature(values) for name, values in features.items()}
    example = tf.train.Example(features=tf.train.Features(feature=encoded))
    return example.SerializeToString(deterministic=True)


def feature(values: list[Any]) -> tf.train.Feature:
    if isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def write_folders(folder: Path, images: list[bytes], labels: np.ndarray) -> None:
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        synset = list(CLASSES)[label]
        (folder / synset).mkdir(parents=True, exist_ok=True)
        (folder / synset / file_name(number, synset)).write_bytes(image)


def file_name(number: int, synset: str) -> str:
    return f"{synset}_{number}.JPEG"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description="Make a small dataset in the layout of ImageNet."
    )
    add = parser.add_argument
    add("--output_dir", type=Path, default=Path("small"), help="default: small")
    add("--train_images", type=int, default=512, help="images to train with (default: 512)")
    add("--val_images", type=int, default=128, help="images to validate with (default: 128)")
    add("--seed", type=int, default=0, help="determines the images (default: 0)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
