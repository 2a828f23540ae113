"""Validation samples in place, and how an engine scores them."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.data.batches import BatchSpec
from sparkdl.data.samples import SampleSet
from sparkdl.metrics.scorer import Scorer


@dataclass(frozen=True)
class ValidationSet:
    """What an engine that validates is built with.

    Attributes:
        samples: The validation samples, in slabs.
        scorer: The loss and the metrics.
        assembly: How rows become mini-batches.
        batch_size: Rows of a forward pass of one replica.
    """

    samples: SampleSet
    scorer: Scorer
    assembly: BatchSpec
    batch_size: int
