"""The example notebook runs, from its first cell to its last, and shows what it says."""

from __future__ import annotations

import os
import re
import shutil
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


@pytest.fixture(scope="module")
def kept() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_notebook_runs_and_two_ranks_train_as_one_process_does(
    kept: Any, tmp_path: Path, reader_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in os.environ.keys() - reader_environment.keys():
        monkeypatch.delenv(name)
    shutil.copy(NOTEBOOK, tmp_path)
    notebook = nbformat.read(tmp_path / NOTEBOOK.name, as_version=4)
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    losses = [round(float(each), 3) for each in re.findall(r"loss: ([\d.]+)", text(notebook))]
    assert len(losses) == 12
    assert losses[:6] == pytest.approx(losses[6:], abs=2e-3)
    assert len(pictures(notebook)) == len(pictures(kept))
    assert "[0, 10, 20]" in str(outputs(notebook))
    [rank_traceback] = re.findall(r"rank 1 on host .*:\n\nTraceback .*\n.*\n(.*)", text(notebook))
    assert rank_traceback.strip() == 'raise ValueError("this rank has no luck")'


def test_kept_outputs_show_the_notebook_without_running_it(kept: Any) -> None:
    assert [cell.execution_count for cell in kept.cells if cell.cell_type == "code"] == [
        *range(1, 10)
    ]
    assert len(pictures(kept)) == 4
    assert not any(each.output_type == "error" for each in outputs(kept))
    assert "25/25" in text(kept)
    assert "absl" not in text(kept)
    assert float(re.findall(r"largest difference: (\S+)", text(kept))[0]) < 1e-5
