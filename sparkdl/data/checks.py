"""What is wrong with the partitions that were written, said on the driver."""

from __future__ import annotations

from collections.abc import Sequence

from sparkdl.data.fields import SampleHandle
from sparkdl.data.row_errors import SAME_SHAPE, SAME_TYPE
from sparkdl.errors import DataError


def check_handles(handles: Sequence[SampleHandle], noun: str) -> None:
    """Raise :class:`DataError` for what is wrong with a partition, or with all of them."""
    for partition, handle in enumerate(handles):
        problem = handle.problem
        if problem is not None:
            number = partition if problem.partition is None else problem.partition
            raise DataError(problem.message(f"partition {number}", noun))
    filled = [(i, handle) for i, handle in enumerate(handles) if handle.num_rows]
    if not filled:
        raise DataError("the data is empty: it has no row.")
    first_partition, first = filled[0]
    for partition, handle in filled[1:]:
        names, wanted_names = ([field.name for field in h.fields] for h in (handle, first))
        if names != wanted_names:
            raise DataError(
                f"row 0 of partition {partition} has {', '.join(names)} where row 0 of partition "
                f"{first_partition} has {', '.join(wanted_names)}. {SAME_SHAPE}"
            )
        for found, wanted in zip(handle.fields, first.fields, strict=True):
            if found != wanted:
                raise DataError(
                    f'{noun} "{found.name}", row 0 of partition {partition}: is {found} where row '
                    f"0 of partition {first_partition} is {wanted}. "
                    f"{SAME_TYPE if found.shape == wanted.shape else SAME_SHAPE}"
                )


def check_total_weight(handles: Sequence[SampleHandle], field: int, what: str) -> None:
    """Raise :class:`DataError` where all weights, which are in ``field``, are 0."""
    largest = [e.value for h in handles for e in h.extremes if e.field == field and e.sign > 0]
    if not any(largest):
        raise DataError(
            f"{what}: all weights are 0, so that no sample counts. Give rows a weight above 0, or "
            "train with weight=None."
        )
