"""What is wrong with the partitions that were written, said on the driver."""

from __future__ import annotations

from collections.abc import Sequence

from sparkdl.data.handle import SampleHandle
from sparkdl.data.problems import SAME_SHAPE
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
        raise DataError("the data is empty: there is no row to train on.")
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
                    f"0 of partition {first_partition} is {wanted}. {SAME_SHAPE}"
                )
