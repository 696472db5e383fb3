"""What a training step is made of: no call of Python, and no way through host memory for a sum."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import device
import keras
import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from test_gpu_training import CASES, EXECUTIONS, batches

import tarantella as tnt
from tarantella.graph import engine

ON_RANKS = pytest.mark.ranks(2, timeout=device.LIMIT)

PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
SENDS, RECEIVES = ("_Send", "_HostSend"), ("_Recv", "_HostRecv")
SUMS = ("CollectiveReduceV2", "CollectiveGatherV2")
ENDS = ("XlaLaunch", "_XlaRun", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")


class StepGraphs:
    """The graphs of the training steps that were run, as TensorFlow has divided them by device."""

    def __init__(self, run: Callable[[], Any]) -> None:
        # tf.summary.trace_on is the public way to this, and writes it to a file.
        context.context().enable_run_metadata()
        try:
            run()
            graphs = context.context().export_run_metadata().function_graphs
        finally:
            context.context().disable_run_metadata()
        functions = [list(graph.partition_graphs) for graph in graphs]
        steps = [parts for parts in functions if any(map(_takes_data, parts))]
        self.partitions = [graph for parts in steps for graph in parts]
        assert self.partitions

    def nodes(self) -> Iterator[Any]:
        """All operations, also those of functions that a graph calls."""
        for graph in self.partitions:
            yield from graph.node
            for function in graph.library.function:
                yield from function.node_def

    def count(self) -> Counter[str]:
        return Counter(node.op for node in self.nodes())


def _takes_data(graph: Any) -> bool:
    return any(node.op.startswith("IteratorGetNext") for node in graph.node)


def trained(case: str, execution: str, **fit: Any) -> Callable[[], Any]:
    make_model, compiled, data = CASES[case]
    keras.utils.set_random_seed(1)
    model = tnt.Model(make_model())
    model.compile(**{**compiled, **EXECUTIONS[execution]})
    return lambda: model.fit(batches(*data()), **{"verbose": 0, **fit})


def ways_to_the_host(partition: Any) -> list[str]:
    """The sums of a partition that are sent to the CPU, or what is computed of them on the GPU.

    What XLA has compiled updates variables, and hands on nothing of a sum.
    """
    users: dict[str, list[Any]] = defaultdict(list)
    for node in partition.node:
        for name in (name for name in node.input if not name.startswith("^")):
            users[name.partition(":")[0]].append(node)
    found = []
    for start in (node for node in partition.node if node.op == "CollectiveReduceV2"):
        waiting, seen = [start], {start.name}
        while waiting:
            node = waiting.pop()
            if node.op in SENDS and b"CPU" in node.attr["recv_device"].s:
                found.append(f"{start.name} -> {node.name}")
            following = [] if node.op in ENDS else users[node.name]
            waiting += [user for user in following if user.name not in seen]
            seen.update(user.name for user in following)
    return found


def inputs_from_the_host(partition: Any) -> list[str]:
    """The sums of a partition whose values come from the CPU."""
    producers = {node.name: node for node in partition.node}
    inputs = {
        node.name: producers[node.input[0].partition(":")[0]]
        for node in partition.node
        if node.op in SUMS
    }
    return [
        name
        for name, producer in inputs.items()
        if producer.op in RECEIVES and b"CPU" in producer.attr["send_device"].s
    ]


# How many sums and gathers a step takes, if nobody reads its logs. Dense gradients share a sum, and
# so does the state of layers. Sparse gradients are gathered; their numbers are summed with the
# dense ones.
EXPECTED = {
    "dense": (1, 0),
    "statistics": (3, 0),  # forward and backward
    "state": (2, 0),
    "sparse": (1, 1),
    "masked": (2, 1),  # one is the divisor of the loss
}
# Compiled, as by default on a GPU, the state of layers is summed together with the gradients.
EXPECTED_WITH_XLA = {**EXPECTED, "state": (1, 0)}


@ON_RANKS
@pytest.mark.parametrize("execution", ["xla", "graph", "several_steps"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_takes_few_sums_and_calls_no_python(case: str, execution: str) -> None:
    graphs = StepGraphs(trained(case, execution))
    count = graphs.count()
    assert {name: count[name] for name in PYTHON} == dict.fromkeys(PYTHON, 0)
    expected = EXPECTED if execution == "graph" else EXPECTED_WITH_XLA
    assert tuple(count[name] for name in SUMS) == expected[case]
    sums = [node for node in graphs.nodes() if node.op in SUMS]
    assert all(device.DEVICE.upper() in node.device for node in sums)
    assert {node.attr["communication_hint"].s.decode() for node in sums} == {device.HINT}


@ON_RANKS
@pytest.mark.parametrize("case", CASES)
def test_no_sum_goes_through_the_host(case: str) -> None:
    graphs = StepGraphs(trained(case, "graph"))
    for partition in graphs.partitions:
        assert inputs_from_the_host(partition) == []
        if EXPECTED[case][1] == 0:  # the sizes of sparse gradients are shapes, which the CPU needs
            assert ways_to_the_host(partition) == []


@ON_RANKS
def test_logs_that_are_read_take_no_python_either() -> None:
    read: list[Any] = []
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: read.append(logs))
    count = StepGraphs(trained("dense", "graph", callbacks=[clock])).count()
    assert {name: count[name] for name in PYTHON} == dict.fromkeys(PYTHON, 0)
    assert count["CollectiveReduceV2"] > EXPECTED["dense"][0]
    assert len(read) == 4


@ON_RANKS
def test_sums_in_host_memory_are_calls_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the count of these calls can tell."""
    engine.device_hint()
    monkeypatch.setattr(engine, "_hint", "")
    count = StepGraphs(trained("dense", "graph")).count()
    assert sum(count[name] for name in PYTHON) > 0
    assert sum(count[name] for name in SUMS) == 0


def test_ways_to_the_host_are_found() -> None:
    graph = tf.compat.v1.GraphDef()
    for name, op, *inputs in (
        ("gradients", "_Recv"),
        ("sum", "CollectiveReduceV2", "gradients", "^other"),
        ("half", "Mul", "sum:0", "sum"),
        ("read", "_Send", "half"),
        ("update", "AssignSubVariableOp", "half"),
        ("other", "CollectiveReduceV2", "half"),
        ("done", "_Send", "done_token", "^sum"),
        ("done_token", "Const"),
    ):
        node = graph.node.add(name=name, op=op, input=inputs)
        for attribute in ("send_device", "recv_device"):
            node.attr[attribute].s = b"/job:worker/device:CPU:0"
    assert ways_to_the_host(graph) == ["sum -> read"]
    assert inputs_from_the_host(graph) == ["sum"]
