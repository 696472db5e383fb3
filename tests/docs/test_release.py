"""The release: the archives build, install and run on their own, and their types are right."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import tarantella

REPOSITORY = Path(__file__).parents[2]
VERSION = tarantella.__version__
NOT_OURS = shutil.ignore_patterns(".*", "_build", "build", "dist", "*.egg-info", "__pycache__")

Shell = Callable[..., Any]

# Uses every public name once.
USER = '''
from __future__ import annotations

import keras  # type: ignore[import-untyped]
import numpy as np
import tensorflow as tf  # type: ignore[import-untyped]

import tarantella as tnt


def train(x: np.ndarray, y: np.ndarray) -> float:
    """A user's function."""
    tnt.init(1)
    model: tnt.Model = tnt.Model(
        keras.Sequential([keras.layers.Dense(1)]), parallel_strategy=tnt.ParallelStrategy.DATA
    )
    model.compile(optimizer="sgd", loss="mse")
    callback = tnt.keras.callbacks.Callback(keras.callbacks.History(), run_on_all_ranks=False)
    model.fit(x, y, batch_size=8, callbacks=[callback])
    model.summary()
    scores: list[float] = model.evaluate(x, y)
    prediction: np.ndarray = model.predict(x, tnt_distribute_dataset=False)
    model.save("model.keras", tnt_save_all_devices=False)
    model.save_weights("model.weights.h5")
    model.load_weights("model.weights.h5")
    again: tnt.Model = tnt.models.load_model("model.keras")
    text: str = again.to_yaml()
    tnt.models.model_from_yaml(text).set_weights(model.get_weights())
    optimizer = tnt.keras.optimizers.Optimizer(keras.optimizers.Adam())
    print(tnt.optimizers.Optimizer(optimizer), tnt.callbacks.Callback(callback), model.model)
    batches = tnt.distribute_dataset(tf.data.Dataset.range(4).batch(2))
    for batch in batches:
        print(batch, batches.share, optimizer)
    tnt.barrier()
    ranks: list[int] = tnt.allgather(tnt.get_rank())
    first: int = tnt.broadcast(ranks[0], root=tnt.get_master_rank())
    if tnt.is_master_rank():
        print(first, scores, prediction, tnt.get_size())
        tnt.run(train, (x, y), ranks=2, hosts=["node1"], all_results=True, no_gpu=True)
    total: float = tnt.allreduce(1.0, op="mean")
    return total


small: tnt.Model = tnt.Sequential([keras.layers.Dense(1)])
'''


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the source archive; the former is built from the latter."""
    folder = tmp_path_factory.mktemp("release")
    shutil.copytree(REPOSITORY, folder / "source", ignore=NOT_OURS)
    built = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist"],
        cwd=folder / "source",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "dist"


def test_the_source_archive_has_what_is_needed_to_build_and_to_read(archives: Path) -> None:
    with tarfile.open(archives / f"tarantella-{VERSION}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "src/tarantella/py.typed"} <= names


def test_the_wheel_has_the_package_and_nothing_else(archives: Path) -> None:
    with zipfile.ZipFile(archives / f"tarantella-{VERSION}-py3-none-any.whl") as archive:
        names = archive.namelist()
    ours = {
        str(path.relative_to(REPOSITORY / "src"))
        for path in (REPOSITORY / "src" / "tarantella").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert {name for name in names if ".dist-info/" not in name} == ours


def test_the_wheel_runs_in_an_environment_of_its_own(
    archives: Path, shell: Shell, tmp_path: Path
) -> None:
    """Its dependencies are not downloaded again, but found where the tests have them."""
    script = tmp_path / "script.py"
    script.write_text("import tarantella as tnt\nprint(tnt.get_size(), tnt.__file__)\n")
    wheel = archives / f"tarantella-{VERSION}-py3-none-any.whl"
    made = shell(f"{sys.executable} -m venv env && env/bin/python -m pip install --no-deps {wheel}")
    assert made.status == 0, made.output

    # An installation from a checkout is not found this way: that takes files which Python looks for
    # in its own folders only.
    where = {
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "PATH": f"{tmp_path}/env/bin:{Path(sys.executable).parent}:/usr/bin:/bin",
        "MPI4PY_LIBMPI": f"{sys.prefix}/lib/libmpi.so.12",
    }
    assert shell("tarantella --version", **where).output == f"tarantella {VERSION}\n"
    ran = shell("tarantella -n 2 --no-gpu -- script.py", **where)
    assert ran.status == 0, ran.output
    assert f"2 {tmp_path}/env/" in ran.output


def test_types_of_a_users_script(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    checked = shell("mypy --strict user.py")
    assert checked.status == 0, checked.output
    (tmp_path / "user.py").write_text(USER.replace("tnt.get_size()", "tnt.get_sice()"))
    mistyped = shell("mypy --strict user.py")
    assert 'maybe "get_size"?' in mistyped.output


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["version"] == VERSION
    assert citation["license"] == "Apache-2.0"
