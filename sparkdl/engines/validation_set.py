"""The validation samples of a fit, and how an engine scores them."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.data.batches import BatchSpec
from sparkdl.data.sample_set import SampleSet
from sparkdl.metrics.scorer import Scorer


@dataclass(frozen=True)
class ValidationSet:
    """The validation samples in slabs, with all that an engine needs to score them."""

    samples: SampleSet
    scorer: Scorer
    batch_spec: BatchSpec
    batch_size: int  # rows of one replica's forward pass
