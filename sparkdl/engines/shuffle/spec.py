"""The constants of a run on the shuffle engine."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.data.sample_set import SampleSet
from sparkdl.engines.resources import FitResources
from sparkdl.model.layout import Layout
from sparkdl.model.options import TrainingOptions
from sparkdl.replica.compare import Description
from sparkdl.replica.run import RunSpec


@dataclass(frozen=True, kw_only=True)
class ShuffleSpec:
    """The constants that the parts of the engine share."""

    samples: SampleSet
    layout: Layout
    run: RunSpec
    recipe: bytes
    options: TrainingOptions
    built: Description
    resources: FitResources
