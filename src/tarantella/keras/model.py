"""A Keras model whose training, evaluation and prediction are shared by all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any

import keras
import tensorflow as tf

from tarantella.comm import collectives
from tarantella.comm.graph import Channel
from tarantella.data import parts
from tarantella.data.parts import Part
from tarantella.errors import InputError
from tarantella.keras import internals, prediction, state
from tarantella.keras.compiled import call_compiled
from tarantella.keras.distributed import undistributed
from tarantella.keras.feed import Feed, in_batches, split_for_validation
from tarantella.keras.step import Step, current, global_results
from tarantella.runtime import world
from tarantella.runtime.log import LOGGER
from tarantella.runtime.output import rank_output, shows_output


class ParallelStrategy(Enum):
    """How the work on a model is shared.

    Attributes:
        DATA: Every rank holds the whole model and works on its part of every batch.
    """

    DATA = "data"


class RankSteps(keras.Model):
    """What a model does differently on several ranks, around what its own class does.

    It stands in front of the class of the user's model: a `train_step` of the user's is called
    from here, on this rank's part. `Model`, with `fit` and all that, stands behind that class:
    a user's `fit` calls it as it would call Keras's.
    """

    jit_compile: Any
    _tnt_compiles_calls: bool

    def train_step(self, data: Any) -> Any:
        if not isinstance(data, Part):
            return super().train_step(data)
        step = Step(self, data)
        with self._compiled_calls(), step.running():
            return step.global_logs(super().train_step(data.data))

    def test_step(self, data: Any) -> Any:
        if not isinstance(data, Part):
            return super().test_step(data)
        step = Step(self, data)
        with self._compiled_calls(), step.running():
            return step.global_logs(super().test_step(data.data))

    def predict_step(self, data: Any) -> Any:
        if not isinstance(data, Part):
            return super().predict_step(data)
        with self._compiled_calls():
            outputs = super().predict_step(data.data)
        return prediction.own_rows(outputs, data.count)

    def get_metrics_result(self) -> dict[str, Any]:
        if world.get_size() == 1 or internals.in_stateless_scope():
            return super().get_metrics_result()
        compute, step = super().get_metrics_result, current()
        if step is not None:
            return step.results_of(compute, self.metrics)
        return global_results(compute, self.metrics, Channel("metrics"))

    # Compilation: what communicates is not compiled by XLA, the calls of the model are.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._tnt_compiles_calls:
            return super().__call__(*args, **kwargs)
        with self._compiled_calls(False):
            return call_compiled(self, super().__call__, args, kwargs)

    @contextmanager
    def _compiled_calls(self, wanted: bool = True) -> Iterator[None]:
        before = self._tnt_compiles_calls
        self._tnt_compiles_calls = wanted and bool(self.jit_compile)
        try:
            yield
        finally:
            self._tnt_compiles_calls = before

    @contextmanager
    def _uncompiled_steps(self) -> Iterator[None]:
        before = self.jit_compile
        self.jit_compile = before and world.get_size() == 1
        try:
            yield
        finally:
            self.jit_compile = before

    def make_train_function(self, force: bool = False) -> Any:
        with self._uncompiled_steps():
            return super().make_train_function(force)

    def make_test_function(self, force: bool = False) -> Any:
        with self._uncompiled_steps():
            return super().make_test_function(force)

    def make_predict_function(self, force: bool = False) -> Any:
        with self._uncompiled_steps():
            return super().make_predict_function(force)

    def get_config(self) -> Any:
        return self._plain().get_config()

    def to_json(self, **kwargs: Any) -> Any:
        return self._plain().to_json(**kwargs)


class Model(keras.Model):
    """Makes a Keras model train on all ranks, with the result of one process.

    The object that comes back is a `keras.Model` of the class of the one passed in. Both
    have the same layers and weights; `compile` and `fit` concern only the one they are
    called on, so the plain model stays at hand for work that one rank does alone.

    Args:
        model: A Functional, Sequential or subclassed Keras model.
        parallel_strategy: `ParallelStrategy.DATA`.

    Example:

    ```python
    import keras
    import numpy as np
    import tarantella as tnt

    model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile(optimizer="sgd", loss="mse")
    model.fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=16)
    ```
    """

    _tnt_started: bool
    _tnt_plain_class: Any

    def __new__(cls, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cls is not Model:
            return super().__new__(cls)
        return _distributed(model, *args, **kwargs)

    # Whole runs over data

    @rank_output()
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Any = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
        *,
        tnt_micro_batch_size: int | None = None,
        tnt_validation_micro_batch_size: int | None = None,
        tnt_distribute_dataset: bool = True,
        tnt_distribute_validation_dataset: bool = True,
    ) -> Any:
        """Trains the model on all ranks, as `keras.Model.fit` does in one process.

        Args:
            x: Data as Keras takes it, the same on all ranks, in batches of the global size.
            y: Targets.
            batch_size: Size of the global batch, when `x` is not in batches already.
            tnt_micro_batch_size: How many samples of a batch each rank gets. A dataset that is
                not batched is batched with it; in any other case it must fit the batch size.
            tnt_validation_micro_batch_size: The same for the validation data.
            tnt_distribute_dataset: False if every rank passes its own part of the data: a
                step is then made of one batch of each rank. Ranks that run out of batches
                before the others wait for these.
            tnt_distribute_validation_dataset: The same for the validation data.

        All other arguments are those of Keras. Returns the `History`, with the logs of the
        global batches, on every rank.
        """
        self._require_compiled("fit")
        x, tnt_micro_batch_size = undistributed(x, tnt_micro_batch_size)
        validation_data, tnt_validation_micro_batch_size = undistributed(
            validation_data, tnt_validation_micro_batch_size
        )
        if world.get_size() == 1:
            x, batch_size = _alone(x, batch_size, tnt_micro_batch_size)
            validation_data, validation_batch_size = _alone(
                validation_data,
                validation_batch_size,
                tnt_validation_micro_batch_size,
                "validation_",
            )
            return super().fit(
                x, y, batch_size, epochs, verbose, callbacks, validation_split, validation_data,
                shuffle, class_weight, sample_weight, initial_epoch, steps_per_epoch,
                validation_steps, validation_batch_size, validation_freq,
            )  # fmt: skip
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_for_validation(
                (x, y, sample_weight), validation_split
            )
        _tell_of_own_data("training", tnt_distribute_dataset)
        feed = Feed.of(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
            micro_batch_size=tnt_micro_batch_size,
            distribute=tnt_distribute_dataset,
        )
        validation = None
        if validation_data is not None:
            _tell_of_own_data("validation", tnt_distribute_validation_dataset)
            if validation_batch_size is None and tnt_validation_micro_batch_size is None:
                validation_batch_size = batch_size or (tnt_micro_batch_size and feed.batch_size)
            validation = Feed.of(
                *keras.utils.unpack_x_y_sample_weight(validation_data),
                batch_size=validation_batch_size,
                steps_per_epoch=validation_steps,
                micro_batch_size=tnt_validation_micro_batch_size,
                distribute=tnt_distribute_validation_dataset,
                purpose="validation_",
            )
        self._start_from_master(feed)
        with feed.explaining(), validation.explaining() if validation else nullcontext():
            return super().fit(
                feed,
                epochs=epochs,
                verbose=verbose if shows_output() else 0,
                callbacks=callbacks,
                validation_data=validation,
                initial_epoch=initial_epoch,
                steps_per_epoch=feed.steps_per_epoch,
                validation_steps=validation.steps_per_epoch if validation else None,
                validation_freq=validation_freq,
            )

    @rank_output()
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        *,
        tnt_micro_batch_size: int | None = None,
        tnt_distribute_dataset: bool = True,
        **kwargs: Any,
    ) -> Any:
        """The metrics over the whole dataset, computed by all ranks and known to each.

        Takes the arguments of `keras.Model.evaluate`, and two that `fit` explains.
        """
        self._require_compiled("evaluate")
        x, tnt_micro_batch_size = undistributed(x, tnt_micro_batch_size)
        if world.get_size() == 1:
            x, batch_size = _alone(x, batch_size, tnt_micro_batch_size)
            return super().evaluate(
                x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict, **kwargs
            )
        _tell_of_own_data("evaluation", tnt_distribute_dataset)
        feed = Feed.of(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps,
            micro_batch_size=tnt_micro_batch_size,
            distribute=tnt_distribute_dataset,
        )
        if not kwargs:  # `fit` calls with a mark of its own, and has built the model
            self._start_from_master(feed, again=False)
        with feed.explaining():
            return super().evaluate(
                feed,
                verbose=verbose if shows_output() else 0,
                steps=feed.steps_per_epoch,
                callbacks=callbacks,
                return_dict=return_dict,
                **kwargs,
            )

    @rank_output()
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
        *,
        tnt_micro_batch_size: int | None = None,
    ) -> Any:
        """The predictions for the whole dataset, computed by all ranks and known to each.

        Takes the arguments of `keras.Model.predict`, and one that `fit` explains.
        """
        x, tnt_micro_batch_size = undistributed(x, tnt_micro_batch_size)
        if world.get_size() == 1:
            x, batch_size = _alone(x, batch_size, tnt_micro_batch_size)
            return super().predict(x, batch_size, verbose, steps, callbacks)
        feed = Feed.of(
            x,
            batch_size=batch_size,
            steps_per_epoch=steps,
            micro_batch_size=tnt_micro_batch_size,
        )
        if feed.num_batches == 0:
            raise InputError("There are no samples in the data: `predict` needs at least one.")
        self._start_from_master(feed, again=False)
        verbose = verbose if shows_output() else 0
        if not callbacks:
            with feed.explaining(), prediction.kept_rows(self) as rows:
                super().predict(feed, verbose=verbose, steps=feed.steps_per_epoch)
            return rows.together()
        with feed.explaining(), prediction.gathered_rows(self):
            callbacks = prediction.stopping_together(callbacks)
            outputs = super().predict(
                feed, verbose=verbose, steps=feed.steps_per_epoch, callbacks=callbacks
            )
        prediction.end_together()
        return outputs

    # Single batches

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """One step on one global batch, which every rank passes and works on its part of."""
        self._require_compiled("train_on_batch")
        if world.get_size() == 1:
            return super().train_on_batch(x, y, sample_weight, class_weight, return_dict)
        if class_weight is not None:
            if sample_weight is not None:
                raise InputError("Pass `sample_weight` or `class_weight`, not both.")
            sample_weight = internals.data_adapter_utils.class_weight_to_sample_weights(
                y, class_weight
            )
        part = self._part((x, y, sample_weight))
        with self._given("train_function", iter([part])):
            return super().train_on_batch(x, y, sample_weight, return_dict=return_dict)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """The metrics of one global batch, which every rank passes."""
        self._require_compiled("test_on_batch")
        if world.get_size() == 1:
            return super().test_on_batch(x, y, sample_weight, return_dict)
        part = self._part((x, y, sample_weight))
        with self._given("test_function", iter([part])):
            return super().test_on_batch(x, y, sample_weight, return_dict=return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """The predictions for one global batch, which every rank passes."""
        if world.get_size() == 1:
            return super().predict_on_batch(x)
        part = self._part((x,))
        with self._given("predict_function", [part]), prediction.gathered_rows(self):
            return super().predict_on_batch(x)

    def _part(self, batch: tuple[Any, ...]) -> Part:
        tensors = tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), batch
        )
        spec = tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.TensorSpec.from_tensor(leaf), tensors
        )
        self._start_from_master(spec, again=False)
        return parts.cut(tensors, world.get_rank(), world.get_size())

    @contextmanager
    def _given(self, function_name: str, data: Any) -> Iterator[None]:
        """Makes one of Keras's functions work on `data`, whatever it is called with."""
        getattr(self, f"make_{function_name}")()
        function = getattr(self, function_name)
        setattr(self, function_name, lambda _: function(data))
        try:
            yield
        finally:
            setattr(self, function_name, function)

    # Saving: what is saved is the plain Keras model, by the master rank.

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Saves the plain Keras model, as `keras.Model.save`; only the master rank writes."""
        self._write("save", args, kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> None:
        """Saves the weights, as `keras.Model.save_weights`; only the master rank writes."""
        self._write("save_weights", args, kwargs)

    def export(self, *args: Any, **kwargs: Any) -> None:
        """Exports the plain Keras model; only the master rank writes."""
        self._write("export", args, kwargs)

    def _plain(self) -> Any:
        """This model, settings and all, as an object of the class it was made from."""
        return view(self, self._tnt_plain_class)

    def _write(self, method: str, args: Any, kwargs: Any) -> None:
        if world.is_master_rank():
            getattr(self._plain(), method)(*args, **kwargs)
        collectives.barrier()

    # Common ground

    def compile(self, *args: Any, **kwargs: Any) -> None:
        super().compile(*args, **kwargs)
        self._tnt_started = False

    def set_weights(self, weights: Any) -> None:
        super().set_weights(weights)
        self._tnt_started = False

    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        super().load_weights(*args, **kwargs)
        self._tnt_started = False

    def _require_compiled(self, method: str) -> None:
        if not self.compiled:
            raise InputError(
                f"`{method}` needs a compiled model: call "
                "`model.compile(optimizer=..., loss=...)` before it."
            )

    def _start_from_master(self, data: Feed | Any, again: bool = True) -> None:
        """Makes all ranks hold the master's weights, if they may hold others."""
        if self._tnt_started and not again:
            return
        state.build(self, data.spec if isinstance(data, Feed) else data)
        state.start_from_master(self)
        self._tnt_started = True


