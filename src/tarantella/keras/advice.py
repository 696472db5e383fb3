"""What users are told about a model while it trains."""

from __future__ import annotations

from typing import Any

from tarantella.runtime import world
from tarantella.runtime.log import LOGGER

# Statistics of fewer samples are poor.
ENOUGH_SAMPLES = 16


class Advice:
    """What users are told about a model, once each.

    Which layers use the statistics of a micro-batch is known when a step is traced, and how large
    the micro-batches are when data arrive; either can come first.

    Attributes:
        xla_was_asked_for: Whether the user wants XLA, and not only Keras, by default on a GPU.
    """

    def __init__(self) -> None:
        self.xla_was_asked_for = False
        self._local_layers: list[str] = []
        self._samples = ENOUGH_SAMPLES
        self._told: set[str] = set()

    def layers_used_own_statistics(self, names: list[str]) -> None:
        """These layers have used the statistics of this rank's micro-batch."""
        self._local_layers = names
        self._tell_of_small_micro_batches()

    def ranks_have(self, samples: int) -> None:
        """Each rank has this many samples of a batch, or more."""
        self._samples = samples
        self._tell_of_small_micro_batches()

    def _tell_of_small_micro_batches(self) -> None:
        if self._local_layers and self._samples < ENOUGH_SAMPLES:
            self._tell_once(
                "Each rank has %d samples of a batch, and batch normalization (%s) uses the "
                "statistics of those alone, which are poor for fewer than %d. Use a global "
                "batch of %d samples or more, or make the layers with `synchronized=True`: they "
                "then use the statistics of the global batch.",
                self._samples,
                _some(self._local_layers),
                ENOUGH_SAMPLES,
                ENOUGH_SAMPLES * world.get_size(),
            )

    def not_compiled(self, names: list[str]) -> None:
        """The model is not compiled with XLA, because these layers communicate."""
        tell = self._tell_once if self.xla_was_asked_for else LOGGER.debug
        tell(
            "The model is not compiled with XLA for training, whatever `jit_compile` says: with "
            "`synchronized=True` batch normalization (%s) communicates, which XLA cannot compile.",
            _some(names),
        )

    def number_not_understood(self, name: str) -> None:
        """A number of the user's code is treated as a mean: its graph does not show more."""
        self._tell_once(
            "The number '%s', which your loss, `add_loss` or step computes, is treated as a mean "
            "over the samples of a batch: its graph does not show how it is computed from them. "
            "If it is not a mean, results differ from those of one process; return one value for "
            "each sample instead.",
            name,
        )

    def number_of_eager_step(self) -> None:
        """Numbers are treated as means: without a graph nothing shows more."""
        self._tell_once(
            "With `run_eagerly=True`, a custom loss that is a single number is treated as a "
            "mean over the samples of a batch. If it is not a mean, results differ from those of "
            "one process; return one value for each sample instead."
        )

    def _tell_once(self, message: str, *args: Any) -> None:
        if message not in self._told:
            self._told.add(message)
            LOGGER.warning(message, *args)


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:2])
    return shown if len(names) <= 2 else f"{shown} and {len(names) - 2} more"
