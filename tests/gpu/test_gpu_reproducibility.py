"""With `enable_op_determinism`, two runs on GPUs agree to the bit.

That resumed runs do so is tested in tests/ranks, which `make test-gpu` runs on GPUs as well.
"""

from __future__ import annotations

from pathlib import Path

import device
import pytest
from test_reproducibility import SCRIPT

START = """
import tarantella
import tensorflow as tf
tf.config.experimental.enable_op_determinism()
"""


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_two_runs_give_bit_identical_weights(ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(START + SCRIPT)
    for name in ("first", "second"):
        result = device.run(script, str(tmp_path / name), ranks=ranks)
        assert result.returncode == 0, result.stderr
    first = (tmp_path / "first").read_bytes()
    assert len(first) > 1000
    assert first == (tmp_path / "second").read_bytes()
