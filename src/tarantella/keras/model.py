"""A Keras model whose training, evaluation and prediction are shared by all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any

import keras
import tensorflow as tf

from tarantella.comm.agreement import all_ranks, check_same
from tarantella.data import micro_batch
from tarantella.data.micro_batch import MicroBatch
from tarantella.errors import InputError
from tarantella.internals import keras as internals
from tarantella.keras import (
    arguments,
    backup,
    callback_list,
    loading,
    prediction,
    saving,
    state,
    wrapping,
)
from tarantella.keras.adapter import RankDataAdapter, begins_anew, in_batches, split_for_validation
from tarantella.keras.distributed_dataset import undistributed
from tarantella.keras.thread_functions import with_communicators_of_thread
from tarantella.runtime import world
from tarantella.runtime.log import LOGGER
from tarantella.runtime.output import rank_output, shown

_ALL = frozenset({"train", "test"})


class ParallelStrategy(Enum):
    """How the work on a model is shared. There is one way; the rest are names of earlier versions.

    Attributes:
        DATA: Every rank holds the whole model and works on its part of every batch.
        PIPELINING: The layers of a model are divided. `tnt.Model` refuses it.
        ALL: Both. It is taken as `DATA`, with a warning.
    """

    DATA = "data"
    PIPELINING = "pipelining"
    ALL = "all"


class _PlainModel:
    """`model.model`; an attribute of that name that the user's model has is found before it."""

    def __get__(self, model: Any, owner: Any) -> Any:
        return self if model is None else model._plain()


