"""Bad input: what a user is told, the same on all ranks, and the exit status of the command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 120  # seconds, for a machine that is busy with other things; a hang is what it catches
COMMAND = (sys.executable, "-m", "tarantella.cli")
TWO = (*COMMAND, "-n", "2", "--no-gpu", "--stall-timeout", "3")


def run(
    folder: Path, *command: str, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT,
    )


# The command line, the hostfile and the variables: nothing is started

ARGUMENTS = [
    ("", "no script"),
    ("-- missing.py", "no script missing.py"),
    ("-- folder", "folder is a directory"),
    ("--no-gup -- script.py", "--no-gup is not an option"),
    ("-n 0 -- script.py", "-n: '0'"),
    ("-n 2 --n-per-node 3 --hostfile hosts -- script.py", "--n-per-node"),
    ("--fusion-threshold much -- script.py", "--fusion-threshold: 'much'"),
    ("--hostfile missing -- script.py", "There is no hostfile missing"),
    ("--hostfile folder -- script.py", "folder cannot be read"),
    ("--hostfile empty -- script.py", "empty names no host"),
    ("--hostfile doubled -- script.py", "the host node1 twice, on lines 1 and 3"),
    ("--hostfile bytes -- script.py", "is not a text file"),
]


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS)
def test_command_line(arguments: str, message: str, tmp_path: Path) -> None:
    for name, content in {
        "script.py": b"",
        "hosts": b"node1\n",
        "empty": b"# nobody\n",
        "doubled": b"node1\nnode2\nnode1\n",
        "bytes": b"\xff\xfe\x00",
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    assert_told(run(tmp_path, *COMMAND, *arguments.split()), message)


VARIABLES = [
    ("TNT_LOG_LEVEL", "LOUD", "one of DEBUG, INFO, WARNING, ERROR"),
    ("TNT_LOG_ON_ALL_DEVICES", "perhaps", "true or false"),
    ("TNT_THREADS", "0", "a whole number, 1 or more"),
    ("TNT_STALL_TIMEOUT", "-1", "a whole number of seconds, or 0 to wait forever"),
    ("TNT_GRACE_PERIOD", "soon", "a whole number of seconds, 0 or more"),
    ("TNT_FUSION_THRESHOLD", "1.5", "a whole number of kilobytes, 0 or more, or auto"),
    ("TNT_CORES", "0,x", "lists of cores, as in 0-3:4-7"),
    ("TNT_GPUS", "first", "the numbers of GPUs, separated by commas"),
    ("TNT_CHECK_TIMEOUT", "9999", "a whole number of seconds, from 1 to 3600"),
]


@pytest.mark.parametrize(("name", "value", "expected"), VARIABLES)
def test_variable(name: str, value: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    result = run(tmp_path, *COMMAND, "--", "script.py", variables={name: value})
    assert_told(result, f"variable {name} is '{value}': set it to {expected}, or unset it.")


def assert_told(result: subprocess.CompletedProcess[str], message: str) -> None:
    """That it ended with exit status 2, and this message in a single line."""
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("tarantella: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


# Versions: told once, when Tarantella is imported, by whatever starts the ranks

BACKEND = "Tarantella needs TensorFlow as the backend of Keras, but"
OLD_KERAS = "VersionError: Tarantella needs Keras 3.8 or later"


@pytest.mark.parametrize(
    "command",
    [TWO, ("mpiexec", "-n", "2", sys.executable), (sys.executable,)],
    ids=["command", "mpiexec", "serial"],
)
@pytest.mark.parametrize("message", [f"VersionError: {BACKEND}", OLD_KERAS], ids=["backend", "old"])
def test_versions(command: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import tarantella\nprint('not reached')\n")
    variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if message != OLD_KERAS:
        (tmp_path / "keras.json").write_text('{"backend": "jax"}')
        variables["KERAS_HOME"] = str(tmp_path)
        message += (
            f" {tmp_path}/keras.json names 'jax': set the environment variable KERAS_BACKEND="
        )
    else:
        metadata = tmp_path / "keras-3.7.0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Metadata-Version: 2.1\nName: keras\nVersion: 3.7.0\n")
        variables["PYTHONPATH"] = str(tmp_path)
    result = run(tmp_path, *command, "script.py", variables=variables)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count(f"tarantella.errors.{message}") == 1
    files = re.findall(r'File "(.*?)"', result.stderr)
    assert [Path(file).name for file in files] == ["script.py"]  # nothing of the library


@pytest.mark.parametrize("given", ["variable", "option"])
def test_backend_that_the_command_knows_of(given: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('not reached')\n")
    option = ["-x", "KERAS_BACKEND=torch"] if given == "option" else []
    result = run(tmp_path, *TWO, *option, "--", "script.py", variables={"KERAS_BACKEND": "jax"})
    backend = "torch" if option else "jax"
    assert_told(result, f"{BACKEND} the environment variable KERAS_BACKEND is '{backend}': set it")
    solved = ["-x", "KERAS_BACKEND=tensorflow", "--dry-run"]
    assert run(tmp_path, *TWO, *solved, "--", "script.py").returncode == 0


@pytest.mark.parametrize(
    ("command", "first"),
    [(TWO, ""), (TWO, "import tarantella"), ((sys.executable,), "import tarantella")],
)
def test_backend_that_a_script_sets_before_it_imports_keras(
    command: tuple[str, ...], first: str, tmp_path: Path
) -> None:
    """Keras itself would say that it does not find jax."""
    lines = [first, "import os", "os.environ['KERAS_BACKEND'] = 'jax'", "import keras"]
    (tmp_path / "script.py").write_text("\n".join(lines))
    result = run(tmp_path, *command, "script.py")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count(f"tarantella.errors.VersionError: {BACKEND} the environment") == 1
    assert "ModuleNotFoundError" not in result.stderr
    files = re.findall(r'File "(.*?)"', result.stderr)
    assert [Path(file).name for file in files] == ["script.py"]


# What a script passes in, and can catch: one run in which both ranks try all of it in turn

SAMPLES = "InputError: {} is {}; it must be a whole number of samples, 1 or more."
STEPS = "InputError: {} is {}; it must be a whole number of batches, 1 or more. Leave it out"
COMPILE = "InputError: `{}` needs a compiled model: call `model.compile(optimizer=..., loss=...)`"
CONTRADICTION = "InputError: tnt_micro_batch_size=3 contradicts the batch size 8: 2 ranks with 3"
NOT_BATCHED = "InputError: The dataset is not batched. Batch it with the global batch size"
NO_SAMPLES = "InputError: There are no samples in the data: `predict` needs at least one."
DAMAGED = "InputError: The file '{}' cannot be loaded: {}"
ANOTHER_COPY = "load another copy of it, or save the model again."
ON_RANKS = "rank 0 has {}, rank 1 has {} for '{}'; all ranks must have the same"

TRIED = {
    # A batch size that makes no sense, or contradicts
    "fit(x, y, batch_size=0)": SAMPLES.format("batch_size", 0),
    "fit(x, y, batch_size=-1)": SAMPLES.format("batch_size", -1),
    "fit(x, y, batch_size=2.5)": SAMPLES.format("batch_size", 2.5),
    "fit(x, y, batch_size='8')": SAMPLES.format("batch_size", "'8'"),
    "evaluate(x, y, batch_size=0)": SAMPLES.format("batch_size", 0),
    "predict(x, batch_size=0)": SAMPLES.format("batch_size", 0),
    "fit(x, y, validation_data=(x, y), validation_batch_size=0)": SAMPLES.format(
        "validation_batch_size", 0
    ),
    "fit(dataset, tnt_micro_batch_size=0)": SAMPLES.format("tnt_micro_batch_size", 0),
    "fit(dataset.batch(8), tnt_micro_batch_size=3)": CONTRADICTION,
    "fit(x, y, batch_size=8, tnt_micro_batch_size=3)": CONTRADICTION,
    # Something else on another rank
    "fit({'a': x} if rank else x, y)": "MismatchError: the data: rank 0 has ",
    "fit(dataset.map(lambda x, y: (x, y, y) if rank else (x, y)).batch(8))": (
        "MismatchError: the data: rank 0 has a list of 2, rank 1 has a list of 3; all ranks must"
    ),
    "fit(dataset.batch(8)) if rank else fit(x, y)": (
        'MismatchError: the kind of data: rank 0 has "arrays", rank 1 has "a tf.data.Dataset"'
    ),
    "fit(x[8 * rank:], y[8 * rank:])": f"the arrays: {ON_RANKS.format(16, 8, 'samples')}",
    "fit(x, y, batch_size=4 + rank)": f"the arrays: {ON_RANKS.format(4, 5, 'batch_size')}",
    "fit(x, y, epochs=1 + rank)": ON_RANKS.format(1, 2, "epochs"),
    "fit(x, y, steps_per_epoch=1 + rank)": ON_RANKS.format('"1"', '"2"', "steps_per_epoch"),
    "fit(x, y, validation_split=rank / 2)": ON_RANKS.format("false", "true", "validation"),
    # The model
    "tnt.Model(model)": "is a tnt.Model already: use it as it is, or pass the Keras model it was",
    "tnt.Model(keras.Sequential)": "InputError: tnt.Model takes a keras.Model, not type.",
    "tnt.Model(None)": "InputError: tnt.Model takes a keras.Model, not NoneType.",
    "tnt.Model(plain()).fit(x, y)": COMPILE.format("fit"),
    "tnt.Model(plain()).evaluate(x, y)": COMPILE.format("evaluate"),
    "tnt.Model(plain()).train_on_batch(x, y)": COMPILE.format("train_on_batch"),
    # Datasets; what Keras takes is taken
    "fit(dataset.take(0).batch(4))": "nothing wrong: {}",
    "fit(nothing.batch(4))": "nothing wrong: {}",
    "evaluate(x[:0], y[:0])": "nothing wrong: []",
    "predict(x[:0])": NO_SAMPLES,
    "predict(nothing.batch(4))": NO_SAMPLES,
    "fit(dataset)": NOT_BATCHED,
    "fit(tf.data.Dataset.range(10))": NOT_BATCHED,
    "compiled().fit(tf.data.Dataset.range(10).batch(2))": "Expected shape (None, 4), but input",
    "compiled().fit(x[:, :3], y)": "expected axis -1 of input shape to have value 4, but received",
    "fit(until_the_disk_is_gone())": "RuntimeError: the disk is gone",
    "fit(tf.data.Dataset.from_generator(until_the_disk_is_gone, output_signature=SPEC))": (
        "RuntimeError: the disk is gone"
    ),
    "fit(Pages())": "RuntimeError: the second page is torn",
    "fit(None)": "InputError: `fit` needs data to work on, but `x` is None.",
    "fit(x, y[:7])": "ValueError: Data cardinality is ambiguous.",
    "evaluate(x, y[:7])": "ValueError: Data cardinality is ambiguous.",
    "model.train_on_batch(x, y[:7])": "have different numbers of samples: [7, 16]",
    "fit(text, y)": "InputError: `x` has an array of text, but Keras takes numbers.",
    "fit(x, text)": "InputError: `y` has an array of text, but Keras takes numbers.",
    "fit(x.astype(object), y)": "InputError: `x` has an array of Python objects, but Keras",
    "fit(tf.data.Dataset.from_tensor_slices((text, y)).batch(4))": (
        "InputError: The data are text, but the model 'model' takes numbers (float32). Turn the"
    ),
    "predict(tf.constant(text))": "InputError: The data are text, but the model 'model' takes",
    # Numbers of steps and epochs
    "fit(dataset.batch(4), steps_per_epoch=0)": "nothing wrong: {'loss':",
    "fit(x, y, steps_per_epoch=-1)": STEPS.format("steps_per_epoch", -1),
    "fit(x, y, steps_per_epoch=2.5)": STEPS.format("steps_per_epoch", 2.5),
    "fit(dataset.batch(4), steps_per_epoch='4')": STEPS.format("steps_per_epoch", "'4'"),
    "evaluate(x, y, steps=-1)": STEPS.format("steps", -1),
    "fit(x, y, validation_split=0.5, validation_steps=-1)": STEPS.format("validation_steps", -1),
    "fit(x, y, epochs=0)": "nothing wrong: {}",
    "fit(x, y, epochs=-1)": "nothing wrong: {}",
    "fit(x, y, epochs=1.5)": "InputError: epochs is 1.5; it must be a whole number.",
    "fit(x, y, epochs='3')": "InputError: epochs is '3'; it must be a whole number.",
    "fit(x, y, validation_split=1.5)": "InputError: validation_split is 1.5; it must be the frac",
    "fit(x, y, validation_split=-0.5)": "InputError: validation_split is -0.5; it must be the fr",
    "fit(x, y, validation_split='a')": "InputError: validation_split is 'a'; it must be the frac",
    "fit(dataset.batch(4), validation_split=0.5)": "only supported for tensors or NumPy arrays",
    "fit(x, y, validation_split=0.5, validation_freq=0)": "InputError: validation_freq is 0; it",
    # Files
    "load_model('missing.keras')": "File not found: filepath=missing.keras.",
    "load_model('missing')": "InputError: There is no model to load: 'missing' does not exist.",
    "load_model('short.keras')": DAMAGED.format("short.keras", "File is not a zip file"),
    "load_model('short.h5')": DAMAGED.format("short.h5", "Unable to synchronously open file (trun"),
    "load_model('random.keras')": ANOTHER_COPY,
    "load_model('torn.keras')": DAMAGED.format("torn.keras", "there are no weights in it."),
    "load_model('folder.keras')": DAMAGED.format("folder.keras", "it is a folder."),
    "load_model('random.keras/model.keras')": "File not found: filepath=random.keras/model.keras.",
    "model.load_weights('missing.weights.h5')": "FileNotFoundError: [Errno 2] Unable to synchron",
    "model.load_weights('missing')": "name = 'missing.weights.h5'",
    "model.load_weights('short.weights.h5')": DAMAGED.format("short.weights.h5", "Unable to sync"),
    "model.load_weights('short.keras')": DAMAGED.format("short.keras", "File is not a zip file"),
    "model.load_weights('short.h5')": DAMAGED.format("short.h5", "Unable to synchronously open fi"),
    "model.load_weights('random.weights.h5')": ANOTHER_COPY,
    "model.load_weights('folder.weights.h5')": DAMAGED.format("folder.weights.h5", "it is a fold"),
    "model.load_weights('other.weights.h5')": "variable.shape=(4, 1), Received: value.shape=(4, 7)",
    "model.save('/proc/model.keras')": "Error: [Errno 2] ",
    "model.save('random.keras/model.keras')": "Not a directory: 'random.keras/model.keras'",
    "model.save('folder.keras')": "Is a directory: 'folder.keras'",
    "model.save('model.txt')": "Invalid filepath extension for saving.",
    "model.save_weights('missing/model.weights.h5')": "FileNotFoundError: [Errno 2] ",
    # Descriptions
    "tnt.models.model_from_json('{')": "InputError: This is not the result of `to_json`, as it is",
    "tnt.models.model_from_json('[' * 100000)": "InputError: This is not the result of `to_json`",
    "tnt.models.model_from_json(model.to_json()[:99])": "InputError: This is not the result of `",
    "tnt.models.model_from_yaml('a: [')": "InputError: This is not the result of `to_yaml`, as",
    "tnt.models.model_from_yaml('\\0\\1')": "InputError: This is not the result of `to_yaml`, as",
    # Weights with which there is nothing to compute: they are loaded, with a warning
    "load_model('nan.keras')": "nothing wrong",
    "model.load_weights('nan.weights.h5')": "nothing wrong",
}

PREPARE = """
import json, os, sys, zipfile
from pathlib import Path
import keras
import numpy as np
import tensorflow as tf
import tarantella as tnt

