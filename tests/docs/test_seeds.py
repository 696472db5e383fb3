"""Code from the documentation of earlier versions of Tarantella runs unchanged.

Where it does not, docs/migration.md says what has changed, and a test confirms it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testbed import Testbed

Shell = Callable[..., Any]

# Stands for a model that takes long to train: prints the settings of the run on the master rank.
MODEL = """
import os, sys
import tarantella as tnt
if tnt.is_master_rank():
    print("ranks:", tnt.get_size(), "arguments:", *sys.argv[1:], flush=True)
    print("variables:", os.environ.get("DATASET"), os.environ.get("XLA_FLAGS"), flush=True)
"""

# On one machine without GPUs: the command line, and the number of ranks.
ON_ONE_HOST = {
    "tarantella -- model.py": 1,
    "tarantella --no-gpu -- model.py": 1,
    "tarantella --no-gpu -- model.py --batch_size=64 --learning_rate=0.01": 1,
    "tarantella -- model.py --batch_size=64 --learning_rate=0.01": 1,
    "tarantella -n 4 -- model.py --batch_size=64": 4,
    "tarantella -n 2 -- model.py --batch_size=64": 2,
    "tarantella -- path/to/my/model.py": 1,
    "TNT_TENSORBOARD_ON_ALL_DEVICES=true tarantella -- model.py": 1,
    'tarantella -x XLA_FLAGS="--xla_gpu_cuda_data_dir=${CONDA_ENV_PATH}/lib" -- model.py': 1,
}
ON_TWO_HOSTS = {
    "tarantella --hostfile hostfile -- model.py": 2,
    "tarantella --hostfile hostfile --n-per-node=4 --no-gpu -- model.py --batch_size=64": 8,
    "tarantella --hostfile hostfile --n-per-node 2 --no-gpu -- model.py --batch_size=64": 4,
    "tarantella --hostfile hostfile -n 2 --no-gpu -- model.py": 4,
    "tarantella --n-per-node=2 --hostfile hostfile -- model.py": 4,
    "tarantella --hostfile hostfile --log-level=INFO -- model.py": 2,
    "tarantella --hostfile hostfile --log-level INFO -- model.py": 2,
    "tarantella --hostfile hostfile --fusion-threshold=64 -- model.py": 2,
    "tarantella --hostfile hostfile -x DATASET=/scratch/data TF_CPP_MIN_LOG_LEVEL=1 -- model.py": 2,
}

# Each runs on two ranks, after PREPARED, in one folder.
PREPARED = """
import argparse
import numpy as np
import tensorflow as tf
from tensorflow import keras
import tarantella as tnt

args = argparse.Namespace(learning_rate=0.01, batch_size=8, number_epochs=1, micro_batch_size=4)
x_train, y_train = np.ones((32, 28, 28, 1), "float32"), np.arange(32) % 10

def lenet5_model_generator():
    return keras.Sequential([
        keras.Input((28, 28, 1)), keras.layers.Conv2D(4, 5, activation="relu"),
        keras.layers.Flatten(), keras.layers.Dense(10, "softmax")])

def a_model():
    model = tnt.Model(lenet5_model_generator())
    model.compile(optimizer = keras.optimizers.SGD(learning_rate=args.learning_rate),
                  loss = keras.losses.SparseCategoricalCrossentropy(),
                  metrics = [keras.metrics.SparseCategoricalAccuracy()])
    return model

def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one.get_weights(), other.get_weights()))

