"""The user's settings for checkpoints: where, how often, how many."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass

from sparkdl.errors import ParameterError, known_arguments, raise_all, shown
from sparkdl.loop.triggers import EveryEpoch, Trigger, no_trigger
from sparkdl.plain import is_whole, make_plain

EVERY_EPOCH = EveryEpoch()


@known_arguments
@dataclass(frozen=True)
class Checkpoint:
    """The settings of a run's checkpoints: where and when it stores its state.

    Wrong values raise :class:`sparkdl.ParameterError`.
    """

    path: str | os.PathLike[str]
    """A folder that the driver and all executors share: a path, or a URI that pyarrow or fsspec
    supports (``hdfs://``, ``s3://``, ``gs://``, ...). It is created if it does not exist."""
    _: KW_ONLY
    every: Trigger = EVERY_EPOCH
    """The trigger that writes a checkpoint, such as ``sparkdl.every(100)``."""
    keep: int | None = 3
    """The number of newest checkpoints that are kept; None: all."""
    asynchronous: bool = False
    """Write while training continues, for ``engine="gang"``: ranks copy their state, and write the
    copy. Each checkpoint is complete before the next is begun, and at the end of the fit."""

    def __post_init__(self) -> None:
        problems = []
        make_plain(self, "keep", "asynchronous")
        if not isinstance(self.path, (str, os.PathLike)) or not str(self.path).strip():
            problems.append(
                f"Checkpoint path={shown(self.path)}: give a folder, such as "
                '"/shared/run-1" or "s3://bucket/run-1".'
            )
        if not isinstance(self.every, Trigger):
            example = "sparkdl.every(100) or sparkdl.every_epoch()"
            problems.append(no_trigger("Checkpoint every={}", self.every, example))
        if self.keep is not None and not is_whole(self.keep, 1):
            problems.append(
                f"Checkpoint keep={shown(self.keep)}: give a whole number of at least 1, or "
                "None for all."
            )
        raise_all(ParameterError, problems)
