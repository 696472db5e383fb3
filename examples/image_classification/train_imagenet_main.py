"""Trains models of `keras.applications` on ImageNet, on as many ranks as you like.

    tarantella -n 4 -- ./train_imagenet_main.py --data_dir=/data/imagenet --model_arch=resnet50

Plain `python train_imagenet_main.py` does the same in one process. README.md has more commands, and
data to try it with. The data are in imagenet.py, the models in architectures.py, and the learning
rate in schedules.py. None of these depends on the number of ranks; the two lines that Tarantella
needs are marked "line 1" and "line 2".
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import imagenet
import keras
import tensorflow as tf
from architectures import ARCHITECTURES, build_model
from schedules import KINDS, ScaledRate

import tarantella as tnt  # line 1: this process is now one rank of the run

SYNTHETIC_SAMPLES = {"train": 2560, "validation": 256}


def main() -> None:
    args = parse_args()
    keras.utils.set_random_seed(args.shuffle_seed)
    train_dataset, val_dataset, num_classes = load_data(args)
    total_steps = args.train_epochs * int(train_dataset.cardinality())

    model = build_model(
        ARCHITECTURES[args.model_arch], args.image_size, num_classes, args.sync_batch_norm
    )
    strategy = tnt.ParallelStrategy(args.strategy)
    model = tnt.Model(model, parallel_strategy=strategy)  # line 2: the rest is as in Keras

    rate = ScaledRate(args.base_learning_rate, args.batch_size, total_steps, args.lr_schedule)
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rate=rate, momentum=0.9, nesterov=True),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    history = model.fit(
        train_dataset,
        validation_data=val_dataset,
        validation_freq=args.val_freq,
        epochs=args.train_epochs,
        callbacks=callbacks(args),
        verbose=args.verbose,
    )
    for accuracy in history.history.get("val_accuracy", [])[-1:]:
        say(f"validation accuracy: {accuracy:.2%}")


def load_data(args: argparse.Namespace) -> tuple[tf.data.Dataset, tf.data.Dataset, int]:
    """Batches to train with and to validate with, and the number of classes."""
    limits = {"train": args.train_num_samples, "validation": args.val_num_samples}
    if args.synthetic_data:
        images = None
        num_classes = args.num_classes or imagenet.IMAGENET_CLASSES
        counts = {split: limits[split] or SYNTHETIC_SAMPLES[split] for split in limits}
    else:
        images = imagenet.find_images(args.data_dir, args.num_classes)
        num_classes = images.num_classes
        counts = {split: at_most(images.count(split), limits[split]) for split in limits}
    if args.drop_remainder and counts["train"] < args.batch_size:
        imagenet.fail(
            f"--drop_remainder leaves nothing to train with: there are {counts['train']} images, "
            f"and --batch_size is {args.batch_size}"
        )

    def load(split: str, drop_remainder: bool = False) -> tf.data.Dataset:
        """Batches of the global size: each rank works on its micro-batch of every batch."""
        options = {
            "num_samples": counts[split],
            "batch_size": args.batch_size,
            "image_size": args.image_size,
            "normalize": ARCHITECTURES[args.model_arch].normalize,
            "drop_remainder": drop_remainder,
        }
        if images is None:
            return imagenet.synthetic_dataset(num_classes=num_classes, **options)
        return imagenet.load_dataset(images, split, shuffle_seed=args.shuffle_seed, **options)

    say(
        f"data: {args.data_dir or 'synthetic'}; images: {counts['train']} train, "
        f"{counts['validation']} validate, of {num_classes} classes"
    )
    return load("train", args.drop_remainder), load("validation"), num_classes


def at_most(count: int, limit: int | None) -> int:
    return count if limit is None else min(count, limit)


def callbacks(args: argparse.Namespace) -> list[keras.callbacks.Callback]:
    """Keras's callbacks. On several ranks, the master writes the files."""
    chosen: list[keras.callbacks.Callback] = []
    if args.model_dir:
        chosen += [
            keras.callbacks.ModelCheckpoint(args.model_dir / "checkpoint-{epoch:03d}.keras"),
            keras.callbacks.TensorBoard(args.model_dir / "logs"),
            # A restarted run resumes after the last finished epoch.
            keras.callbacks.BackupAndRestore(args.model_dir / "backup"),
        ]
    if args.profile_dir:
        chosen.append(keras.callbacks.TensorBoard(args.profile_dir, profile_batch=2))
    return chosen


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description="Train an image classifier on ImageNet."
    )
    add = parser.add_argument
    count = at_least(1)
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data_dir", type=Path, help="folder with TFRecords, or folders of images")
    data.add_argument("--synthetic_data", action="store_true", help="random images, to try it out")
    add("--model_arch", choices=ARCHITECTURES, default="resnet50", help="default: resnet50")
    add("--batch_size", type=count, default=256, help="global batch size (default: 256)")
    add("--train_epochs", type=count, default=90, help="default: 90")
    add("--train_num_samples", type=count, help="images to train with, at most (default: all)")
    add("--val_num_samples", type=count, help="images to validate with, at most (default: all)")
    add(
        "--val_freq",
        type=count,
        default=1,
        help="epochs between validations (default: 1)",
    )
    add("--drop_remainder", action="store_true", help="drop a last batch that is not full")
    add("--num_classes", type=count, help="default: the number of folders; 1000 for TFRecords")
    add("--image_size", type=at_least(32), help="pixels (default: that of the architecture)")
    add(
        "--base_learning_rate", type=positive, default=0.1, help="for a batch of 256 (default: 0.1)"
    )
    add("--lr_schedule", choices=KINDS, default="step", help="how the rate decays (default: step)")
    add("--sync_batch_norm", action="store_true", help="use the batch statistics of all ranks")
    add("--strategy", choices=["data", "all"], default="data")
    add("--shuffle_seed", type=at_least(0), default=42, help="of everything random (default: 42)")
    add("--model_dir", type=Path, help="folder for checkpoints and TensorBoard's logs")
    add("--profile_dir", type=Path, help="folder for TensorBoard's profile of the second batch")
    add("--verbose", type=int, choices=(0, 1, 2), default=2, help="as in Keras (default: 2)")
    args = parser.parse_args()
    args.image_size = args.image_size or ARCHITECTURES[args.model_arch].image_size
    return args


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


if __name__ == "__main__":
    main()