rank = tnt.get_rank()
x, y = np.ones((16, 4), "float32"), np.ones((16, 1), "float32")
text = np.array([["word"] * 4] * 16)
dataset = tf.data.Dataset.from_tensor_slices((x, y))
nothing = dataset.filter(lambda x, y: False)  # and nobody knows before
SPEC = (tf.TensorSpec((4, 4)), tf.TensorSpec((4, 1)))

def until_the_disk_is_gone():
    yield x[:4], y[:4]
    yield x[:4], y[:4]
    raise RuntimeError("the disk is gone")

class Pages(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, number):
        if number == 2:
            raise RuntimeError("the second page is torn")
        return x[:4], y[:4]

def plain(width=1):
    dense = keras.layers.Dense(width, name="dense")
    return keras.Sequential([keras.Input((4,)), dense], name="model")

def compiled():
    model = tnt.Model(plain())
    model.compile("sgd", "mse")
    return model

def write_files():
    model = plain()
    model.compile("sgd", "mse")
    for name in ("whole.keras", "whole.h5", "whole.weights.h5"):
        save = model.save_weights if "weights" in name else model.save
        save(name)
        content = Path(name).read_bytes()
        Path(name.replace("whole", "short")).write_bytes(content[:-50])
        Path(name.replace("whole", "random")).write_bytes(os.urandom(999))
    with zipfile.ZipFile("whole.keras") as whole, zipfile.ZipFile("torn.keras", "w") as torn:
        torn.writestr("config.json", whole.read("config.json"))
    plain(7).save_weights("other.weights.h5")
    model.set_weights([np.ones((4, 1)), np.array([np.nan])])
    model.save("nan.keras")
    model.set_weights([np.full((4, 1), -np.inf), np.array([np.nan])])
    model.save_weights("nan.weights.h5")
    Path("folder.keras").mkdir()
    Path("folder.weights.h5").mkdir()

