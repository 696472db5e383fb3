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
from tarantella.comm.thread_communicators import communicators_of_this_thread
from tarantella.data import micro_batch
from tarantella.data.micro_batch import MicroBatch
from tarantella.errors import InputError
from tarantella.internals import keras as internals
from tarantella.keras import (
    arguments,
    callback_placement,
    loading,
    master_weights,
    plain_training,
    prediction,
    resumption,
    saving,
    tracker_fit,
    wrapping,
)
from tarantella.keras.adapter import RankDataAdapter, restarts_each_epoch, split_for_validation
from tarantella.keras.backup_files import backup_callback
from tarantella.keras.callback_agreement import followed_by, listed
from tarantella.keras.callback_list import RankCallbacks
from tarantella.keras.callback_rules import stand_in_for
from tarantella.keras.distributed_dataset import undistributed
from tarantella.keras.measured import measured_fit, stated_batch_size
from tarantella.keras.micro_batch_size import in_batches
from tarantella.keras.step import prepare as prepare_steps
from tarantella.keras.thread_functions import with_communicators_of_thread
from tarantella.runtime import run_report, world
from tarantella.runtime.configuration import GRADIENT_TYPES
from tarantella.runtime.log import LOGGER
from tarantella.runtime.meter import COMPUTE, EVALUATION, METER
from tarantella.runtime.progress_output import progress_output, shown

_ALL = frozenset({"train", "test"})


class ParallelStrategy(Enum):
    """How the ranks share the work. There is one way; the other names are from earlier versions.

    Attributes:
        DATA: Every rank holds the whole model and works on its micro-batch of every batch.
        PIPELINING: The layers of a model are divided between ranks. `tnt.Model` refuses it.
        ALL: Both. `tnt.Model` treats it as `DATA`, with a warning.
    """

    DATA = "data"
    PIPELINING = "pipelining"
    ALL = "all"


class _PlainModel:
    """`model.model`; if the user's model has an attribute of that name, Python finds that first."""

    def __get__(self, model: Any, owner: Any) -> Any:
        if model is None:
            return self
        plain = model._plain()
        plain_training.note_wrapped(plain)
        return plain


