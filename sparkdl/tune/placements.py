"""The samples of a search, placed once for each way in which its trials read the data."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark import RDD
from pyspark.sql import DataFrame

from sparkdl.train.placed_samples import PlacedSamples
from sparkdl.train.trainer import Trainer
from sparkdl.tune.arguments import READING
from sparkdl.tune.folder import SearchFolder


class Placements:
    """The samples of a search, placed once for each way to read the data, in a context manager."""

    def __init__(
        self, data: DataFrame | RDD[Any], names: Sequence[str], folder: SearchFolder | None
    ) -> None:
        self._data, self._folder = data, folder
        self._names = [name for name in names if name.partition(".")[0] in READING]
        self._checked: set[str] = set()
        self._placed: dict[str, PlacedSamples] = {}
        self._stack = contextlib.ExitStack()

    def of(self, trainer: Trainer, arguments: Mapping[str, Any]) -> PlacedSamples:
        """Return the samples as the trainer of a trial reads them."""
        key = self._key(arguments)
        if key not in self._placed:
            placed = PlacedSamples.of(trainer, self._data)
            assert isinstance(placed, PlacedSamples)  # not persisted: no session of Spark Connect
            self._placed[key] = self._stack.enter_context(placed)
        return self._placed[key]

    def check_data(self, arguments: Mapping[str, Any]) -> None:
        """Raise ParameterError if the folder holds trials on other data; looked at once for each way
        to read it."""
        key = self._key(arguments)
        if self._folder is not None and key not in self._checked:
            placed = self._placed[key]
            assert placed.validation is not None
            self._folder.check_data(key, placed.training.handles, placed.validation.handles)
            self._checked.add(key)

    def _key(self, arguments: Mapping[str, Any]) -> str:
        return repr([arguments[name] for name in self._names])

    def __enter__(self) -> Placements:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