class Model(keras.Model):
    """Makes a Keras model train on all ranks, with the result of one process.

    The object that comes back is a `keras.Model` of the class of the one passed in. Both
    have the same layers and weights; `compile` and `fit` concern only the one they are
    called on, so the plain model stays at hand for work that one rank does alone.

    Args:
        model: A Functional, Sequential or subclassed Keras model.
        parallel_strategy: `ParallelStrategy.DATA`.
        num_pipeline_stages: 1, as the layers of a model are not divided.

    Attributes:
        model: This model, as it is now, as a plain Keras model, for work that one rank does alone:
            the same layers, weights and optimizer, in a new object each time. A model that has an
            attribute `model` of its own keeps it; `tnt.Model` does not get in its way.

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

    model = _PlainModel()

    def __new__(
        cls,
        model: Any = None,
        parallel_strategy: Any = ParallelStrategy.DATA,
        num_pipeline_stages: Any = 1,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if cls is not Model:
            return super().__new__(cls)
        if args or kwargs:
            raise TypeError(
                "tnt.Model takes a Keras model, parallel_strategy and num_pipeline_stages, and "
                f"not {', '.join([*map(repr, args), *kwargs])}."
            )
        _require_data_parallelism(parallel_strategy, num_pipeline_stages)
        return _distributed(model)

    def __dir__(self) -> Iterator[str]:
        """The names that are there; without `model`, in which Keras would find all layers again."""
        offered = inspect.getattr_static(self, "model") is vars(Model)["model"]
        return (name for name in super().__dir__() if not (offered and name == "model"))

    # Whole runs over data

    @with_communicators_of_thread
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
        arguments.require_data(x, "fit")
        arguments.require_whole_numbers(epochs=epochs, initial_epoch=initial_epoch)
        arguments.require_steps(x, steps_per_epoch=steps_per_epoch)
        if validation_data is not None or validation_split:
            arguments.require_validation(validation_split, validation_freq)
            validated = x if validation_data is None else validation_data
            arguments.require_steps(validated, validation_steps=validation_steps)
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
            given = {
                "x": x, "y": y, "batch_size": batch_size, "epochs": epochs,
                "verbose": shown(verbose), "callbacks": callbacks,
                "validation_split": validation_split, "validation_data": validation_data,
                "shuffle": shuffle, "class_weight": class_weight, "sample_weight": sample_weight,
                "initial_epoch": initial_epoch, "steps_per_epoch": steps_per_epoch,
                "validation_steps": validation_steps,
                "validation_batch_size": validation_batch_size,
                "validation_freq": validation_freq,
            }  # fmt: skip
            with self._kept_alone(**given) as kept:
                return super().fit(**kept)
        check_same(
            {
                "epochs": int(epochs),
                "initial_epoch": int(initial_epoch),
                "steps_per_epoch": tnt_distribute_dataset and str(steps_per_epoch),
                "validation_freq": str(validation_freq),
                "validation": bool(validation_split) or validation_data is not None,
            },
            "the arguments of `fit`",
        )
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_for_validation(
                (x, y, sample_weight), validation_split
            )
        _tell_of_own_data("training", tnt_distribute_dataset)
        feed = RankDataAdapter.of(
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
            validation = RankDataAdapter.of(
                *keras.utils.unpack_x_y_sample_weight(validation_data),
                batch_size=validation_batch_size,
                steps_per_epoch=validation_steps,
                micro_batch_size=tnt_validation_micro_batch_size,
                distribute=tnt_distribute_validation_dataset,
                purpose="validation_",
            )
        self._start_from_master(feed)
        feed.on_next_step(lambda total: self._tnt_advice.parts_have(total // world.get_size()))
        with (
            feed.explaining(),
            validation.explaining() if validation else nullcontext(),
            self._callbacks(
                callbacks, feed, shown(verbose), epochs=epochs, add_history=True
            ) as container,
            backup.kept(
                self,
                container,
                backup.backup_of(callback_list.listed(callbacks)),
                container.common.save_freq,
                feed.begins_anew,
                initial_epoch,
                lambda: state.build(self, feed.spec),
            ) as callbacks,
        ):
            return super().fit(
                feed,
                epochs=epochs,
                callbacks=callbacks,
                validation_data=validation,
                initial_epoch=initial_epoch,
                steps_per_epoch=feed.steps_per_epoch,
                validation_steps=validation.steps_per_epoch if validation else None,
                validation_freq=validation_freq,
            )

    @with_communicators_of_thread
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
        arguments.require_data(x, "evaluate")
        arguments.require_steps(x, steps=steps)
        x, tnt_micro_batch_size = undistributed(x, tnt_micro_batch_size)
        if world.get_size() == 1:
            x, batch_size = _alone(x, batch_size, tnt_micro_batch_size)
            return super().evaluate(
                x,
                y,
                batch_size,
                shown(verbose),
                sample_weight,
                steps,
                callbacks,
                return_dict,
                **kwargs,
            )
        _tell_of_own_data("evaluation", tnt_distribute_dataset)
        feed = RankDataAdapter.of(
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
        with (
            feed.explaining(),
            self._callbacks(callbacks, feed, shown(verbose)) as callbacks,
        ):
            return super().evaluate(
                feed,
                steps=feed.steps_per_epoch,
                callbacks=callbacks,
                return_dict=return_dict,
                **kwargs,
            )

    @with_communicators_of_thread
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
        tnt_distribute_dataset: bool = True,
    ) -> Any:
        """The predictions for the whole dataset, computed by all ranks and known to each.

        Takes the arguments of `keras.Model.predict`, and two that `fit` explains. With
        `tnt_distribute_dataset=False` the whole dataset is what all ranks pass: the predictions
        come step after step, in each those of rank 0 first. They are in the order of `dataset` if
        each rank passes `dataset.shard(tnt.get_size(), tnt.get_rank())` of a batched one.
        """
        arguments.require_data(x, "predict")
        arguments.require_steps(x, steps=steps)
        x, tnt_micro_batch_size = undistributed(x, tnt_micro_batch_size)
        if world.get_size() == 1:
            x, batch_size = _alone(x, batch_size, tnt_micro_batch_size)
            with _samples_needed():
                return super().predict(x, batch_size, shown(verbose), steps, callbacks)
        _tell_of_own_data("prediction", tnt_distribute_dataset)
        feed = RankDataAdapter.of(
            x,
            batch_size=batch_size,
            steps_per_epoch=steps,
            micro_batch_size=tnt_micro_batch_size,
            distribute=tnt_distribute_dataset,
        )
        self._start_from_master(feed, again=False)
        with (
            _samples_needed(),
            feed.explaining(),
            self._callbacks(callbacks, feed, shown(verbose)) as callbacks,
        ):
            if callbacks.common.given:
                with prediction.gathered_rows(self):
                    return super().predict(feed, steps=feed.steps_per_epoch, callbacks=callbacks)
            with prediction.kept_rows(self) as rows:
                super().predict(feed, steps=feed.steps_per_epoch, callbacks=callbacks)
            return rows.together()

    @contextmanager
    def _callbacks(
        self, callbacks: Any, feed: RankDataAdapter, verbose: Any, **options: Any
    ) -> Iterator[callback_list.RankCallbacks]:
        """The callbacks of a run over data, which run in step with those of the other ranks."""
        if isinstance(callbacks, (callback_list.RankCallbacks, backup.KeptCallbacks)):
            yield callbacks  # of `fit`, which validates
            return
        options = {"epochs": 1, **options}
        options["epochs"], steps = internals.limited(
            options["epochs"], feed.steps_per_epoch or feed.num_batches
        )
        with (
            callback_list.in_step(
                self, callbacks, verbose=verbose, steps=steps, **options
            ) as container,
            self._batch_logs(container.common.reads),
        ):
            yield container

    @contextmanager
    def _kept_alone(self, **given: Any) -> Iterator[dict[str, Any]]:
        """The arguments of a `fit` of one rank, whose training may be backed up.

        Args:
            given: The arguments as they were passed.
        """
        callbacks = callback_list.listed(given["callbacks"])
        callback = backup.backup_of(callbacks)
        if callback is None:
            yield given
            return
        data = given["x"], given["y"], given["sample_weight"]
        validation = given["validation_data"]
        if given["validation_split"] and validation is None:
            data, validation = split_for_validation(data, given["validation_split"])
        options = {
            name: given[name]
            for name in ("batch_size", "steps_per_epoch", "shuffle", "class_weight")
        }
        adapter = internals.data_adapters.get_data_adapter(*data, **options)
        steps = given["steps_per_epoch"]
        epochs, shown_steps = internals.limited(given["epochs"], steps or adapter.num_batches)
        inner = keras.callbacks.CallbackList(
            backup.tidying(callbacks),
            add_history=True,
            add_progbar=given["verbose"] != 0,
            model=self,
            verbose=given["verbose"],
            epochs=epochs,
            steps=shown_steps,
        )
        with backup.kept(
            self,
            inner,
            callback,
            callback.save_freq,
            lambda: begins_anew(adapter, steps),
            given["initial_epoch"],
            lambda: state.build(self, adapter.get_tf_dataset().element_spec),
        ) as container:
            yield {
                **given,
                **dict.fromkeys(("y", "sample_weight", "batch_size", "class_weight")),
                "x": adapter,
                "shuffle": False,
                "validation_split": 0.0,
                "validation_data": validation,
                "validation_batch_size": given["validation_batch_size"] or given["batch_size"],
                "callbacks": container,
            }

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
        with self._batch_logs(_ALL), self._given("train_function", iter([part])):
            return super().train_on_batch(x, y, sample_weight, return_dict=return_dict)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """The metrics of one global batch, which every rank passes."""
        self._require_compiled("test_on_batch")
        if world.get_size() == 1:
            return super().test_on_batch(x, y, sample_weight, return_dict)
        part = self._part((x, y, sample_weight))
        with self._batch_logs(_ALL), self._given("test_function", iter([part])):
            return super().test_on_batch(x, y, sample_weight, return_dict=return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """The predictions for one global batch, which every rank passes."""
        if world.get_size() == 1:
            return super().predict_on_batch(x)
        part = self._part((x,))
        with self._given("predict_function", [part]), prediction.gathered_rows(self):
            return super().predict_on_batch(x)

    def _part(self, batch: tuple[Any, ...]) -> MicroBatch:
        tensors = tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), batch
        )
        spec = tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.TensorSpec.from_tensor(leaf), tensors
        )
        self._start_from_master(spec, again=False)
        return micro_batch.cut(tensors, world.get_rank(), world.get_size())

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

    def save(
        self,
        filepath: Any,
        overwrite: bool = True,
        zipped: bool | None = None,
        *,
        tnt_save_all_devices: bool = False,
        **kwargs: Any,
    ) -> None:
        """Saves the plain Keras model, as `keras.Model.save`: all of it, or nothing.

        The master rank writes, and waits for no other rank. The others wait for the master, so
        that each may read the file next. To call it on the master alone is fine, too.

        Args:
            filepath: Where to; with no ending, it becomes a folder, as with `zipped=False`.
            overwrite: Whether to overwrite what is there, or to ask.
            zipped: Whether to write one file, or a folder.
            tnt_save_all_devices: Whether every rank writes, on a disk of its own, say. Then all
                must call it.
            kwargs: Further options of Keras.
        """
        saving.save_model(
            self._plain(), filepath, overwrite, zipped, tnt_save_all_devices, **kwargs
        )

    def save_weights(
        self,
        filepath: Any,
        overwrite: bool = True,
        max_shard_size: float | None = None,
        *,
        tnt_save_all_devices: bool = False,
    ) -> None:
        """Saves the weights, as `keras.Model.save_weights`, in the way of `save`.

        With no ending, ".weights.h5" is added, also by `load_weights`.
        """
        options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        saving.save_weights(self._plain(), filepath, overwrite, tnt_save_all_devices, **options)

    def export(
        self, filepath: Any, *args: Any, tnt_save_all_devices: bool = False, **kwargs: Any
    ) -> None:
        """Exports the plain Keras model, as `keras.Model.export`, in the way of `save`."""
        saving.export(self._plain(), filepath, *args, everywhere=tnt_save_all_devices, **kwargs)

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Loads weights, as `keras.Model.load_weights`; with no ending, what was saved so."""
        found = loading.find_weights(filepath)
        with loading.whole(found):
            super().load_weights(found, *args, **kwargs)
        self._tnt_started = False
        loading.warn_of_useless_weights(self, found)

    def to_yaml(self, **kwargs: Any) -> str:
        """The configuration, as `to_json` has it, in YAML.

        Args:
            kwargs: Options of `yaml.safe_dump`.
        """
        return loading.as_yaml(self.to_json(), **kwargs)

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> Any:
        """Makes a model from what `get_config` of another returned, with new weights."""
        return distributed(lambda: loading.from_config(config, custom_objects), "from_config")

    def _plain(self) -> Any:
        """This model, settings and all, as an object of the class it was made from."""
        return wrapping.plain(self)

    # Common ground

    @staticmethod
    def _tnt_wrap(model: Any) -> Model:
        """Wraps a model as the class of this one does, for what Keras makes from a config."""
        return _distributed(model)

    @staticmethod
    def _tnt_rebuild(rebuild: Callable[..., Any], *args: Any) -> Any:
        """A copy, or what was pickled. One rank alone can make one, so no other is asked."""
        return _wrapped(rebuild(*args))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        super().compile(*args, **kwargs)
        self._tnt_started = False

    def compile_from_config(self, config: Any) -> None:
        if self._tnt_plain_class.compile is not keras.Model.compile:
            super().compile_from_config(config)  # which says that it cannot
            return
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

    def set_weights(self, weights: Any) -> None:
        super().set_weights(weights)
        self._tnt_started = False

    def _require_compiled(self, method: str) -> None:
        if not self.compiled:
            raise InputError(
                f"`{method}` needs a compiled model: call "
                "`model.compile(optimizer=..., loss=...)` before it."
            )

    def _start_from_master(self, data: RankDataAdapter | Any, again: bool = True) -> None:
        """Makes all ranks hold the master's weights, if any of them may hold others."""
        spec = data.spec if isinstance(data, RankDataAdapter) else data
        arguments.require_numbers(self, spec)
        if not again and all_ranks(self._tnt_started):
            return
        self._take_from_master()

    def _take_from_master(self) -> None:
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