train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
val_dataset = train_dataset.batch(args.batch_size)
"""
SNIPPETS = {
    "init": "tnt.init()\ntnt.init(4)\ntnt.init(devices_per_node=4)",
    "lenet5": """
        model = tnt.Model(lenet5_model_generator())
        model.compile(optimizer = keras.optimizers.SGD(learning_rate=args.learning_rate),
                      loss = keras.losses.SparseCategoricalCrossentropy(),
                      metrics = [keras.metrics.SparseCategoricalAccuracy()])
        shuffle_seed = 42
        train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
        train_dataset = train_dataset.shuffle(len(x_train), shuffle_seed)
        train_dataset = train_dataset.batch(args.batch_size)
        train_dataset = train_dataset.prefetch(tf.data.experimental.AUTOTUNE)
        model.fit(train_dataset,
                  epochs = args.number_epochs,
                  verbose = 1)
        model.evaluate(val_dataset, verbose = 1)
        """,
    "strategy": """
        model = tnt.Model(lenet5_model_generator(),
                          parallel_strategy = tnt.ParallelStrategy.DATA)
        """,
    "other strategies and stages": """
        model = tnt.Model(lenet5_model_generator(), num_pipeline_stages = 1,
                          parallel_strategy = tnt.ParallelStrategy.ALL)
        assert isinstance(model.model, keras.Sequential)
        assert not isinstance(model.model, tnt.Model)
        """,
    "callbacks and optimizers": """
        model = tnt.Model(lenet5_model_generator())
        optimizer = tnt.optimizers.Optimizer(keras.optimizers.SGD(args.learning_rate))
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy())
        history = tnt.callbacks.Callback(tf.keras.callbacks.History(), run_on_all_ranks=True)
        model.fit(val_dataset, callbacks=[history], verbose=0)
        """,
    "save and load": """
        model = a_model()
        model.fit(val_dataset, verbose=0)
        model.save('path/to/location')
        loaded = tnt.models.load_model('path/to/location')
        assert isinstance(loaded, tnt.Model) and same(loaded, model)
        loaded.compile(optimizer = keras.optimizers.SGD(learning_rate=args.learning_rate),
                       loss = keras.losses.SparseCategoricalCrossentropy(),
                       metrics = [keras.metrics.SparseCategoricalAccuracy()])
        loaded.fit(val_dataset, verbose=0)
        """,
    "save_model with a model": """
        model = a_model()
        tnt.models.save_model(model, 'path/to/another/location')
        tnt.models.save_model(lenet5_model_generator(), 'path/of/a/plain/model')
        """,
    "save_model without a model is refused": """
        try:
            tnt.models.save_model('path/to/location')
        except TypeError:
            pass
        else:
            raise AssertionError
        """,
    "config": """
        model = a_model()
        config = model.get_config()
        new_model = tnt.models.model_from_config(config)
        assert isinstance(tnt.Model.from_config(config), tnt.Model)
        """,
    "json and yaml": """
        model = a_model()
        tnt.models.model_from_json(model.to_json())
        tnt.models.model_from_yaml(model.to_yaml())
        """,
    "clone": """
        model = a_model()
        new_model = tnt.models.clone_model(model)
        """,
    "weights in memory": """
        model = a_model()
        config = model.get_config()
        weights = model.get_weights()
        new_model = tnt.models.model_from_config(config)
        new_model.set_weights(weights)
        assert same(new_model, model)
        """,
    "weights on disk": """
        model = a_model()
        model.save_weights('path/to/weights')
        other = a_model()
        other.load_weights('path/to/weights')
        assert same(other, model)
        """,
    "checkpoints, with a file and a metric that Keras 3 takes, and without options": """
        model = a_model()
        checkpoint_path = 'checkpoint.keras'
        model_checkpoint_callback = tf.keras.callbacks.ModelCheckpoint(
          filepath=checkpoint_path, monitor='val_sparse_categorical_accuracy', verbose=1,
          save_best_only=False, save_weights_only=False, mode='auto', save_freq='epoch')
        model.fit(train_dataset.batch(8),
                  validation_data = val_dataset,
                  epochs = 2,
                  callbacks = [model_checkpoint_callback])
        assert same(tnt.models.load_model(checkpoint_path), model)
        """,
    "checkpoints as they were are refused by Keras 3": """
        try:
            tf.keras.callbacks.ModelCheckpoint(filepath='path/to/checkpoint/location', options=None)
        except TypeError:
            pass
        else:
            raise AssertionError
        """,
    "all devices": """
        model = a_model()
        model.save('all.keras', tnt_save_all_devices = True)
        model.save_weights('all.weights.h5', tnt_save_all_devices = True)
        tnt.models.save_model(model, 'all_too.keras', tnt_save_all_devices = True)
        """,
    "callbacks on the master rank": """
        tnt_model = a_model()
        history_callback = tf.keras.callbacks.History()
        tnt_model.fit(train_dataset.batch(8),
                      callbacks = [history_callback] if tnt.is_master_rank() else [])
        """,
    "a batch size for each rank": """
        tnt_model = a_model()
        micro_batch_size = args.micro_batch_size
        batch_size = tnt.get_size() * micro_batch_size
        batches = train_dataset.batch(batch_size)
        tnt_model.fit(batches)
        """,
    "a micro-batch size": """
        tnt_model = a_model()
        micro_batch_size = args.micro_batch_size
        tnt_model.fit(train_dataset,
                      tnt_micro_batch_size = micro_batch_size)
        tnt_model.evaluate(train_dataset, tnt_micro_batch_size = micro_batch_size)
        samples = train_dataset.map(lambda x, y: x)
        predicted = tnt_model.predict(samples, tnt_micro_batch_size = micro_batch_size)
        assert predicted.shape == (32, 10)
        """,
    "own shards": """
        model = a_model()
        own = train_dataset.shard(tnt.get_size(), tnt.get_rank()).batch(4)
        model.fit(own, tnt_distribute_dataset=False,
                  validation_data=own, tnt_distribute_validation_dataset=False)
        model.evaluate(own, tnt_distribute_dataset=False)
        assert model.predict(own, tnt_distribute_dataset=False).shape == (32, 10)
        """,
    "a print of the master rank": """
        if tnt.is_master_rank():
          print("Printing from the master rank")
        assert 0 <= tnt.get_rank() < tnt.get_size() and tnt.get_master_rank() == 0
        """,
    "seeds": "tf.random.set_seed(42)",
}

RUN_ALL = """
import json, sys, textwrap, traceback

