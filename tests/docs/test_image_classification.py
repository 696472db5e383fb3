"""The image classification example does what its README says, and prepares images correctly.

Most tests run in this process, with the smallest model; the commands of the README run as they
are, except for hosts and data that do not exist here.
"""

from __future__ import annotations

import io
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

EXAMPLE = Path(__file__).parents[2] / "examples" / "image_classification"
README = (EXAMPLE / "README.md").read_text()
LIMIT = 600  # seconds, on a busy machine
TINY = "--model_arch=tiny --batch_size=64 --train_epochs=2 --num_classes=4"

# Replaces the reader's hosts and data, and work for GPUs, in the commands of the README.
HERE = {
    "--hostfile ./hostfile --devices-per-node 4": "-n 2 --no-gpu",
    "--data_dir=/data/imagenet": f"--data_dir=small/tfrecords {TINY}",
    "--synthetic_data": "--synthetic_data --train_num_samples=64 --val_num_samples=32 "
    "--image_size=32",
}

Shell = Callable[..., Any]
Program = Callable[[str], str]


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def accuracy(output: str) -> float:
    (percent,) = re.findall(r"validation accuracy: ([\d.]+)%", output)
    return float(percent)


@pytest.fixture(scope="module")
def module() -> Iterator[Callable[[str], ModuleType]]:
    """The modules of the example, by name."""
    sys.path.insert(0, str(EXAMPLE))
    yield import_module
    sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def folder(module: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example, with the small dataset."""
    copy = tmp_path_factory.mktemp("image_classification")
    shutil.copytree(EXAMPLE, copy, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["make_small_dataset.py", f"--output_dir={copy / 'small'}"])
        module("make_small_dataset").main()
    return copy


@pytest.fixture(scope="module")
def finished() -> dict[str, Any]:
    """The output of the commands that have run already."""
    return {}


@pytest.fixture
def readme(shell: Shell, folder: Path, finished: dict[str, Any]) -> Callable[..., str]:
    """Runs the one command of the README that contains some words, and returns its output."""

    def run(*words: str, model: str = "resnet50") -> str:
        (line,) = [line for line in commands() if all(word in line for word in words)]
        for theirs, ours in HERE.items():
            line = line.replace(theirs, ours)
        line = line.replace("--model_arch=resnet50", f"--model_arch={model}")
        if line not in finished:
            finished[line] = shell(line, cwd=folder, timeout=LIMIT)
        assert finished[line].status == 0, finished[line].output
        return str(finished[line].output)

    return run


@pytest.fixture
def program(
    module: Callable[[str], ModuleType],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Program:
    """Runs the program in this process, with some options, and returns its output."""

    def run(options: str) -> str:
        capsys.readouterr()  # of earlier runs
        monkeypatch.chdir(folder)
        monkeypatch.setattr("sys.argv", ["train_imagenet_main.py", *options.split()])
        module("train_imagenet_main").main()
        return capsys.readouterr().out

    return run


# The commands of the README


def test_every_command_is_one_that_these_tests_run() -> None:
    programs = [re.search(r"\w+\.py", command) for command in commands()]
    names = [found[0] for found in programs if found]
    assert names.count("make_small_dataset.py") == 1
    assert names.count("train_imagenet_main.py") == 5
    assert len(commands()) == 6


def test_every_file_that_is_named_is_there() -> None:
    names = set(re.findall(r"`(\w+\.py)`", README))
    assert names == {path.name for path in EXAMPLE.glob("*.py")}


def test_small_dataset_is_always_the_same(folder: Path, shell: Shell, tmp_path: Path) -> None:
    (command,) = [line for line in commands() if "make_small_dataset.py" in line]
    shutil.copy(EXAMPLE / "make_small_dataset.py", tmp_path)
    made = shell(command)
    assert made.status == 0, made.output
    files = [path for path in (folder / "small").rglob("*") if path.is_file()]
    assert len(files) == 4 + 2 + 512 + 128
    for path in files:
        assert (tmp_path / path.relative_to(folder)).read_bytes() == path.read_bytes(), path


def test_learns_on_two_ranks_from_tfrecords(readme: Program) -> None:
    output = readme("-n 2", "small/tfrecords")
    assert output.count("images: 512 train, 128 validate, of 4 classes") == 1
    assert accuracy(output) > 90


def test_learns_on_two_ranks_from_folders(readme: Program) -> None:
    output = readme("-n 2", "small/folders")
    assert output.count("images: 512 train, 128 validate, of 4 classes") == 1
    assert accuracy(output) > 90


def test_serial_run_has_the_losses_of_two_ranks(readme: Program) -> None:
    outputs = readme("python train_imagenet_main.py"), readme("-n 2", "small/tfrecords")
    one, two = (re.findall(r"loss: ([\d.]+)", output) for output in outputs)
    assert len(one) == 6  # training and validation
    np.testing.assert_allclose(np.float64(one), np.float64(two), rtol=1e-3, atol=2e-4)


def test_model_dir_has_checkpoints_for_plain_keras_and_logs(readme: Program, folder: Path) -> None:
    import keras

    readme("-n 2", "small/folders")
    assert not (folder / "model" / "backup").exists()
    assert list((folder / "model" / "logs" / "train").glob("events.*"))
    model = keras.models.load_model(folder / "model" / "checkpoint-003.keras", compile=False)
    assert type(model) is keras.Sequential
    assert model.count_params() > 0


@pytest.mark.parametrize("model", ["tiny", pytest.param("resnet50", marks=pytest.mark.long)])
def test_command_of_the_tutorial_runs(model: str, readme: Callable[..., str]) -> None:
    """With fewer and smaller images: all of them would take an hour on CPUs."""
    output = readme("--synthetic_data", model=model)
    assert output.count("images: 64 train, 32 validate, of 1000 classes") == 1
    assert "Epoch 3/3" in output
    assert output.count("val_loss") == 1  # --val_freq=3


def test_command_for_imagenet_runs(readme: Program) -> None:
    output = readme("--data_dir=/data/imagenet")
    assert "Epoch 2/2" in output


# Resuming


def test_run_that_is_restarted_resumes(
    program: Program,
    module: Callable[[str], ModuleType],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import keras

    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise RuntimeError("power cut")

    options = f"{TINY} --data_dir=small/tfrecords --train_num_samples=128 --val_num_samples=64"
    program(f"{options} --model_dir=undisturbed")

    main = module("train_imagenet_main")
    usual = main.callbacks
    with monkeypatch.context() as patch:
        patch.setattr(main, "callbacks", lambda args: [*usual(args), Fails()])
        with pytest.raises(RuntimeError, match="power cut"):
            program(f"{options} --model_dir=again")
    output = program(f"{options} --model_dir=again")
    assert "Epoch 1/2" not in output
    assert "Epoch 2/2" in output
    undisturbed, again = (
        keras.models.load_model(folder / name / "checkpoint-002.keras")
        for name in ("undisturbed", "again")
    )
    for ours, theirs in zip(again.get_weights(), undisturbed.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


# Options


def test_second_batch_is_profiled(program: Program, folder: Path) -> None:
    program(f"{TINY} --synthetic_data --train_num_samples=128 --profile_dir=profile")
    assert len(list((folder / "profile").rglob("*.xplane.pb"))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "one of the arguments --data_dir --synthetic_data is required"),
        ("--synthetic_data --batch_size=0", "--batch_size: '0' is not an integer of at least 1"),
        ("--synthetic_data --image_size=31", "'31' is not an integer of at least 32"),
        ("--synthetic_data --base_learning_rate=fast", "'fast' is not a number above 0"),
        ("--synthetic_data --model_arch=lenet", "--model_arch: invalid choice: 'lenet'"),
        ("--synthetic_data --strategy=pipelining", "--strategy: invalid choice: 'pipelining'"),
        ("--data_dir=nowhere", "--data_dir nowhere: neither TFRecords (train-00000-of-... and"),
        ("--data_dir=small/folders --num_classes=3", "--num_classes 3: there are 4 folders of"),
        (
            "--synthetic_data --drop_remainder --train_num_samples=100",
            "--drop_remainder leaves nothing to train with: there are 100 images, and --batch_size",
        ),
    ],
)
def test_bad_option_is_explained(
    options: str, message: str, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        program(options)
    assert end.value.code not in (None, 0)
    assert message in f"{end.value.code} {capsys.readouterr().err}"


# Finding and reading


def loaded(module: Callable[[str], ModuleType], data_dir: Path, **options: Any) -> list[Any]:
    """All samples of a dataset, and the number of batches."""
    imagenet = module("imagenet")
    images = imagenet.find_images(data_dir)
    defaults = {"num_samples": 64, "batch_size": 24, "image_size": 32, "normalize": lambda x: x}
    return list(imagenet.load_dataset(images, **(defaults | options)).as_numpy_iterator())


def colour_of(image: np.ndarray) -> int:
    """The class of an image of the small dataset: the one closest to its pixels."""
    red, green, blue = (image[..., channel].astype(float) for channel in range(3))
    excess = [red - np.maximum(green, blue), green - np.maximum(red, blue), blue - red]
    yellow = np.minimum(red, green) - blue
    return int(np.argmax([np.mean(np.maximum(one, 0)) for one in [*excess, yellow]]))


@pytest.mark.parametrize("layout", ["tfrecords", "folders"])
def test_labels_belong_to_their_images(
    layout: str, module: Callable[[str], ModuleType], folder: Path
) -> None:
    batches = loaded(module, folder / "small" / layout, dataset_type="validation")
    images, labels = (np.concatenate(column) for column in zip(*batches, strict=True))
    assert sorted(set(labels)) == [0, 1, 2, 3]  # even in a subset of the data
    right = [colour_of(image) == label for image, label in zip(images, labels, strict=True)]
    assert np.mean(right) > 0.9


@pytest.mark.parametrize(("drop_remainder", "sizes"), [(False, [24, 24, 16]), (True, [24, 24])])
def test_last_batch_can_be_left_out(
    drop_remainder: bool,
    sizes: list[int],
    module: Callable[[str], ModuleType],
    folder: Path,
) -> None:
    data_dir = folder / "small" / "tfrecords"
    batches = loaded(module, data_dir, dataset_type="train", drop_remainder=drop_remainder)
    assert [len(labels) for _, labels in batches] == sizes


def test_other_places_of_the_same_layouts_are_found(
    module: Callable[[str], ModuleType], folder: Path, tmp_path: Path
) -> None:
    for part in ("train", "validation"):
        (tmp_path / "records" / part).mkdir(parents=True)
        for file in (folder / "small" / "tfrecords").glob(f"{part}-*"):
            shutil.copy(file, tmp_path / "records" / part)
    shutil.copytree(folder / "small" / "folders", tmp_path / "files")
    (tmp_path / "files" / "val").rename(tmp_path / "files" / "validation")
    find_images = module("imagenet").find_images
    assert find_images(tmp_path / "records", 7).num_classes == 7
    for name, num_classes in (("records", 1000), ("files", 4)):
        images = find_images(tmp_path / name)
        assert images.num_classes == num_classes
        assert (images.count("train"), images.count("validation")) == (512, 128)


def test_file_of_records_that_is_cut_off_is_named(
    module: Callable[[str], ModuleType], folder: Path, tmp_path: Path
) -> None:
    whole = (folder / "small" / "tfrecords" / "train-00000-of-00004").read_bytes()
    (tmp_path / "train-00000-of-00001").write_bytes(whole[:-100])
    (tmp_path / "validation-00000-of-00001").write_bytes(whole)
    with pytest.raises(SystemExit, match="train-00000-of-00001: not a TFRecord file, or its"):
        module("imagenet").find_images(tmp_path)


def test_class_that_cannot_be_learned_is_named(
    module: Callable[[str], ModuleType], folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "small" / "folders", tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "train" / "n00000003")
    with pytest.raises(SystemExit, match="class n00000003 has images to validate with, but none"):
        module("imagenet").find_images(tmp_path)


def test_images_are_alike_on_any_number_of_ranks_and_others_in_each_epoch(
    module: Callable[[str], ModuleType], folder: Path
) -> None:
    import tensorflow as tf

    from tarantella.data.split import split

    imagenet = module("imagenet")
    for layout in ("tfrecords", "folders"):
        images = imagenet.find_images(folder / "small" / layout)

        def dataset(images: Any = images) -> tf.data.Dataset:
            size = {"num_samples": 40, "batch_size": 16, "image_size": 32}
            return imagenet.load_dataset(images, "train", normalize=lambda x: x, **size)

        whole = dataset()
        epochs = [[pixels for pixels, _ in whole.as_numpy_iterator()] for _ in range(2)]
        assert not np.array_equal(epochs[0][0], epochs[1][0])
        own = [split(dataset(), rank, 3).micro_batches for rank in range(3)]
        for epoch in epochs:
            of_ranks = zip(*(parts.as_numpy_iterator() for parts in own), strict=True)
            for batch, parts in zip(epoch, of_ranks, strict=True):
                pieces = [part.data[0][: part.count] for part in parts]
                np.testing.assert_array_equal(np.concatenate(pieces), batch)


# Preparing


def as_png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(("height", "width"), [(300, 400), (375, 256), (100, 120)])
def test_evaluation_sees_the_middle(
    height: int, width: int, module: Callable[[str], ModuleType]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    scale = 256 / min(height, width)
    size = round(width * scale), round(height * scale)
    resized = Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR)
    left, top = (size[0] - 224) // 2, (size[1] - 224) // 2
    expected = np.asarray(resized.crop((left, top, left + 224, top + 224)), float)
    seen = module("imagenet").for_evaluation(as_png(pixels), 224).numpy()
    assert seen.shape == (224, 224, 3)
    assert np.abs(seen - expected).max() < 1.5  # Pillow rounds twice


def test_training_sees_parts_of_usual_size_and_shape(module: Callable[[str], ModuleType]) -> None:
    """The colour of a pixel encodes its position, so the corners tell which part was cropped."""
    import tensorflow as tf

    height, width = 200, 250
    y, x = np.mgrid[:height, :width].astype(np.uint8)
    picture = as_png(np.stack([x, y, np.zeros_like(x)], axis=-1))
    areas, aspects, mirrored = [], [], []
    for place in range(200):
        seed = tf.constant([42, place], tf.int64)
        seen = module("imagenet").for_training(picture, 32, seed).numpy()
        assert seen.shape == (32, 32, 3)
        again = module("imagenet").for_training(picture, 32, seed).numpy()
        np.testing.assert_array_equal(seen, again)
        # From the centre of one pixel to that of another, far from the borders.
        step_x, step_y = (seen[16, 24] - seen[16, 8])[0] / 16, (seen[24, 16] - seen[8, 16])[1] / 16
        areas.append(32 * abs(step_x) * 32 * step_y / (height * width))
        aspects.append(abs(step_x) / step_y)
        mirrored.append(step_x < 0)
    assert 0.07 < min(areas) < 0.2
    assert 0.8 < max(areas) < 1.01
    assert 0.72 < min(aspects) < 0.8
    assert 1.25 < max(aspects) < 1.37
    assert 0.4 < np.mean(mirrored) < 0.6


def test_grey_images_and_other_formats_are_decoded(module: Callable[[str], ModuleType]) -> None:
    grey = np.full((40, 50), 100, np.uint8)
    seen = module("imagenet").for_evaluation(as_png(grey), 32).numpy()
    np.testing.assert_allclose(seen, 100, atol=1e-3)
    assert seen.shape == (32, 32, 3)


def test_pixels_are_normalized_as_the_architecture_needs(
    module: Callable[[str], ModuleType],
) -> None:
    architectures = module("architectures").ARCHITECTURES
    pixels = np.random.default_rng(0).uniform(0, 255, (8, 8, 3)).astype("float32")
    blue_green_red = pixels[..., ::-1] - np.array([103.939, 116.779, 123.68])
    for name, architecture in architectures.items():
        expected = blue_green_red if name.startswith("resnet") else pixels
        np.testing.assert_allclose(architecture.normalize(pixels.copy()), expected, atol=1e-4)


# Learning rates and models


@pytest.mark.parametrize("batch_size", [64, 256, 8192])
@pytest.mark.parametrize("kind", ["step", "cosine"])
def test_learning_rate_is_that_of_the_paper(
    kind: str, batch_size: int, module: Callable[[str], ModuleType]
) -> None:
    steps = 900
    rate = module("schedules").ScaledRate(0.1, batch_size, steps, kind)
    rate = type(rate).from_config(rate.get_config())
    peak = 0.1 * batch_size / 256
    for step in (0, 1, 25, 49, 50, 299, 300, 301, 599, 600, 799, 800, 899):
        epoch = 90 * step / steps
        if epoch < 5:
            start = min(0.1, peak)
            expected = start + (peak - start) * epoch / 5
        elif kind == "cosine":
            expected = peak * (1 + math.cos(math.pi * (epoch - 5) / 85)) / 2
        else:
            expected = peak * 0.1 ** sum(epoch >= decay for decay in (30, 60, 80))
        assert float(rate(step)) == pytest.approx(expected, rel=1e-5)


def test_architectures_are_those_of_keras_applications(module: Callable[[str], ModuleType]) -> None:
    import keras

    architectures = dict(module("architectures").ARCHITECTURES)
    del architectures["tiny"]
    for name, architecture in architectures.items():
        builder = architecture.build
        assert builder is getattr(keras.applications, builder.__name__)
        assert builder.__name__.lower() == name
    assert len(architectures) == 3 + 7


@pytest.mark.parametrize("name", ["resnet50", "efficientnetv2b0"])
def test_model_is_set_up_for_training(name: str, module: Callable[[str], ModuleType]) -> None:
    import keras

    architectures = module("architectures")
    model = architectures.build_model(architectures.ARCHITECTURES[name], 32, 10, True)
    assert model.output_shape == (None, 10)
    norms = [la for la in model.layers if isinstance(la, keras.layers.BatchNormalization)]
    assert all(layer.synchronized and layer.momentum == 0.9 for layer in norms)
    last_of_blocks = [layer for layer in norms if layer.name.endswith("_3_bn")]
    assert len(last_of_blocks) == (16 if name == "resnet50" else 0)
    assert not any(np.any(layer.gamma) for layer in last_of_blocks)
    decaying = {weight.name for weight in model.weights if weight.regularizer is not None}
    assert decaying == {"kernel"}
    kernels = [np.square(weight).sum() for weight in model.weights if weight.name == "kernel"]
    assert float(sum(model.losses)) == pytest.approx(0.5e-4 * sum(kernels), rel=1e-4)
