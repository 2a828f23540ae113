"""The driver's description of samples in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pyspark import RDD

from sparkdl.data.fields import Field, SampleHandle, check_total_weight
from sparkdl.data.ragged import Rows


@dataclass(frozen=True)
class SampleSet:
    """The persisted sample RDD and the driver's description of it.

    Attributes:
        rdd: One frame a partition, a pickled :class:`SampleHandle`; None if the samples are in this
            process.
        handles: The handle of each partition.
        fields: The fields of a sample: ``num_features`` inputs, ``num_labels`` labels and, if samples
            are ``weighted``, the weight.
        preview: A few rows to try the model on, one array (or :class:`Ragged`) a field.
        more: The rows of ``preview`` and some others, on which a loss is compared with its parts.
    """

    rdd: RDD | None
    handles: tuple[SampleHandle, ...]
    fields: tuple[Field, ...]
    num_features: int
    preview: list[Rows]
    num_labels: int = 0
    weighted: bool = False
    more: list[Rows] = field(default_factory=list)

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
    """Return the description of samples in place.

    Args:
        rdd: The RDD of their handles, or None.
        handles: The handle of each partition.
        num_features: The number of inputs of a sample.
        weighted: Whether the last field is the weight.
        rows: The rows to try the model on, and these with the additional ones.
        noun: The word by which messages call a part of a sample.

    Raises:
        DataError: All weights are 0.
    """
    fields = fields_of_handles(handles)
    if weighted:
        check_total_weight(handles, len(fields) - 1, f'{noun} "{fields[-1].name}"')
    num_labels = len(fields) - num_features - weighted
    preview, more = rows
    return SampleSet(rdd, tuple(handles), fields, num_features, preview, num_labels, weighted, more)
