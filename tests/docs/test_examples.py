"""The examples run the way readers run them, and reach what they promise."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LENET5 = EXAMPLES / "lenet5.py"
PAGE = (EXAMPLES.parent / "docs" / "examples.md").read_text()
SHORT = "--number_epochs=1 --train_size=50 --val_size=10 --test_size=20"

Shell = Callable[..., Any]


def mnist_look_alike() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0).integers
    return {
        "x_train": draw(0, 256, (60, 28, 28), np.uint8),
        "y_train": draw(0, 10, 60, np.uint8),
        "x_test": draw(0, 256, (20, 28, 28), np.uint8),
        "y_test": draw(0, 10, 20, np.uint8),
    }


@pytest.fixture(scope="module")
def lenet5() -> ModuleType:
    """The example as a module, for tests that need no separate run."""
    spec = spec_from_file_location("lenet5", LENET5)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_idx(path: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    content = head + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def example(shell: Shell, tmp_path: Path) -> Shell:
    """Runs a command from the page about the examples, and returns its output."""
    (tmp_path / "examples").symlink_to(EXAMPLES)

    def run(command: str, **env: str) -> str:
        assert f"```bash\n{command}\n```" in PAGE
        finished = shell(command, **env)
        assert finished.status == 0, finished.output
        return str(finished.output)

    return run


def test_quick_start_trains_on_two_ranks(example: Shell) -> None:
    output = example("tarantella -n 2 --no-gpu -- examples/quickstart.py")
    [accuracy] = re.findall(r"test accuracy: ([\d.]+)%", output)
    assert float(accuracy) > 98


def test_quick_start_is_the_script_in_the_readme() -> None:
    readme = (EXAMPLES.parent / "README.md").read_text()
    first = re.search(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert first
    assert first[1] == (EXAMPLES / "quickstart.py").read_text()


def test_lenet5_reads_digits_on_two_ranks(example: Shell, tmp_path: Path) -> None:
    output = example(
        "tarantella -n 2 --no-gpu -- examples/lenet5.py", KERAS_HOME=str(tmp_path / "keras")
    )
    assert output.count("data: scikit-learn's digits") == 1
    accuracies = re.findall(r"test accuracy: ([\d.]+)%", output)
    assert len(accuracies) == 1
    assert float(accuracies[0]) > 95


def test_lenet5_runs_serially_on_the_mnist_that_keras_has(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    np.savez(tmp_path / "datasets" / "mnist.npz", **mnist_look_alike())
    finished = shell(f"python {LENET5} {SHORT}", KERAS_HOME=str(tmp_path))
    assert finished.status == 0, finished.output
    assert "data: MNIST; images: 50 train, 10 validate, 20 test" in finished.output
    assert "test accuracy" in finished.output


def test_lenet5_reads_the_idx_files_of_mnist(lenet5: ModuleType, tmp_path: Path) -> None:
    arrays = mnist_look_alike()
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", arrays["x_train"])
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", arrays["y_train"])
    write_idx(tmp_path / "t10k-images-idx3-ubyte", arrays["x_test"])
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", arrays["y_test"])
    (x_train, y_train), (x_test, y_test) = lenet5.load_mnist(tmp_path)
    np.testing.assert_allclose(x_train[..., 0] * 255, arrays["x_train"], atol=1e-4)
    np.testing.assert_allclose(x_test[..., 0] * 255, arrays["x_test"], atol=1e-4)
    np.testing.assert_array_equal(y_train, arrays["y_train"])
    np.testing.assert_array_equal(y_test, arrays["y_test"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--batch_size=0", "--batch_size: '0' is not an integer of at least 1"),
        ("--number_epochs=1.5", "--number_epochs: '1.5' is not an integer of at least 1"),
        ("--learning_rate=fast", "--learning_rate: 'fast' is not a number above 0"),
        ("--train_size=1800", "--train_size 1800 and --val_size 149 do not fit"),
        ("--val_size=1497", "--train_size 0 and --val_size 1497 do not fit"),
        ("--test_size=301", "--test_size 301: the digits data has 300 images to test with"),
        ("--data_dir=nowhere", "--data_dir nowhere: it has neither mnist.npz nor"),
        ("--batchsize=3", "unrecognized arguments: --batchsize=3"),
    ],
)
def test_lenet5_explains_a_bad_option(
    option: str,
    message: str,
    lenet5: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["lenet5.py", option])
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        lenet5.main()
    assert end.value.code not in (None, 0)
    assert message in f"{end.value.code} {capsys.readouterr().err}"


def test_loop_of_its_own_learns(example: Shell) -> None:
    output = example("tarantella -n 2 --no-gpu -- examples/custom_training_loop.py --epochs=5")
    [accuracy] = re.findall(r"test accuracy: ([\d.]+)%", output)
    assert float(accuracy) > 85


def test_callback_on_the_master_rank_reports(example: Shell, tmp_path: Path) -> None:
    example("tarantella -n 2 --no-gpu -- examples/custom_callback.py --report=confusions.csv")
    head, *rows = (tmp_path / "confusions.csv").read_text().splitlines()
    assert head == "epoch,loss,accuracy,digit,taken for,times"
    assert [int(row.split(",")[0]) for row in rows] == list(range(1, 11))
    assert float(rows[-1].split(",")[2]) > 0.85


def test_training_resumes_after_a_failure_as_if_there_were_none(
    example: Shell, shell: Shell
) -> None:
    failed = example(
        "tarantella -n 2 --no-gpu --max-restarts 1 "
        "-- examples/resume_after_failure.py --fail_at_step=100"
    )
    assert "tarantella: rank 1" in failed
    assert "restart 1 of 1" in failed
    undisturbed = shell("tarantella -n 2 --no-gpu -- examples/resume_after_failure.py")
    assert undisturbed.status == 0, undisturbed.output
    result = re.compile(r"loss: [\d.]+, accuracy: ([\d.]+)%, weights: (\w+)")
    assert result.findall(failed) == result.findall(undisturbed.output)
    [(accuracy, _)] = result.findall(failed)
    assert float(accuracy) > 85


def test_a_saved_model_is_taught_something_else(example: Shell) -> None:
    output = example("tarantella -n 2 --no-gpu -- examples/transfer_learning.py --samples=100")
    base, alone, all_of_it = map(float, re.findall(r"accuracy ([\d.]+)%", output))
    assert base > 90
    assert all_of_it > alone > 50
