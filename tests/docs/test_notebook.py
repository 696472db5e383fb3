"""The example notebook runs, from its first cell to its last, and shows what it says."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def outputs(notebook: Any) -> list[Any]:
    return [each for cell in notebook.cells for each in cell.get("outputs", [])]


def pictures(notebook: Any) -> list[str]:
    return [
        each.data["image/png"] for each in outputs(notebook) if "image/png" in each.get("data", {})
    ]


def text(notebook: Any) -> str:
    return "".join(each.get("text", "") for each in outputs(notebook))


# What a user of notebooks may do beyond it. AutoGraph needs the source of `small`.
MORE = """
import tensorflow as tf

@keras.saving.register_keras_serializable()
class Twice(keras.layers.Layer):
    def call(self, x):
        return 2 * x

given = keras.Sequential([keras.Input((4,)), Twice(), keras.layers.Dense(1)])

@tf.function
def small(n):
    while n > 5:
        n -= 1
    return n

def more():
    model = tnt.Model(given)
    model.compile("sgd", "mse")
    history = model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=4, epochs=2, verbose=0)
    return model, history, small(tf.constant(9))

model, history, number = tnt.run(more, ranks=1, no_gpu=True)
print("more:", type(model) is keras.Sequential, type(model.layers[0]) is Twice, int(number),
      len(history.history["loss"]), int(model.optimizer.iterations), history.model.compiled)
"""


@pytest.fixture(scope="module")
def kept() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, reader_environment: dict[str, str]) -> Any:
    """The notebook after it has run, with one more cell."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(MORE))
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - reader_environment.keys():
            patch.delenv(name)
        client = NotebookClient(
            notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute()
    return notebook


def test_two_ranks_train_as_one_process_does(notebook: Any, kept: Any) -> None:
    losses = [float(each) for each in re.findall(r"loss: ([\d.]+)", text(notebook))]
    assert len(losses) == 12
    assert losses[:6] == pytest.approx(losses[6:], abs=2e-3)
    assert len(pictures(notebook)) == len(pictures(kept))
    assert "[0, 10, 20]" in str(outputs(notebook))


def test_failed_rank_shows_the_line_of_the_cell(notebook: Any) -> None:
    [line] = re.findall(r"rank 1 on host .*:\n\nTraceback .*\n.*\n(.*)", text(notebook))
    assert line.strip() == 'raise ValueError("this rank has no luck")'


def test_models_go_to_ranks_and_come_back_as_plain_keras_models(notebook: Any) -> None:
    assert "more: True True 5 2 4 True\n" in text(notebook)


def test_kept_outputs_show_the_notebook_without_running_it(kept: Any) -> None:
    assert [cell.execution_count for cell in kept.cells if cell.cell_type == "code"] == [
        *range(1, 10)
    ]
    assert len(pictures(kept)) == 4
    assert not any(each.output_type == "error" for each in outputs(kept))
    assert "25/25" in text(kept)
    assert "absl" not in text(kept)
    assert float(re.findall(r"largest difference: (\S+)", text(kept))[0]) < 1e-5
