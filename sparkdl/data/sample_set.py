"""The driver's description of samples in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pyspark import RDD

from sparkdl.data.fields import Field, SampleHandle, check_total_weight
from sparkdl.data.ragged import Rows


@dataclass(frozen=True)
class SampleSet:
    """The persisted sample RDD and the driver's description of it."""

    rdd: RDD | None  # pickled handles, one frame a partition; None: samples of this process
    handles: tuple[SampleHandle, ...]
    fields: tuple[Field, ...]  # inputs, labels and, if weighted, the weight
    num_features: int
    preview: list[Rows]
    num_labels: int = 0
    weighted: bool = False
    more: list[Rows] = field(default_factory=list)  # those of preview and some others

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the rows of each partition."""
        return tuple(handle.num_rows for handle in self.handles)


def fields_of_handles(handles: Sequence[SampleHandle]) -> tuple[Field, ...]:
    """Return the fields of the samples, at least one of which must be there."""
    return next(handle.fields for handle in handles if handle.num_rows)


def sample_set(
    rdd: RDD | None,
    handles: Sequence[SampleHandle],
    num_features: int,
    weighted: bool,
    rows: tuple[list[Rows], list[Rows]],
    noun: str = "column",
) -> SampleSet:
    """Return the description of samples in place; ``rows`` are its preview and ``more``."""
    fields = fields_of_handles(handles)
    if weighted:
        check_total_weight(handles, len(fields) - 1, f'{noun} "{fields[-1].name}"')
    num_labels = len(fields) - num_features - weighted
    preview, more = rows
    return SampleSet(rdd, tuple(handles), fields, num_features, preview, num_labels, weighted, more)