class Sequential(Model):
    """A stack of layers that trains on all ranks: `tnt.Model(keras.Sequential(layers))`.

    Args:
        layers: The layers, in order; more can be added with `add`.
        trainable: Whether its weights are to be trained.
        name: The name of the model.
    """

    def __new__(cls, layers: Any = None, trainable: bool = True, name: str | None = None) -> Any:
        return _distributed(keras.Sequential(layers, trainable=trainable, name=name))


def _alone(
    x: Any, batch_size: int | None, micro_batch_size: int | None, purpose: str = ""
) -> tuple[Any, int | None]:
    """The data of a rank without others, whose micro-batches are the batches."""
    x, options = in_batches(x, micro_batch_size, {"batch_size": batch_size}, 1, purpose)
    return x, options["batch_size"]


def _tell_of_own_data(purpose: str, distribute: bool) -> None:
    if not distribute:
        LOGGER.info("The %s data are not distributed: each rank works on its own.", purpose)


def _distributed(model: Any, parallel_strategy: ParallelStrategy = ParallelStrategy.DATA) -> Model:
    if isinstance(model, Model):
        raise InputError(
            f"The model '{model.name}' is a tnt.Model already: use it as it is, or pass the "
            "Keras model it was made from."
        )
    if not isinstance(model, keras.Model):
        raise InputError(
            f"tnt.Model takes a keras.Model, not {type(model).__name__}. "
            "Build the model with Keras first: `tnt.Model(keras.Sequential([...]))`."
        )
    if parallel_strategy is not ParallelStrategy.DATA:
        raise InputError(
            f"parallel_strategy is {parallel_strategy!r}; it can be tnt.ParallelStrategy.DATA."
        )
    distributed = view(model, _distributed_class(type(model)))
    vars(distributed).update(
        train_function=None,
        test_function=None,
        predict_function=None,
        _tnt_compiles_calls=False,
        _tnt_started=False,
    )
    if world.get_size() > 1 and model.built:
        state.start_from_master(distributed)
        distributed._tnt_started = True
    return distributed


