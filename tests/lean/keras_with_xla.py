"""Makes Keras compile with XLA by default on the CPU, as it does where it finds a GPU.

`tests/gpu/run.py --device cpu` wants it: the steps of its tests are then those that GPUs take.
"""

from __future__ import annotations

from typing import Any

from changed_modules import change


def _compile_where_possible(trainer: Any) -> None:
    trainer.Trainer._resolve_auto_jit_compile = trainer.model_supports_jit


def install() -> None:
    """To be called before Keras is imported."""
    change("keras.src.trainers.trainer", _compile_where_possible)