@contextmanager
def _samples_needed() -> Iterator[None]:
    """Says what is wrong where Keras has no prediction to return."""
    try:
        yield
    except UnboundLocalError as error:
        if "batch_outputs" not in str(error):
            raise
        raise InputError(
            "There are no samples in the data: `predict` needs at least one."
        ) from None


def _tell_of_own_data(purpose: str, distribute: bool) -> None:
    if not distribute:
        LOGGER.info("The %s data are not distributed: each rank works on its own.", purpose)


def _require_data_parallelism(strategy: Any, num_pipeline_stages: Any) -> None:
    """Refuses to divide a model, which earlier versions could."""
    if strategy is ParallelStrategy.PIPELINING:
        raise InputError(
            "tnt.ParallelStrategy.PIPELINING is not supported: the layers of a model are not "
            "divided between ranks. Use tnt.ParallelStrategy.DATA, or leave it out."
        )
    if strategy is ParallelStrategy.ALL:
        LOGGER.warning(
            "tnt.ParallelStrategy.ALL is taken as DATA: every rank holds the whole model."
        )
    elif strategy is not ParallelStrategy.DATA:
        raise InputError(f"parallel_strategy is {strategy!r}; it can be tnt.ParallelStrategy.DATA.")
    if num_pipeline_stages != 1:
        raise InputError(
            f"num_pipeline_stages is {num_pipeline_stages!r}; it can be 1: the layers of a model "
            "are not divided between ranks. Leave it out."
        )


def _distributed(model: Any) -> Model:
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
    wrapped = _wrapped(model)
    if world.get_size() > 1 and model.built:
        wrapped._take_from_master()
    return wrapped


def _wrapped(model: keras.Model) -> Any:
    return wrapping.wrapped(model, Sequential if isinstance(model, keras.Sequential) else Model)


def distributed(make: Callable[[], Any], call: str) -> Model:
    """A tnt.Model of what `make` returns; if that fails on any rank, it fails on all."""
    return _distributed(saving.on_all_ranks(call, make))
