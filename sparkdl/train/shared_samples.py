"""The common part of samples that serve several fits: which fits may use them, and until when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ParameterError, shown

if TYPE_CHECKING:
    from typing import Self

    from sparkdl.train.trainer import Trainer


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class SharedSamples:
    """The base of samples that serve several fits.

    Attributes:
        data: The training data.
    """

    data: Any
    _trainer: Trainer
    _float_dtype: str
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: threading.Event = field(default_factory=threading.Event)

    def __repr__(self) -> str:
        columns = ", ".join([*self._trainer.feature_columns, *self._trainer.label_columns])
        return f"<sparkdl.{type(self).__name__}: the columns {columns}>"

    @property
    def replicas(self) -> int:
        """M, the number of replicas that the samples are divided among."""
        raise NotImplementedError

    def _release(self) -> None:
        """Give back what holds the samples."""
        raise NotImplementedError

    @property
    def float_dtype(self) -> str:
        """The dtype of floating-point values."""
        return self._float_dtype

    def check(self, trainer: Trainer, float_dtype: str) -> None:
        """Raise an error if a fit of ``trainer`` cannot use the samples.

        Args:
            trainer: The trainer of the fit.
            float_dtype: The floating dtype of its model.

        Raises:
            ParameterError: The trainer reads the data otherwise, or the samples were given back.
        """
        if self._closed.is_set():
            raise ParameterError(
                "these samples were given back with close(): place them again with "
                "sparkdl.PlacedSamples.of(trainer, data)."
            )
        found = list(self._differences(trainer, float_dtype))
        if found:
            raise ParameterError(
                f"the samples were placed for a trainer that reads the data otherwise: "
                f"{'; '.join(found)}. Make the trainers alike in this, or place the samples for this "
                "one: sparkdl.PlacedSamples.of(trainer, data)."
            )

    def _differences(self, trainer: Trainer, float_dtype: str) -> Iterator[str]:
        mine = self._trainer
        for name, one, other in (
            (
                "features",
                (trainer.feature_columns, trainer.keywords),
                (mine.feature_columns, mine.keywords),
            ),
            ("label", trainer.label_columns, mine.label_columns),
            ("weight", trainer.weight, mine.weight),
            ("columns", dict(trainer.columns), dict(mine.columns)),
        ):
            if one != other:
                given, placed = getattr(trainer, name), getattr(mine, name)
                yield f"{name}={shown(given)}, placed with {shown(placed)}"
        if trainer.replicas not in (None, self.replicas):
            yield f"replicas={trainer.replicas}, placed with {self.replicas}"
        if (trainer.engine == "local") != (mine.engine == "local"):
            yield f'engine="{trainer.engine}", placed with "{mine.engine}"'
        if float_dtype != self._float_dtype:
            yield f"a model of {float_dtype}, placed with {self._float_dtype}"
        theirs, ours = trainer.validation, mine.validation
        if theirs is not None and (ours is None or theirs.data is not ours.data):
            yield "validation has other data" if ours else "validation was not placed"

    def close(self) -> None:
        """Give the samples' memory and files back. A second call does nothing.

        No fit on the samples may be running.
        """
        with self._lock:
            if not self._closed.is_set():
                self._closed.set()
                self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
