"""Distributed training for Keras on TensorFlow, in two more lines."""

from tarantella.runtime import world

world.start()

from tarantella.runtime.world import get_master_rank, get_rank, get_size, is_master_rank  # noqa: E402

__all__ = ["get_master_rank", "get_rank", "get_size", "is_master_rank"]