class Model(keras.Model):
    """Makes a Keras model train on all ranks, with the same result as in one process.

    Returns a `keras.Model` of the same class as the model passed in. The two share their layers
    and weights, but `compile` and `fit` affect only the one they are called on. So the plain model
    can still be used for work that one rank does alone.

    What is not listed here is inherited from `keras.Model <https://keras.io/api/models/model/>`_
    and from the class of your model: `summary`, `get_layer`, your own methods, and so on.

    Args:
        model (keras.Model): A Functional, Sequential or subclassed Keras model.
        parallel_strategy (ParallelStrategy): `ParallelStrategy.DATA`, the only one supported.
        num_pipeline_stages (int): 1, as the layers of a model are not divided between ranks.
        gradient_type (str | None): The type in which gradients cross the network: "float32",
            "bfloat16" or "float16". By default, what `--gradient-type` says.

    Attributes:
        model (keras.Model): A plain Keras model with the layers, weights and optimizer of this one,
            for work that one rank does alone; a new object each time. If your model has its own
            attribute `model`, that is kept instead.

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

    _tnt_batch_size: int
    _tnt_gradient_type: str
    _tnt_has_master_weights: bool
    _tnt_plain_class: Any

    model = _PlainModel()

    def __new__(
        cls,
        model: Any = None,
        parallel_strategy: Any = ParallelStrategy.DATA,
        num_pipeline_stages: Any = 1,
        gradient_type: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if cls is not Model:
            return super().__new__(cls)
        if args or kwargs:
            raise TypeError(
                "tnt.Model takes a Keras model, parallel_strategy, num_pipeline_stages and "
                f"gradient_type, not {', '.join([*map(repr, args), *kwargs])}."
            )
        _require_data_parallelism(parallel_strategy, num_pipeline_stages)
        _require_gradient_type(gradient_type)
        distributed = _distributed(model)
        if gradient_type is not None:
            distributed._tnt_gradient_type = gradient_type
        return distributed

    def __dir__(self) -> Iterator[str]:
        """All names but our `model`, in which Keras would find all layers a second time."""
        offered = inspect.getattr_static(self, "model") is vars(Model)["model"]
        return (name for name in super().__dir__() if not (offered and name == "model"))

    # Passes over data

    @with_communicators_of_thread
    @progress_output()
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

        All ranks have to call it, with the same data and the same arguments. Each rank trains on
        its micro-batch of every batch. Arguments that do not start with `tnt_` are those of
        `keras.Model.fit <https://keras.io/api/models/model_training_apis/#fit-method>`_.

        Args:
            x (array, tensor, tf.data.Dataset, keras.utils.PyDataset, generator, DataLoader):
                The inputs: anything that Keras takes, also nested; or batches of inputs and
                targets.
            y (array, tensor): The targets, if `x` does not contain them.
            batch_size: The size of the *global* batch, if `x` is not in batches already; 32 if you
                do not pass it.
            epochs: The epoch to stop after, counted from 1.
            verbose (str, int): 0 for no output, 1 for a progress bar, 2 for a line for each epoch;
                "auto" for a bar on a terminal, and lines elsewhere. Output appears once.
            callbacks (list of Keras callbacks): They get the logs of the global batches;
                `tnt.keras.callbacks.Callback` says on which ranks they run.
            validation_split: The fraction of arrays, taken from their end, to validate with.
            validation_data (tuple, tf.data.Dataset, ...): What to validate with after each epoch,
                on all ranks.
            shuffle (bool): Whether to shuffle arrays before each epoch. With
                `keras.utils.set_random_seed`, the order is that of one process.
            class_weight (dict[int, float]): How much a sample counts, by its class.
            sample_weight (array, tensor): How much each sample counts.
            initial_epoch: The epoch to start from, counted from 0.
            steps_per_epoch: How many global batches make an epoch; by default, all there are.
            validation_steps: The same for the validation data.
            validation_batch_size: The size of the global batch for validation; that of training
                if you do not pass it.
            validation_freq (int, list[int]): After how many epochs to validate, or after which.
            tnt_micro_batch_size: How many samples of a batch each rank gets. It sets the batch
                size of data that are not in batches; otherwise it must match the batch size.
            tnt_validation_micro_batch_size: The same for the validation data.
            tnt_distribute_dataset: False if every rank passes its own shard of the data: a step
                then takes one batch from each rank. Ranks that run out of batches wait for the
                others.
            tnt_distribute_validation_dataset: The same for the validation data.

        Returns:
            keras.callbacks.History: The logs of the global batches, the same on every rank.

        Raises:
            InputError: If an argument makes no sense, or the model is not compiled.
            MismatchError: If the ranks pass different arguments, or data of different structure.

        Example:

        ```python
        import keras
        import tensorflow as tf
        import tarantella as tnt

        keras.utils.set_random_seed(1)
        x = tf.random.stateless_normal((100, 4), seed=(1, 2))
        y = tf.reduce_sum(x, axis=1, keepdims=True)
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(100).batch(32)

        model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
        model.compile(optimizer="adam", loss="mse")
        history = model.fit(dataset, epochs=2)  # on two ranks, 16 samples of each batch on each
        history = model.fit(x, y, batch_size=32, validation_split=0.1, initial_epoch=2, epochs=4)
        losses = history.history["val_loss"]
        ```
        """
        self._require_compiled("fit")
        arguments.require_data(x, "fit")
        arguments.require_whole_numbers(epochs=epochs, initial_epoch=initial_epoch)
        arguments.require_steps(x, steps_per_epoch=steps_per_epoch)
        if validation_data is not None or validation_split:
            validated = x if validation_data is None else validation_data
            arguments.require_validation(
                validated, validation_split, validation_freq, validation_steps
            )
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
            if run_report.is_wanted():
                self._tnt_batch_size = stated_batch_size(x, batch_size)
            with (
                measured_fit(callbacks) as given["callbacks"],
                self._backed_up_alone(**given) as resumed,
            ):
                # A tracker's `fit` may take an argument for given that is there.
                given = {name: value for name, value in resumed.items() if value is not None}
                return super().fit(**given)
        check_same(
            {
                "epochs": int(epochs),
                "initial_epoch": int(initial_epoch),
                "steps_per_epoch": tnt_distribute_dataset and str(steps_per_epoch),
                "validation_freq": str(validation_freq),
                "validation": bool(validation_split) or validation_data is not None,
                "gradient_type": self._tnt_gradient_type,
            },
            "the arguments of `fit`",
        )
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_for_validation(
                (x, y, sample_weight), validation_split
            )
        adapter = _adapter(
            "training",
            (x, y, sample_weight),
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
            micro_batch_size=tnt_micro_batch_size,
            distribute=tnt_distribute_dataset,
        )
        validation = None
        if validation_data is not None:
            if validation_batch_size is None and tnt_validation_micro_batch_size is None:
                validation_batch_size = batch_size or (tnt_micro_batch_size and adapter.batch_size)
            validation = _adapter(
                "validation",
                keras.utils.unpack_x_y_sample_weight(validation_data),
                batch_size=validation_batch_size,
                steps_per_epoch=validation_steps,
                micro_batch_size=tnt_validation_micro_batch_size,
                distribute=tnt_distribute_validation_dataset,
                argument_prefix="validation_",
            )
        return self._fit_on_ranks(
            adapter,
            validation,
            callbacks,
            verbose=shown(verbose),
            epochs=epochs,
            initial_epoch=initial_epoch,
            validation_freq=validation_freq,
        )

    def _fit_on_ranks(
        self,
        adapter: RankDataAdapter,
        validation: RankDataAdapter | None,
        callbacks: Any,
        *,
        verbose: Any,
        epochs: int,
        initial_epoch: int,
        validation_freq: Any,
    ) -> Any:
        """Trains on this rank's micro-batches, in step with the other ranks."""
        self._start_from_master(adapter.spec)
        if initial_epoch < epochs:
            self._prepare_training(adapter.spec)
        if (steps := int(adapter.steps_per_epoch or 0)) > 0:  # -1 is all there are
            in_a_call = int(self.steps_per_execution)
            of_an_epoch = -(-steps // in_a_call) * in_a_call
            adapter.most_steps = of_an_epoch * max(int(epochs) - int(initial_epoch), 0)
        adapter.on_step_size(lambda total: self._tnt_advice.ranks_have(total // world.get_size()))
        with (
            adapter.explaining(),
            validation.explaining() if validation else nullcontext(),
            self._callbacks(
                callbacks, adapter, verbose, epochs=epochs, add_history=True
            ) as container,
            resumption.backed_up(
                self,
                container,
                backup_callback(listed(callbacks)),
                container.common.save_freq,
                adapter.restarts_each_epoch,
                initial_epoch,
                lambda: master_weights.build(self, adapter.spec),
            ) as callbacks,
            measured_fit(container, self._tnt_steps["train"].note),
            self._tnt_steps["train"].over(adapter.comparison),
        ):
            # Past the `fit` of a tracker, if the master calls that.
            fit = super().fit if tracker_fit.is_called() else super(keras.Model, self).fit
            return fit(
                adapter,
                epochs=epochs,
                callbacks=callbacks,
                validation_data=validation,
                initial_epoch=initial_epoch,
                steps_per_epoch=adapter.steps_per_epoch,
                validation_steps=validation.steps_per_epoch if validation else None,
                validation_freq=validation_freq,
            )

    @with_communicators_of_thread
    @progress_output()
    @METER.part(EVALUATION)
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
        """Computes the metrics of the whole dataset on all ranks, and returns them on each.

        All ranks have to call it, with the same data. It takes two arguments more than
        `keras.Model.evaluate <https://keras.io/api/models/model_training_apis/#evaluate-method>`_.

        Args:
            x (array, tensor, tf.data.Dataset, ...): The inputs, as in `fit`.
            y (array, tensor): The targets, if `x` does not contain them.
            batch_size: The size of the global batch, if `x` is not in batches already.
            verbose (str, int): As in `fit`.
            sample_weight (array, tensor): How much each sample counts.
            steps: How many global batches to use; by default, all there are.
            callbacks (list of Keras callbacks): As in `fit`.
            return_dict: Whether to return the metrics by name.
            tnt_micro_batch_size: How many samples of a batch each rank gets, as in `fit`.
            tnt_distribute_dataset: False if every rank passes its own shard of the data, as in
                `fit`; the metrics are those of all shards together.
            kwargs: Nothing: Keras uses them inside `fit`.

        Returns:
            float | list[float] | dict[str, float]: The loss; with metrics, a list that starts with
            the loss, or a dict. They are those of all the data, the same on every rank.

        Example:

        ```python
        import keras
        import numpy as np
        import tarantella as tnt

        model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
        model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
        x, y = np.ones((50, 4)), np.ones((50, 1))
        loss, error = model.evaluate(x, y, batch_size=16)
        metrics = model.evaluate(x, y, batch_size=16, return_dict=True)
        assert metrics["mae"] == error
        ```
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
        adapter = _adapter(
            "evaluation",
            (x, y, sample_weight),
            batch_size=batch_size,
            steps_per_epoch=steps,
            micro_batch_size=tnt_micro_batch_size,
            distribute=tnt_distribute_dataset,
        )
        if not kwargs:  # `fit` has started from the master, and passes an extra argument
            self._start_from_master(adapter.spec, again=False)
        with (
            adapter.explaining(),
            self._tnt_steps["test"].over(adapter.comparison),
            self._callbacks(callbacks, adapter, shown(verbose)) as callbacks,
        ):
            return super().evaluate(
                adapter,
                steps=adapter.steps_per_epoch,
                callbacks=callbacks,
                return_dict=return_dict,
                **kwargs,
            )

    @with_communicators_of_thread
    @progress_output()
    @METER.part(EVALUATION)
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
        """Computes the predictions for the whole dataset on all ranks, and returns them on each.

        All ranks have to call it, with the same data; to predict on one rank alone, use the plain
        model. It takes two arguments more than
        `keras.Model.predict <https://keras.io/api/models/model_training_apis/#predict-method>`_.

        Args:
            x (array, tensor, tf.data.Dataset, ...): The inputs, as in `fit`.
            batch_size: The size of the global batch, if `x` is not in batches already.
            verbose (str, int): As in `fit`.
            steps: How many global batches to use; by default, all there are.
            callbacks (list of Keras callbacks): As in `fit`.
            tnt_micro_batch_size: How many samples of a batch each rank gets, as in `fit`.
            tnt_distribute_dataset: False if every rank passes its own shard of the data. Then the
                predictions for all shards are ordered by step, and by rank within a step. That is
                the order of a batched `dataset` if each rank passes
                `dataset.shard(tnt.get_size(), tnt.get_rank())`.

        Returns:
            np.ndarray: The predictions for all samples, in their order, the same on every rank;
            nested as the model's outputs are, if it has several.

        Example:

        ```python
        import keras
        import numpy as np
        import tarantella as tnt

        model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]))
        predictions = model.predict(np.ones((50, 4)), batch_size=16)
        assert predictions.shape == (50, 3)
        ```
        """
        arguments.require_data(x, "predict")
        arguments.require_steps(x, steps=steps)
        x, tnt_micro_batch_size = undistributed(x, tnt_micro_batch_size)
        if world.get_size() == 1:
            x, batch_size = _alone(x, batch_size, tnt_micro_batch_size)
            with followed_by(callbacks, prediction.NeedsSamples()) as callbacks:
                return super().predict(x, batch_size, shown(verbose), steps, callbacks)
        adapter = _adapter(
            "prediction",
            (x,),
            batch_size=batch_size,
            steps_per_epoch=steps,
            micro_batch_size=tnt_micro_batch_size,
            distribute=tnt_distribute_dataset,
        )
        self._start_from_master(adapter.spec, again=False)
        with (
            adapter.explaining(),
            self._tnt_steps["predict"].over(adapter.comparison),
            self._callbacks(callbacks, adapter, shown(verbose)) as container,
            followed_by(container, prediction.NeedsSamples()) as callbacks,
        ):
            if container.common.given:
                with prediction.gathered_predictions(self):
                    return super().predict(
                        adapter, steps=adapter.steps_per_epoch, callbacks=callbacks
                    )
            with prediction.kept_predictions(self) as predictions:
                super().predict(adapter, steps=adapter.steps_per_epoch, callbacks=callbacks)
            return predictions.gather()

    @contextmanager
    def _callbacks(
        self, callbacks: Any, adapter: RankDataAdapter, verbose: Any, **options: Any
    ) -> Iterator[RankCallbacks]:
        """The callbacks of a pass over data, in step with those of the other ranks."""
        if isinstance(callbacks, (RankCallbacks, resumption.ResumingCallbacks)):
            yield callbacks  # those of `fit`, which validates
            return
        options = {"epochs": 1, **options}
        options["epochs"], steps = internals.limited(
            options["epochs"], adapter.steps_per_epoch or adapter.num_batches
        )
        with (
            callback_placement.in_step(
                self, callbacks, verbose=verbose, steps=steps, **options
            ) as container,
            self._batch_logs(container.common.reads),
        ):
            yield container

    @contextmanager
    def _backed_up_alone(self, **given: Any) -> Iterator[dict[str, Any]]:
        """The arguments of a `fit` on one rank, whose training may be backed up.

        Args:
            given: The arguments that the user passed.
        """
        callbacks = listed(given["callbacks"])
        callback = backup_callback(callbacks)
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
            [stand_in_for(each) or each for each in callbacks],
            add_history=True,
            add_progbar=given["verbose"] != 0,
            model=self,
            verbose=given["verbose"],
            epochs=epochs,
            steps=shown_steps,
        )
        with resumption.backed_up(
            self,
            inner,
            callback,
            callback.save_freq,
            lambda: restarts_each_epoch(adapter, steps),
            given["initial_epoch"],
            lambda: master_weights.build(self, adapter.get_tf_dataset().element_spec),
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

    @with_communicators_of_thread
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Trains on one global batch, which every rank passes, as `keras.Model.train_on_batch`.

        Args:
            x (array, tensor): The inputs of the whole batch, the same on all ranks.
            y (array, tensor): The targets.
            sample_weight (array, tensor): How much each sample counts.
            class_weight (dict[int, float]): How much a sample counts, by its class.
            return_dict: Whether to return the metrics by name.

        Returns:
            float | list[float] | dict[str, float]: The loss and the metrics, as from `evaluate`.
        """
        self._require_compiled("train_on_batch")
        if world.get_size() == 1:
            return super().train_on_batch(x, y, sample_weight, class_weight, return_dict)
        if class_weight is not None:
            if sample_weight is not None:
                raise InputError("Pass `sample_weight` or `class_weight`, not both.")
            sample_weight = internals.data_adapter_utils.class_weight_to_sample_weights(
                y, class_weight
            )
        own = self._micro_batch((x, y, sample_weight))
        if self.train_function is None:
            self._prepare_training(_specs_of(own.data))
        with (
            METER.part(COMPUTE),
            self._batch_logs(_ALL),
            self._given("train_function", iter([own])),
        ):
            METER.note_step(int(own.count))
            return super().train_on_batch(x, y, sample_weight, return_dict=return_dict)

    @with_communicators_of_thread
    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Returns the metrics of one global batch, which every rank passes.

        Args:
            x (array, tensor): The inputs of the whole batch, the same on all ranks.
            y (array, tensor): The targets.
            sample_weight (array, tensor): How much each sample counts.
            return_dict: Whether to return the metrics by name.

        Returns:
            float | list[float] | dict[str, float]: The loss and the metrics, as from `evaluate`.
        """
        self._require_compiled("test_on_batch")
        if world.get_size() == 1:
            return super().test_on_batch(x, y, sample_weight, return_dict)
        own = self._micro_batch((x, y, sample_weight))
        with self._batch_logs(_ALL), self._given("test_function", iter([own])):
            return super().test_on_batch(x, y, sample_weight, return_dict=return_dict)

    @with_communicators_of_thread
    def predict_on_batch(self, x: Any) -> Any:
        """Returns the predictions for one global batch, which every rank passes.

        Args:
            x (array, tensor): The inputs of the whole batch, the same on all ranks.

        Returns:
            np.ndarray: The predictions for the whole batch.
        """
        if world.get_size() == 1:
            return super().predict_on_batch(x)
        own = self._micro_batch((x,))
        with self._given("predict_function", [own]), prediction.gathered_predictions(self):
            return super().predict_on_batch(x)

    def _micro_batch(self, batch: tuple[Any, ...]) -> MicroBatch:
        """This rank's micro-batch of a global batch."""
        tensors = tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), batch
        )
        self._start_from_master(_specs_of(tensors), again=False)
        return micro_batch.cut(tensors, world.get_rank(), world.get_size())

    def _prepare_training(self, spec: Any) -> None:
        """Makes the variables of a step before it is traced, the same on all ranks.

        The master rank may have some already, if it has evaluated the plain model alone.
        """
        if self.run_eagerly:
            return
        prepare_steps()
        if self._has_steps_of_keras:
            master_weights.build_training_state(self, spec)
        has_state = internals.has_training_state(self)
        self._tnt_traces_alike = all_ranks(has_state) or all_ranks(not has_state)

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

    # Saving: the master rank saves the plain Keras model.

    def save(
        self,
        filepath: Any,
        overwrite: bool = True,
        zipped: bool | None = None,
        *,
        tnt_save_all_devices: bool = False,
        **kwargs: Any,
    ) -> None:
        """Saves the plain Keras model, as `keras.Model.save` does: completely, or not at all.

        The master rank writes, and waits for no other rank. The others wait for the master, so
        they can read the file afterwards. You can also call `save` on the master alone.

        Args:
            filepath (str, pathlib.Path): The path. If it has no extension, the model is saved as a
                folder, as with `zipped=False`.
            overwrite: If False, ask before overwriting a file.
            zipped: If False, write a folder instead of one file.
            tnt_save_all_devices: Whether every rank writes, for example to its own disk. All ranks
                must then call `save`.
            kwargs: Further arguments for
                `keras.Model.save <https://keras.io/api/models/model_saving_apis/>`_.

        Example:

        ```python
        import keras
        import tarantella as tnt

        model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
        model.compile(optimizer="adam", loss="mse")
        model.save("trained.keras")
        plain = keras.models.load_model("trained.keras")  # without Tarantella
        ```
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
        """Saves the weights, as `keras.Model.save_weights` does, with the guarantees of `save`.

        Args:
            filepath (str, pathlib.Path): The path. Without an extension, it gets ".weights.h5",
                here and in `load_weights`.
            overwrite: If False, ask before overwriting a file.
            max_shard_size: The size in GB above which the weights are split into several files, in
                versions of Keras that can.
            tnt_save_all_devices: Whether every rank writes, as in `save`.
        """
        options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        saving.save_weights(self._plain(), filepath, overwrite, tnt_save_all_devices, **options)

    def export(
        self, filepath: Any, *args: Any, tnt_save_all_devices: bool = False, **kwargs: Any
    ) -> None:
        """Exports the plain Keras model, as `keras.Model.export`, with the guarantees of `save`.

        Args:
            filepath (str, pathlib.Path): The folder, or the file, to write.
            args: Further arguments for Keras, such as the format.
            tnt_save_all_devices: Whether every rank writes, as in `save`.
            kwargs: The same by keyword.
        """
        saving.export(self._plain(), filepath, *args, everywhere=tnt_save_all_devices, **kwargs)

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Loads weights, as `keras.Model.load_weights` does.

        Args:
            filepath (str, pathlib.Path): The path, as in `save_weights`. Every rank reads it.
            args: Further arguments for Keras, such as `skip_mismatch`.
            kwargs: The same by keyword.
        """
        found = loading.find_weights(filepath)
        with loading.whole(found):
            super().load_weights(found, *args, **kwargs)
        self._tnt_has_master_weights = False
        loading.warn_of_useless_weights(self, found)

    def to_yaml(self, **kwargs: Any) -> str:
        """Returns the configuration that `to_json` returns, as YAML.

        Args:
            kwargs: Options of `yaml.safe_dump`.
        """
        return loading.as_yaml(self.to_json(), **kwargs)

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> Any:
        """Makes a model from what another model's `get_config` returned, with new weights."""
        return distributed(lambda: loading.from_config(config, custom_objects), "from_config")

    def _plain(self) -> Any:
        """This model, with its settings, as an object of the class it was made from."""
        return wrapping.plain(self)

    # Making and starting models

    @staticmethod
    def _tnt_wrap(model: Any) -> Model:
        """Wraps a model that Keras has made from a configuration."""
        return _distributed(model)

    @staticmethod
    def _tnt_rebuild(rebuild: Callable[..., Any], *args: Any) -> Any:
        """A copy, or a model from a pickle. One rank can make it alone, so no rank waits here."""
        return _wrapped(rebuild(*args))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Sets the optimizer, the loss and the metrics, exactly as `keras.Model.compile` does.

        Pass what you would pass to the plain model: plain Keras optimizers, losses and metrics, and
        the learning rate for the global batch size. `jit_compile`, `run_eagerly` and
        `steps_per_execution` work on several ranks, too. Call it on the `tnt.Model`, not on the
        plain model, and with the same arguments on all ranks.

        Args:
            args: The arguments of
                `keras.Model.compile <https://keras.io/api/models/model_training_apis/#compile-method>`_.
            kwargs: The same by keyword.

        Example:

        ```python
        import keras
        import tarantella as tnt

        model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")]))
        model.compile(
            optimizer=keras.optimizers.SGD(learning_rate=0.1, momentum=0.9),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
        ```
        """
        super().compile(*args, **kwargs)
        self._tnt_advice.xla_was_asked_for = kwargs.get("jit_compile") is True
        self._tnt_has_master_weights = False

    def compile_from_config(self, config: Any) -> None:
        if self._tnt_plain_class.compile is not keras.Model.compile:
            super().compile_from_config(config)  # warns that it cannot
            return
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

    def set_weights(self, weights: Any) -> None:
        super().set_weights(weights)
        self._tnt_has_master_weights = False

    def _require_compiled(self, method: str) -> None:
        if not self.compiled:
            raise InputError(
                f"`{method}` needs a compiled model: call "
                "`model.compile(optimizer=..., loss=...)` first."
            )

    def _start_from_master(self, spec: Any, again: bool = True) -> None:
        """Gives all ranks the master's weights.

        Args:
            spec: The structure of the data.
            again: Whether to do so even if all ranks must have the same weights already.
        """
        arguments.require_numbers(self, spec)
        if not again and all_ranks(self._tnt_has_master_weights):
            return
        self._take_from_master()

    def _take_from_master(self) -> None:
        master_weights.start_from_master(self)
        self._tnt_has_master_weights = True


class Sequential(Model):
    """A stack of layers that trains on all ranks: `tnt.Model(keras.Sequential(layers))`.

    Args:
        layers (list of Keras layers): The layers, in order; `add` adds more.
        trainable: Whether the weights are trained.
        name: The name of the model.

    Example:

    ```python
    import keras
    import tarantella as tnt

    model = tnt.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu")])
    model.add(keras.layers.Dense(1))
    ```
    """

    def __new__(cls, layers: Any = None, trainable: bool = True, name: str | None = None) -> Any:
        return _distributed(keras.Sequential(layers, trainable=trainable, name=name))


def _alone(
    x: Any, batch_size: int | None, micro_batch_size: int | None, argument_prefix: str = ""
) -> tuple[Any, int | None]:
    """Data and batch size for a single rank, whose micro-batches are the batches."""
    x, options = in_batches(x, micro_batch_size, {"batch_size": batch_size}, 1, argument_prefix)
    return x, options["batch_size"]


def _adapter(purpose: str, data: tuple[Any, ...], **options: Any) -> RankDataAdapter:
    """The adapter for the data of a pass.

    Args:
        purpose: What the data are for, in words for the user.
        data: x, y and sample_weight, or the first of them.
        **options: Further arguments of `RankDataAdapter.of`.
    """
    if not options["distribute"]:
        LOGGER.info("The %s data are not distributed: each rank uses its own.", purpose)
    return RankDataAdapter.of(*data, purpose=f"{purpose} data", **options)


def _specs_of(tensors: Any) -> Any:
    """The structure of a batch of dense tensors, some of which may be missing."""
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else tf.TensorSpec.from_tensor(leaf), tensors
    )


def _require_data_parallelism(strategy: Any, num_pipeline_stages: Any) -> None:
    """Refuses to divide a model between ranks, as earlier versions could."""
    if strategy is ParallelStrategy.PIPELINING:
        raise InputError(
            "tnt.ParallelStrategy.PIPELINING is not supported: the layers of a model are not "
            "divided between ranks. Use tnt.ParallelStrategy.DATA, or leave it out."
        )
    if strategy is ParallelStrategy.ALL:
        LOGGER.warning(
            "tnt.ParallelStrategy.ALL is treated as DATA: every rank holds the whole model."
        )
    elif strategy is not ParallelStrategy.DATA:
        raise InputError(
            f"parallel_strategy is {strategy!r}; it must be tnt.ParallelStrategy.DATA."
        )
    if num_pipeline_stages != 1:
        raise InputError(
            f"num_pipeline_stages is {num_pipeline_stages!r}; it must be 1, as the layers of a "
            "model are not divided between ranks. Leave it out."
        )


def _require_gradient_type(gradient_type: Any) -> None:
    if gradient_type is not None and gradient_type not in GRADIENT_TYPES:
        raise InputError(
            f"gradient_type is {gradient_type!r}; it must be one of {', '.join(GRADIENT_TYPES)}."
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
    plain_training.note_wrapped(model)
    if world.get_size() > 1 and model.built:
        with communicators_of_this_thread():
            wrapped._take_from_master()
    return wrapped


def _wrapped(model: keras.Model) -> Any:
    return wrapping.wrapped(model, Sequential if isinstance(model, keras.Sequential) else Model)


def distributed(make: Callable[[], Any], call: str) -> Model:
    """A tnt.Model of what `make` returns; if that fails on one rank, it fails on all."""
    with communicators_of_this_thread():
        return _distributed(saving.on_all_ranks(call, make))
