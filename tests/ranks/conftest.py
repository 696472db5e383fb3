from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import tensorflow as tf
from fixtures import float64, no_time_to_fail, unseeded  # noqa: F401

from tarantella.comm import waiting
from tarantella.runtime import world

# Tests of what ranks do while they wait, or of what ends them then: they wait as they do with a
# core for each rank.
ABOUT_WAITING = (
    "test_channels",
    "test_collectives",
    "test_command",
    "test_failures",
    "test_order_of_calls",
    "test_run_function",
    "test_stalls",
    "test_threads",
)
# Tests of input pipelines and of the order of operations, which TensorFlow's optimization changes.
ABOUT_GRAPHS = (
    "test_data",
    "test_gradient_types",
    "test_kinds_of_data",
    "test_micro_batches",
    "test_on_device",
    "test_one_sum_steps",
    "test_random_models",
    "test_resumption",
    "test_sparse_gradients",
    "test_steps",
)


@pytest.fixture(autouse=True, scope="module")
def shared_cores(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks leave the core to other tests while they wait, as they do where ranks share cores."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__ not in ABOUT_WAITING:
            waiting.ranks_share_cores.cache_clear()
            patch.setattr(world, "_cores_of", lambda _: 1)
            patch.setenv("TEST_SHARED_CORES", "true")  # for runs that a test starts
        yield
    waiting.ranks_share_cores.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def unoptimized_graphs(request: pytest.FixtureRequest) -> Iterator[None]:
    """On two ranks, most tests leave graphs as they are: optimizing takes longer than running.

    On any other number of ranks, and wherever TensorFlow's collectives sum, it optimizes them as
    usual.
    """
    leaves_out = (
        world.get_size() == 2
        and request.module.__name__ not in ABOUT_GRAPHS
        and not {"TEST_DEVICE", "TNT_GPU_SUMS"} & os.environ.keys()
    )
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": leaves_out})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
