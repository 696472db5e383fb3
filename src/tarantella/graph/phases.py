"""The phases of a step in a timeline."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tarantella.graph.compiling import is_compiling
from tarantella.graph.host_call import call_when_computed
from tarantella.runtime.timeline import timeline


def end_phase(name: str, results: Any) -> None:
    """Records when the results of a phase are ready. Without a timeline, the graph stays as it is.

    Args:
        name: What the phase is called.
        results: A structure of tensors.
    """
    recorded = timeline()
    if recorded is None or is_compiling():  # XLA would have to call Python
        return
    if tf.executing_eagerly():
        recorded.phase(name)
        return
    leaves = tf.nest.flatten(results, expand_composites=True)
    graph = tf.compat.v1.get_default_graph()
    before = getattr(graph, "_tnt_phase", [])  # phases end one after the other
    with tf.control_dependencies(before):
        graph._tnt_phase = call_when_computed(
            lambda: recorded.phase(name), [leaf for leaf in leaves if tf.is_tensor(leaf)]
        )
