"""The Transformer learns to translate, and trains on several ranks as in plain Keras."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tarantella as tnt

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "examples" / "transformer"
sys.path.insert(0, str(FOLDER))
sys.path.append(str(REPOSITORY / "tests" / "ranks"))
import batches  # noqa: E402
import make_corpus  # noqa: E402
import scores  # noqa: E402
import subwords  # noqa: E402
import train_translation  # noqa: E402
import transformer  # noqa: E402
from fixtures import float64  # noqa: E402, F401

README = (FOLDER / "README.md").read_text()
MAX_LENGTH = 64
SMALLEST = transformer.Size(layers=1, width=8, heads=2, inner_width=16)

Shell = Callable[..., Any]
Data = tuple[batches.Text, subwords.Vocabulary]


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """A few sentences, and a vocabulary for them."""
    make_corpus.write_corpus(tmp_path, {"train": 40}, seed=3)
    text = batches.Text.named("train", tmp_path, ("en", "de"))
    lines = [line for pair in text.pairs() for line in pair]
    return text, subwords.learn(lines, size=200)


@pytest.fixture
def tiny() -> keras.Model:
    keras.utils.set_random_seed(1)
    return transformer.transformer(SMALLEST, 20, dropout=0.1)


# The commands of the README


def test_it_learns_to_translate_on_two_ranks(shell: Shell, tmp_path: Path) -> None:
    for path in FOLDER.glob("*.py"):
        (tmp_path / path.name).symlink_to(path)
    make, train, translate, score, _ = commands()

    made = shell(make)
    assert made.status == 0, made.output
    trained = shell(train, timeout=600)
    assert trained.status == 0, trained.output
    bleu = re.findall(r"^test BLEU: ([\d.]+)$", trained.output, re.MULTILINE)
    assert len(bleu) == 1
    assert float(bleu[0]) > 75, trained.output

    # The saved model translates just as well, without Tarantella.
    translated = shell(translate)
    assert translated.status == 0, translated.output
    scored = shell(score)
    assert scored.status == 0, scored.output
    assert scored.output.split()[-1] == bleu[0]


def test_options_for_wmt14_are_options_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    options = shlex.split(commands()[-1].split("train_translation.py")[1])
    monkeypatch.setattr("sys.argv", ["train_translation.py", *options])
    args = train_translation.parse_args()
    assert args.model_size == "base"


def test_every_file_is_described() -> None:
    names = re.findall(r"^\| `(\w+\.py)` \|", README, re.MULTILINE)
    assert sorted(names) == sorted(path.name for path in FOLDER.glob("*.py"))


# Training on ranks, compared with plain Keras


def trained(
    make_dataset: Callable[[], tf.data.Dataset],
    vocabulary_size: int,
    wrap: Callable[[keras.Model], keras.Model],
    **options: Any,
) -> tuple[Any, Any]:
    """The logs and the weights after two epochs."""
    keras.utils.set_random_seed(42)
    dataset = make_dataset()
    model = wrap(transformer.transformer(SMALLEST, vocabulary_size, dropout=0.0))
    model.compile(
        optimizer=keras.optimizers.Adam(scores.WarmUp(0.01, 5)),
        loss=scores.SmoothedCrossentropy(),
        weighted_metrics=[scores.TokenAccuracy(), scores.Perplexity()],
    )
    history = model.fit(dataset, epochs=2, verbose=0, **options).history
    return history, model.get_weights()


def assert_same(actual: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    logs, weights = actual
    expected_logs, expected_weights = expected
    assert list(logs) == list(expected_logs)
    for name in logs:
        np.testing.assert_allclose(logs[name], expected_logs[name], rtol=1e-9, err_msg=name)
    for weight, expected_weight in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(weight, expected_weight, rtol=1e-8, atol=1e-11)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("float64")
def test_automatic_distribution_trains_as_plain_keras(data: Data) -> None:
    def make_dataset() -> tf.data.Dataset:
        pairs = batches.as_dataset(*data, MAX_LENGTH).shuffle(100, seed=5)
        return batches.in_batches(pairs, 200, MAX_LENGTH)

    actual = trained(make_dataset, len(data[1]), tnt.Model)
    if tnt.is_master_rank():
        assert_same(actual, trained(make_dataset, len(data[1]), plain))


@pytest.mark.ranks(3)
@pytest.mark.usefixtures("float64")
def test_manual_shards_train_as_plain_keras_on_their_batches_together(data: Data) -> None:
    def make_shard(rank: int) -> tf.data.Dataset:
        pairs = batches.as_dataset(*data, MAX_LENGTH, shard=(rank, 3))
        return batches.in_batches(pairs, 100, MAX_LENGTH)

    steps = [list(make_shard(rank).as_numpy_iterator()) for rank in range(3)]
    assert len(set(map(len, steps))) > 1, "some ranks should have more batches than others"
    actual = trained(
        lambda: make_shard(tnt.get_rank()), len(data[1]), tnt.Model, tnt_distribute_dataset=False
    )
    if tnt.is_master_rank():
        assert_same(actual, trained(lambda: put_together(steps), len(data[1]), plain))


def plain(model: keras.Model) -> keras.Model:
    return model


def put_together(steps: list[list[Any]]) -> tf.data.Dataset:
    """Batches of the sentences that the ranks have in the same step."""

    def make() -> Iterator[Any]:
        for step in range(max(map(len, steps))):
            present = [batch for shard in steps for batch in shard[step : step + 1]]
            leaves = zip(*map(tf.nest.flatten, present), strict=True)
            rows = [
                batches.padded([row for part in leaf for row in part], MAX_LENGTH)
                for leaf in leaves
            ]
            yield tf.nest.pack_sequence_as(present[0], rows)

    spec = tf.TensorSpec((None, MAX_LENGTH), tf.int32)
    return tf.data.Dataset.from_generator(
        make, output_signature=({"source": spec, "target": spec}, spec, spec)
    )


# The model


def test_a_token_does_not_see_those_behind_it(tiny: keras.Model) -> None:
    source, target = np.array([[5, 6, 2]]), np.array([[1, 7, 8, 9]])
    other = np.array([[1, 7, 10, 11]])
    logits = tiny({"source": source, "target": target}).numpy()
    others = tiny({"source": source, "target": other}).numpy()
    np.testing.assert_array_equal(logits[:, :2], others[:, :2])
    assert np.abs(logits[:, 2:] - others[:, 2:]).max() > 1e-3


def test_padding_changes_nothing(tiny: keras.Model) -> None:
    logits = tiny({"source": np.array([[5, 6, 2]]), "target": np.array([[1, 7]])})
    source, target = np.array([[5, 6, 2, 0, 0]]), np.array([[1, 7, 0]])
    padded = tiny({"source": source, "target": target})
    np.testing.assert_allclose(padded[:, :2], logits, rtol=1e-4, atol=1e-5)


def test_the_translator_takes_the_likeliest_token_by_present_weights(tiny: keras.Model) -> None:
    translator = transformer.Translator(tiny, max_length=6)
    source = np.array([[5, 6, 2], [7, 2, 0]], np.int32)
    for seed in (1, 2):
        draw = np.random.default_rng(seed)
        tiny.set_weights([draw.normal(size=weight.shape) for weight in tiny.get_weights()])
        target = np.array([[subwords.START]] * 2)
        while target.shape[1] <= 6 and not (target == subwords.END).any(axis=1).all():
            logits = tiny({"source": source, "target": target}).numpy()
            target = np.concatenate([target, logits[:, -1:].argmax(axis=-1)], axis=1)
        tokens = np.asarray(translator(source))
        np.testing.assert_array_equal(tokens[:, : target.shape[1] - 1], target[:, 1:])
        assert not tokens[:, target.shape[1] - 1 :].any()


def test_the_saved_model_is_one_of_plain_keras(tiny: keras.Model, tmp_path: Path) -> None:
    tiny.compile(
        optimizer=keras.optimizers.Adam(scores.WarmUp(0.01, 5)),
        loss=scores.SmoothedCrossentropy(smoothing=0.2),
        weighted_metrics=[scores.TokenAccuracy(), scores.Perplexity()],
    )
    tiny.optimizer.build(tiny.trainable_variables)
    tiny.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded) is type(tiny)
    assert loaded.loss.smoothing == 0.2
    assert loaded.count_params() == tiny.count_params()
    x = {"source": np.array([[5, 6, 2]]), "target": np.array([[1, 7]])}
    np.testing.assert_array_equal(loaded(x), tiny(x))


# Loss and metrics


def example_of_scores() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(2)
    truth = draw.integers(0, 9, (4, 5))
    weights = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]])
    return truth, draw.normal(size=(4, 5, 9)), weights.astype("float32")


def negative_log_likelihoods(logits: np.ndarray) -> np.ndarray:
    return -logits + np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_metrics_count_tokens() -> None:
    truth, logits, weights = example_of_scores()
    accuracy, perplexity = scores.TokenAccuracy(), scores.Perplexity()
    for rows in (slice(1), slice(1, 4)):  # batches with different numbers of tokens
        for metric in (accuracy, perplexity):
            metric.update_state(truth[rows], logits[rows], weights[rows])
    counted = weights.astype(bool)
    right = (logits.argmax(-1) == truth)[counted]
    losses = np.take_along_axis(negative_log_likelihoods(logits), truth[..., None], -1)[..., 0]
    np.testing.assert_allclose(accuracy.result(), right.mean(), rtol=1e-5)
    np.testing.assert_allclose(perplexity.result(), np.exp(losses[counted].mean()), rtol=1e-5)


def test_loss_is_the_cross_entropy_with_smoothed_labels() -> None:
    truth, logits, weights = example_of_scores()
    labels = 0.9 * np.eye(9)[truth] + 0.1 / 9
    losses = (labels * negative_log_likelihoods(logits)).sum(axis=-1)
    loss = scores.SmoothedCrossentropy()(truth, logits, weights)
    np.testing.assert_allclose(loss, losses[weights.astype(bool)].mean(), rtol=1e-5)


def test_learning_rate_rises_and_then_falls_with_the_root_of_the_steps() -> None:
    rate = scores.WarmUp(peak=0.5, warmup_steps=100)
    rates = [float(rate(step)) for step in (0, 49, 99, 399)]
    np.testing.assert_allclose(rates, [0.005, 0.25, 0.5, 0.25], rtol=1e-5)


# Text and batches


def test_the_corpus_is_the_same_every_time(tmp_path: Path) -> None:
    sizes = {"train": 200, "newstest2014": 50}
    for name in ("one", "other"):
        make_corpus.write_corpus(tmp_path / name, sizes, seed=1)
    texts = {}
    for path in sorted((tmp_path / "one").iterdir()):
        texts[path.name] = path.read_text(encoding="utf-8").splitlines()
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes()
    assert [len(lines) for lines in texts.values()] == [50, 50, 200, 200]
    train = set(zip(texts["train.en"], texts["train.de"], strict=True))
    test = set(zip(texts["newstest2014.en"], texts["newstest2014.de"], strict=True))
    assert len(train) == 200
    assert not train & test


def test_vocabulary_gives_every_text_back(data: Data) -> None:
    text, vocabulary = data
    assert len(vocabulary) == 200
    for line in (line for pair in text.pairs() for line in pair):
        assert vocabulary.decode(vocabulary.encode(line)) == line.strip()
    again = subwords.Vocabulary.from_json(vocabulary.to_json())
    assert again.pieces == vocabulary.pieces
    assert vocabulary.encode("Q")[-2:] == [subwords.UNKNOWN, subwords.END]


def test_batches_hold_all_sentences_and_no_more_tokens_than_asked_for(data: Data) -> None:
    pairs = batches.as_dataset(*data, MAX_LENGTH)
    expected = sorted((tuple(s), tuple(t[1:])) for s, t in pairs.as_numpy_iterator())
    found = []
    for inputs, outputs, weights in batches.in_batches(pairs, 100, MAX_LENGTH).as_numpy_iterator():
        assert max(inputs["source"].size, outputs.size) <= 100
        np.testing.assert_array_equal(weights, outputs != 0)
        np.testing.assert_array_equal(inputs["target"][:, 0], subwords.START)
        found += [
            (tuple(source[source != 0]), tuple(target[target != 0]))
            for source, target in zip(inputs["source"], outputs, strict=True)
        ]
    assert sorted(found) == expected
    assert len(found) == 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tokens_per_batch=0", "--tokens_per_batch: '0' is not an integer of at least 1"),
        ("--tokens_per_batch=39", "--tokens_per_batch 39: 1 ranks need 40"),
        ("--learning_rate=fast", "--learning_rate: 'fast' is not a number above 0"),
        ("--dropout=1", "--dropout: '1' is not a number from 0 to below 1"),
        ("--model_size=huge", "--model_size: invalid choice: 'huge'"),
        ("--data_dir=nowhere", "--data_dir nowhere: there is no file nowhere/train.en"),
        ("--target_language=short", "train.en has 3 lines, but train.short has 2"),
        ("--target_language=latin1", "train.en and train.latin1 have to be UTF-8"),
        ("--train=empty", "empty.en is empty"),
        ("--vocabulary=nowhere.json", "--vocabulary nowhere.json: "),
        ("--vocabulary=train.en", "--vocabulary train.en: "),
        ("--max_length=2", "--max_length 2: all sentences of train.en are longer"),
        ("--batch_size=3", "unrecognized arguments: --batch_size=3"),
    ],
)
def test_a_bad_option_is_explained(
    options: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_corpus.write_corpus(tmp_path, {"train": 3, "newstest2013": 3, "newstest2014": 3}, seed=1)
    (tmp_path / "train.short").write_text("eins\nzwei\n")
    (tmp_path / "train.latin1").write_bytes("drei Löffel\n".encode("latin1") * 3)
    for language in ("en", "de"):
        (tmp_path / f"empty.{language}").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train_translation.py", "--data_dir=.", options])
    with pytest.raises(SystemExit) as end:
        train_translation.main()
    assert end.value.code not in (None, 0)
    assert message in f"{end.value.code} {capsys.readouterr().err}"