prepared, snippets = json.load(open(sys.argv[1]))
names = {}
exec(prepared, names)
for name, code in snippets.items():
    try:
        exec(textwrap.dedent(code), dict(names))
        print("ran:", name, flush=True)
    except Exception:
        traceback.print_exc()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "path" / "to" / "my").mkdir(parents=True)
    for path in ("model.py", "path/to/my/model.py"):
        (tmp_path / path).write_text(MODEL)
    return tmp_path


def check(command: str, ranks: int, status: int, output: str) -> None:
    arguments = command.rpartition(".py")[2]
    assert status == 0, output
    assert f"ranks: {ranks} arguments:{arguments}\n" in output
    assert ("DATASET" in command) == ("variables: /scratch/data" in output)
    assert ("XLA_FLAGS" in command) == ("--xla_gpu_cuda_data_dir=" in output)
    warned = re.search(r"tarantella WARNING: .*GPU", output) is not None
    assert warned == ("--no-gpu" not in command)


@pytest.mark.parametrize("command", ON_ONE_HOST)
def test_command_on_one_host(command: str, shell: Shell, folder: Path) -> None:
    finished = shell(command, cwd=folder)
    check(command, ON_ONE_HOST[command], finished.status, finished.output)


@pytest.mark.parametrize("command", ON_TWO_HOSTS)
def test_command_on_two_hosts(command: str, shell: Shell, folder: Path, hosts: Testbed) -> None:
    (folder / "hostfile").write_text("node1\nnode2\n")
    enter = hosts.nodes[0].command("env", f"--chdir={folder}", "bash", "-c", command)
    finished = shell(shlex.join(enter), cwd=folder)
    check(command, ON_TWO_HOSTS[command], finished.status, finished.output)


def test_command_to_clean_up(shell: Shell, folder: Path, hosts: Testbed) -> None:
    (folder / "hostfile").write_text("node1\nnode2\n")
    for command in (
        "tarantella --hostfile hostfile --cleanup -- model.py",
        "tarantella --hostfile hostfile --cleanup --force -- model.py",
    ):
        enter = hosts.nodes[0].command("env", f"--chdir={folder}", "bash", "-c", command)
        assert shell(shlex.join(enter), cwd=folder).status == 0


def test_version(shell: Shell) -> None:
    finished = shell("tarantella --version")
    assert finished.status == 0
    assert re.fullmatch(r"tarantella \d+\.\d+\.\d+\n", finished.output)


@pytest.fixture(scope="module")
def snippets_on_two_ranks(
    printed_on_two_ranks: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """The output of all snippets on two ranks."""
    folder = tmp_path_factory.mktemp("snippets")
    (folder / "run_all.py").write_text(RUN_ALL)
    (folder / "snippets.json").write_text(json.dumps([PREPARED, SNIPPETS]))
    return printed_on_two_ranks(folder, "run_all.py", "snippets.json", timeout=300)


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippet(name: str, snippets_on_two_ranks: str) -> None:
    for rank in (0, 1):
        assert f"[rank {rank}] ran: {name}\n" in snippets_on_two_ranks, snippets_on_two_ranks
