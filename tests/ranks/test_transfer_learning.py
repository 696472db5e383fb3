"""Models that are trained more than once: frozen, unfrozen, shared, cloned, compiled anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from oracle import (
    CLASSIFICATION,
    WITH_METRICS,
    assert_close,
    assert_trains_as_in_keras,
    batches,
    classification_data,
    computed_by_master,
    small_model,
)

import tarantella as tnt

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.ranks(2)]

Wrap = Callable[[keras.Model], keras.Model]
SGD = {**CLASSIFICATION, "optimizer": "sgd"}


def data() -> Any:
    return batches(*classification_data(), batch_size=5)


def fit(model: keras.Model, **options: Any) -> Any:
    return model.fit(data(), verbose=0, shuffle=False, **options).history


def assert_same_story(tell: Callable[[Wrap], Any]) -> None:
    """Compares what `tell` returns with plain models, and with models wrapped in tnt.Model."""

    def told(wrap: Wrap) -> Any:
        keras.utils.clear_session()
        keras.utils.set_random_seed(42)
        return tell(wrap)

    plain = computed_by_master(lambda: told(lambda model: model))
    assert_close(told(tnt.Model), plain)


def normalized_base() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(4, activation="tanh"),
            keras.layers.BatchNormalization(synchronized=True),
        ],
        name="base",
    )


class Classifier(keras.Model):
    """A base that runs in inference mode, and a head."""

    def __init__(self, base: keras.Model) -> None:
        super().__init__()
        self.base = base
        self.head = keras.layers.Dense(3, activation="softmax")

    def call(self, inputs: Any) -> Any:
        return self.head(self.base(inputs, training=False))


@pytest.mark.parametrize("kind", ["functional", "inference_mode"])
def test_freeze_fit_unfreeze_fit(kind: str) -> None:
    def tell(wrap: Wrap) -> list[Any]:
        base = normalized_base()
        if kind == "functional":
            inputs = keras.Input((5,))
            head = keras.layers.Dense(3, activation="softmax")
            model = wrap(keras.Model(inputs, head(base(inputs))))
        else:
            model = wrap(Classifier(base))
        base.trainable = False
        model.compile(**SGD)
        frozen = base.get_weights()
        story = [fit(model)]
        assert_close(base.get_weights(), frozen, 0, 0)
        base.trainable = True
        model.compile(**SGD)
        story += [fit(model, epochs=2), model.evaluate(data(), verbose=0), model.get_weights()]
        assert not np.array_equal(base.get_weights()[0], frozen[0])
        return story

    assert_same_story(tell)


def test_weights_of_another_model_that_do_not_all_fit(shared_tmp_path: Path) -> None:
    path, hidden = shared_tmp_path / "other.weights.h5", None
    if tnt.is_master_rank():
        keras.utils.set_random_seed(7)
        other = small_model(regularized=False)
        hidden = other.layers[1].get_weights()
        other = keras.Sequential([keras.Input((5,)), other.layers[1], keras.layers.Dense(9)])
        other.save_weights(path)
    hidden = computed_by_master(lambda: hidden)

    def tell(wrap: Wrap) -> list[Any]:
        model = wrap(
            keras.Sequential(
                [
                    keras.Input((5,)),
                    keras.layers.Dense(4, activation="tanh"),
                    keras.layers.Dense(3, activation="softmax"),
                ]
            )
        )
        model.load_weights(path, skip_mismatch=True)
        assert_close(model.layers[0].get_weights(), hidden, 0, 0)
        model.compile(**CLASSIFICATION)
        return [fit(model), model.get_weights()]

    assert_same_story(tell)


def test_several_models_in_turn() -> None:
    def tell(wrap: Wrap) -> list[Any]:
        models = [wrap(small_model()), wrap(Classifier(normalized_base()))]
        for model in models:
            model.compile(**SGD)
        story = [fit(model) for _ in range(2) for model in models]
        return [*story, *(model.get_weights() for model in models)]

    assert_same_story(tell)


@pytest.mark.ranks(1, 2)
def test_a_plain_model_that_shares_layers_is_trained_with_it() -> None:
    def tell(wrap: Wrap) -> list[Any]:
        plain = small_model()
        features = keras.Model(plain.inputs, plain.layers[1].output)
        model = wrap(plain)
        model.compile(**CLASSIFICATION)
        fit(model)
        x, _ = classification_data()
        story = [features.predict(x, verbose=0), np.array(plain(x)), model.predict(x, verbose=0)]
        assert_close(plain.get_weights(), model.get_weights(), 0, 0)
        return [*story, fit(model)]

    assert_same_story(tell)


def test_one_rank_uses_the_plain_model_alone() -> None:
    plain = small_model()
    model = tnt.Model(plain)
    model.compile(**WITH_METRICS)
    fit(model)
    x, y = classification_data()
    plain.compile(**WITH_METRICS)
    alone = computed_by_master(lambda: [plain.predict(x, verbose=0), *plain.evaluate(x, y, 5, 0)])
    assert_close([model.predict(x, verbose=0), *model.evaluate(x, y, 5, 0)], alone)


def test_a_plain_model_that_one_rank_trains_is_the_masters_afterwards() -> None:
    plain = small_model()
    model = tnt.Model(plain)
    model.compile(**CLASSIFICATION)
    if tnt.is_master_rank():
        plain.compile(**CLASSIFICATION)
        plain.fit(*classification_data(), verbose=0)
    masters = computed_by_master(plain.get_weights)
    model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
    fit(model)
    assert_close(model.get_weights(), masters, 0, 0)


def test_a_model_of_ours_as_a_layer_of_another() -> None:
    def tell(wrap: Wrap) -> list[Any]:
        inner = wrap(normalized_base())
        inputs = keras.Input((5,))
        outputs = keras.layers.Dense(3, activation="softmax")(inner(inputs))
        model = wrap(keras.Model(inputs, outputs))
        model.compile(**SGD)
        return [fit(model), fit(model), inner.get_weights(), model.get_weights()]

    assert_same_story(tell)


def test_clones_are_models_of_their_own() -> None:
    def tell(wrap: Wrap) -> list[Any]:
        model = wrap(small_model(regularized=False))
        clone = keras.models.clone_model(model)
        assert isinstance(clone, type(model))
        clone.set_weights(model.get_weights())
        model.compile(**CLASSIFICATION)
        before = clone.get_weights()
        story = [fit(model)]
        assert_close(clone.get_weights(), before, 0, 0)
        clone.compile(**CLASSIFICATION)
        return [*story, fit(clone), clone.get_weights()]

    assert_same_story(tell)


def test_compiled_anew_with_another_optimizer() -> None:
    def tell(wrap: Wrap) -> list[Any]:
        model = wrap(small_model())
        story = []
        for optimizer in ("sgd", "adam", keras.optimizers.SGD(0.1, momentum=0.9)):
            model.compile(**{**CLASSIFICATION, "optimizer": optimizer})
            story.append(fit(model))
        return [*story, model.get_weights()]

    assert_same_story(tell)


def test_the_learning_rate_is_changed_by_hand() -> None:
    def tell(wrap: Wrap) -> list[Any]:
        model = wrap(small_model())
        model.compile(**CLASSIFICATION)
        story = [fit(model)]
        model.optimizer.learning_rate = 0.1
        story.append(fit(model))
        model.optimizer.learning_rate.assign(0.01)
        story.append(fit(model))
        return [*story, model.get_weights(), float(model.optimizer.learning_rate)]

    assert_same_story(tell)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_learning_rate_that_one_rank_sets_counts_if_it_is_the_master(rank: int) -> None:
    model = tnt.Model(small_model())
    model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
    fit(model)
    if tnt.get_rank() == rank:
        model.optimizer.learning_rate = 0.25
    fit(model)
    assert float(model.optimizer.learning_rate) == (0.25 if rank == 0 else 0.5)
    for weight in model.get_weights():
        assert_close(tnt.allgather(weight), [weight] * 2, 0, 0)


def test_a_schedule_continues_from_fit_to_fit() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)
    assert_trains_as_in_keras(
        small_model,
        lambda: {**CLASSIFICATION, "optimizer": keras.optimizers.SGD(schedule)},
        lambda: {"x": data()},
    )


def test_a_cleared_session_between_fits() -> None:
    def tell(wrap: Wrap) -> list[Any]:
        model = wrap(small_model())
        model.compile(**CLASSIFICATION)
        story = [fit(model)]
        keras.backend.clear_session()
        story.append(fit(model))
        other = wrap(small_model())
        other.compile(**CLASSIFICATION)
        return [*story, fit(other), model.get_weights()]

    assert_same_story(tell)


@pytest.mark.parametrize("of_plain", [True, False], ids=["plain", "tnt"])
def test_weights_that_every_rank_sets_by_hand(of_plain: bool) -> None:
    def tell(wrap: Wrap) -> list[Any]:
        plain = small_model()
        model = wrap(plain)
        model.compile(**SGD)
        story = [fit(model)]
        layer = (plain if of_plain else model).layers[1]
        layer.set_weights([2.0 * weight for weight in layer.get_weights()])
        story.append(fit(model))
        x, y = classification_data()
        layer.set_weights([2.0 * weight for weight in layer.get_weights()])
        return [*story, model.train_on_batch(x, y), model.evaluate(data(), verbose=0)]

    assert_same_story(tell)


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_that_one_rank_sets_count_if_it_is_the_master(rank: int) -> None:
    plain = small_model()
    model = tnt.Model(plain)
    model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
    fit(model)
    before = model.get_weights()
    if tnt.get_rank() == rank:
        plain.layers[1].set_weights([weight + 1.0 for weight in plain.layers[1].get_weights()])
    fit(model)
    changed = 1.0 if rank == 0 else 0.0
    expected = [weight + changed for weight in before[:2]] + before[2:]
    assert_close(model.get_weights(), expected)