if tnt.is_master_rank():
    write_files()
tnt.barrier()
model = compiled()
load_model = tnt.models.load_model
"""

TRY = """
def fit(*args, **kwargs):
    return model.fit(*args, verbose=0, **kwargs).history

def evaluate(*args, **kwargs):
    return model.evaluate(*args, verbose=0, **kwargs)

def predict(*args, **kwargs):
    return model.predict(*args, verbose=0, **kwargs)

for statement in json.loads(Path("statements.json").read_text()):
    try:
        told = f"nothing wrong: {eval(statement)}"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    print(json.dumps([statement, tnt.allgather(told)]), flush=True)
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A run of the command in which each rank tries each statement, and goes on."""
    folder = tmp_path_factory.mktemp("tried")
    (folder / "script.py").write_text(PREPARE + TRY)
    (folder / "statements.json").write_text(json.dumps(list(TRIED)))
    return run(folder, *TWO, "--", "script.py")


@pytest.mark.parametrize("statement", TRIED)
def test_what_every_rank_is_told(statement: str, tried: subprocess.CompletedProcess[str]) -> None:
    told = dict(json.loads(line) for line in tried.stdout.splitlines())
    assert statement in told, tried.stderr
    assert [text for text in told[statement] if TRIED[statement] not in text] == []


def test_ranks_that_go_on_end_well(tried: subprocess.CompletedProcess[str]) -> None:
    assert tried.returncode == 0, tried.stderr


@pytest.mark.parametrize(("weight", "file"), [("bias", "nan.keras"), ("kernel", "nan.weights.h5")])
def test_first_weight_that_is_not_finite_is_named_once(
    weight: str, file: str, tried: subprocess.CompletedProcess[str]
) -> None:
    warnings = [line for line in tried.stderr.splitlines() if f" in {file} has values " in line]
    assert len(warnings) == 1
    assert re.match(f"tarantella WARNING: The weight '(model/)?dense/{weight}' in ", warnings[0])
    assert "Load an earlier file. " in warnings[0]


# What nobody catches ends the run; with the short start, before TensorFlow is loaded

START = "import tarantella as tnt\n"
UNCAUGHT = {
    "tnt.allreduce(1, op='most')": (START, 2, "InputError: allreduce: op='most' is not one of "),
    "tnt.broadcast({'a': 1} if tnt.get_rank() else [1])": (START, 2, "MismatchError: broadcast"),
    "load_model('short.keras')": (PREPARE, 2, "InputError: The file 'short.keras' cannot be loa"),
    "model.fit(x[8 * rank:], y[8 * rank:])": (
        PREPARE,
        2,
        f"MismatchError: the arrays: {ON_RANKS.format(16, 8, 'samples')}",
    ),
    "model.load_weights('other.weights.h5')": (PREPARE, 1, "variable.shape=(4, 1), Received: va"),
}


@pytest.mark.parametrize("statement", UNCAUGHT)
def test_what_nobody_catches(statement: str, tmp_path: Path) -> None:
    start, status, message = UNCAUGHT[statement]
    path = tmp_path / "script.py"
    path.write_text(f"{start}{statement}\n")
    result = run(tmp_path, *TWO, "--", str(path))
    assert result.returncode == status
    assert result.stderr.count("Traceback") == 1
    last = result.stderr.splitlines()[-1]
    assert re.match(r"tarantella: rank [01] on host \S+ failed: ", last)
    assert message in last
    assert f"(exit status {status})" in last
    if status == 2:  # an error of ours
        assert set(re.findall(r'File "(.+?)", line', result.stderr)) == {str(path)}
