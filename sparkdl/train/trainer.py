"""The trainer, with which a user begins: what is trained and how, and the fits of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pyspark import RDD
from pyspark.sql import DataFrame

from sparkdl.errors import known_arguments
from sparkdl.infer.model import TrainedModel
from sparkdl.loop.history import History
from sparkdl.train.request import FitRequest, PassSeries, checked_batch
from sparkdl.train.spec import TrainerSpec

if TYPE_CHECKING:
    from sparkdl.train.placed_samples import SharedSamples


@known_arguments
@dataclass(frozen=True, kw_only=True, repr=False)
class Trainer(TrainerSpec):
    """A description of a training run: the model, the columns, and how to train; :meth:`fit` trains.

    All fields are keyword arguments, and a trainer cannot be changed: ``dataclasses.replace(trainer,
    batch_size=512)`` makes another one. With ``replicas`` and ``slices`` given, the result is a
    function of the fields and the data alone: it is the same on any number of executors, bit for bit
    on CPUs. If they are None, the cluster decides.

    Raises:
        ParameterError: A field has a value that cannot work, or fields do not go together.
    """

    _passes: PassSeries = field(default_factory=PassSeries, init=False, repr=False, compare=False)

    def fit(
        self,
        data: DataFrame | RDD[Any] | SharedSamples,
        *,
        resume: str | os.PathLike[str] | None = None,
        start: TrainedModel | None = None,
        optimizer_state: bool | None = None,
        any_data: bool = False,
        replay: History | None = None,
    ) -> TrainedModel:
        """Train on ``data``, and return the trained model.

        An interrupt in the main thread (Ctrl-C, or a notebook's stop button) ends the training after
        the current iteration. The model is returned as it stands, and ``history.stopped`` says so. A
        second interrupt raises KeyboardInterrupt at once.

        Args:
            data: A DataFrame, also of Spark Connect; or an RDD of ``(features, label)`` pairs, of
                :class:`sparkdl.Sample`, or of records with the names of the columns (``Row``, named
                tuples, mappings). Or :class:`sparkdl.PlacedSamples`, which serve several fits.
            resume: Continue from a checkpoint: a path, or "latest" in the path of ``checkpoint``
                (from the beginning if there is none). The bits are those of a run without a break.
            start: Begin with the weights of an earlier result.
            optimizer_state: Use the optimizer state of ``start``: if it was kept (None), always
                (True; an error if it was not kept), or never (False).
            any_data: The checkpoint may come from other rows, or another batch size, seed or number
                of replicas; its state continues with the present ones. If the rows are divided into
                batches differently, the epoch that was under way begins anew.
            replay: The history of an earlier run, ``trained.history``, whose consistency model's
                decisions are repeated. With the same trainer and data, and ``replicas`` given, the
                bits are those of that run, on any cluster. Iterations that it does not have are
                decided anew.

        Returns:
            The trained model, with the history of the run.

        Raises:
            UserError: The data, the model or a parameter cannot work; raised before the training
                starts.
            TrainingError: An iteration failed for good.
            CheckpointError: A checkpoint cannot be written or read.
            KeyboardInterrupt: The user interrupted twice.
        """
        from sparkdl.train.fit import fit

        request = FitRequest.of(self, resume, start, optimizer_state, any_data, replay)
        return fit(data, request).trained

    def partial_fit(
        self,
        data: DataFrame | RDD[Any],
        *,
        resume: str | os.PathLike[str] | None = None,
        batch: int | None = None,
    ) -> TrainedModel:
        """Make one pass over ``data``, continuing from the last ``partial_fit`` of this trainer.

        Weights, optimizer state, schedule, counters and history continue; ``stop`` has no effect. It
        suits ``foreachBatch`` of Structured Streaming. An empty batch changes nothing. A call costs
        the same however many came before it. A checkpoint holds the history of the last 10,000
        iterations.

        Args:
            data: The rows of this pass, as in :meth:`fit`.
            resume: In the first call, a checkpoint of earlier calls to continue from: "latest" or a
                path.
            batch: The number of the batch, as ``foreachBatch`` gives it. A batch that was trained on
                changes nothing, also one of an earlier program whose checkpoint is resumed; one that
                was under way goes on where its checkpoint was written. A checkpoint is written at the
                end of each batch.

        Returns:
            The model after this pass.

        Raises:
            UserError: As in :meth:`fit`; likewise TrainingError and CheckpointError.
        """
        from sparkdl.train.fit import fit_pass

        request = FitRequest.of(self, resume)
        return fit_pass(self._passes, data, replace(request, batch=checked_batch(batch)))
