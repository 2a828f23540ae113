"""The trained model of a fit, from the weights that its engine ended with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from sparkdl.data.sample_set import SampleSet
from sparkdl.infer.model import TrainedModel
from sparkdl.infer.outputs import Output
from sparkdl.loop.engine import AVERAGE, BEST, CURRENT
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState
from sparkdl.model.flat import filled
from sparkdl.train.prepare import PreparedModel
from sparkdl.train.recipes import build_model

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer


def result_maker(
    trainer: Trainer, model: PreparedModel, samples: SampleSet, output: Output | None
) -> Callable[..., TrainedModel]:
    """Return a function that makes the result from a ``module`` and a ``history``."""
    return functools.partial(
        TrainedModel,
        model=trainer.model,
        loss=trainer.objective,
        features=trainer.feature_columns,
        label=trainer.label_columns,
        columns=trainer.columns,
        fields=samples.fields[: samples.num_features + samples.num_labels],
        num_features=samples.num_features,
        float_dtype=model.float_dtype,
        output=output,
        seed=trainer.seed,
        signature=model.recipe.signature,
    )


def wanted_weights(trainer: Trainer, state: TrainState) -> list[str]:
    """Return the kinds of weights that the result holds."""
    wanted = [CURRENT]
    if trainer.ema is not None:
        wanted.append(AVERAGE)
    if state.best is not None:
        wanted.append(BEST)
    return wanted


def trained_model(
    result: Callable[..., TrainedModel],
    payload: bytes,
    kinds: Sequence[str],
    weights: Callable[[str], torch.Tensor],
    history: History,
) -> TrainedModel:
    """Return the result of a fit; one vector of ``weights`` is held at a time."""
    found = {
        which: result(module=filled(build_model(payload), weights(which)), history=history)
        for which in kinds
    }
    trained = found[CURRENT]
    trained.ema, trained.best = found.get(AVERAGE), found.get(BEST)
    return trained