_distributed_classes: dict[Any, Any] = {}


def _distributed_class(plain: Any) -> Any:
    """The class of the models that are a tnt.Model and a `plain` one."""
    if plain not in _distributed_classes:
        _distributed_classes[plain] = _make_distributed_class(plain)
    return _distributed_classes[plain]


def _make_distributed_class(plain: Any) -> Any:
    base = Sequential if issubclass(plain, keras.Sequential) else Model
    return type(
        plain.__name__,
        (RankSteps, plain, base),
        {
            "__module__": plain.__module__,
            "__doc__": plain.__doc__,
            # Keras makes clones by calling the class with the arguments of the plain one.
            "__new__": lambda cls, *args, **kwargs: _distributed(plain(*args, **kwargs)),
            # The instance takes over the attributes of one that was initialised.
            "__init__": lambda self, *args, **kwargs: None,
            "_tnt_plain_class": plain,
        },
    )


def view(model: keras.Model, cls: type[Any]) -> Any:
    """Another object of class `cls` with the layers, weights and settings of `model`."""
    blank = keras.Model.__new__(cls)
    # Keras binds these to the object they are made with.
    bound = {name: vars(blank)[name] for name in ("build", "quantize") if name in vars(blank)}
    vars(blank).update(vars(model))
    vars(blank).update(bound)
    return blank
