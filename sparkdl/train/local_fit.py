"""A fit by the local engine on samples in place, in a process that need not have a Spark session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sparkdl.data.samples import SampleSet
from sparkdl.errors import ModelError
from sparkdl.infer.model import TrainedModel
from sparkdl.loop.callbacks import Callback
from sparkdl.loop.history import History
from sparkdl.loop.interrupt import Interrupt
from sparkdl.settings import Settings
from sparkdl.slab.root import SlabConfig
from sparkdl.train.course import run_course
from sparkdl.train.engine_inputs import Site
from sparkdl.train.placed_samples import validation_set
from sparkdl.train.preflight import preflight
from sparkdl.train.prepare import PreparedModel, prepare
from sparkdl.train.request import FitRequest
from sparkdl.train.result import trained_model
from sparkdl.train.spec import TrainerSpec


@dataclass(frozen=True)
class LocalResult:
    """The end of a local fit."""

    weights: Mapping[str, torch.Tensor]  # flat vectors by kind
    history: History


@dataclass(frozen=True)
class LocalFit:
    """Fits by the local engine on samples that this process can map, for any trainer that reads the
    data alike.

    A fit has the bits of ``trainer.fit`` with ``engine="local"`` on the same samples.
    """

    training: SampleSet
    validation: SampleSet | None
    float_dtype: str

    def run(
        self,
        trainer: TrainerSpec,
        callbacks: Sequence[Callback],
        settings: Settings,
        slab: SlabConfig,
        threads: int,
    ) -> LocalResult:
        """Train with ``callbacks`` in place of the trainer's, whose checkpoint is not written.

        Nothing is written to ``slab``, which only names the run.
        """
        trainer = replace(trainer, callbacks=callbacks, checkpoint=None, keep_optimizer_state=False)
        model, request = self._prepared(trainer), FitRequest(trainer=trainer)
        site = Site(settings, slab, threads, interrupt=Interrupt(), rescues=False)
        with run_course(request, model, self.training, self.validation, None, site) as finished:
            weights = {kind: finished.engine.weights(kind) for kind in finished.end.kinds}
            return LocalResult(weights, finished.end.history)

    def trained(
        self,
        trainer: TrainerSpec,
        kinds: Sequence[str],
        weights: Callable[[str], torch.Tensor],
        history: History,
    ) -> TrainedModel:
        """Return the trained model of a fit that :meth:`run` made in another process."""
        model = self._prepared(trainer)
        validation = validation_set(trainer, self.validation, model.float_dtype)
        output, _ = preflight(trainer, model, self.training, validation, False, care=False)
        return trained_model(trainer, model, self.training, output, kinds, weights, history)

    def _prepared(self, trainer: TrainerSpec) -> PreparedModel:
        model = prepare(trainer, None)
        if model.float_dtype != self.float_dtype:
            raise ModelError(
                f"the model is of {model.float_dtype}, and the samples were placed for one of "
                f"{self.float_dtype}: let all models have one floating dtype."
            )
        return model
