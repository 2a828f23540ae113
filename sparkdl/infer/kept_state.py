"""The optimizer state of every slice, handed from one fit to the next."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.checkpoint.identity import ModelIdentity, first_few
from sparkdl.errors import ParameterError


@dataclass(frozen=True)
class StoredState:
    """The state of every slice, packed, and what it belongs to.

    ``optimizers``: their names. ``weights``: the digest of the result's module.
    """

    slices: tuple[bytes, ...]
    model: ModelIdentity
    optimizers: tuple[str, ...]
    weights: str

    def check(self, model: ModelIdentity, optimizers: tuple[str, ...]) -> None:
        """Raise :class:`sparkdl.ParameterError` where it is no state of this model and optimizer."""
        problems = first_few(model.differences(self.model, "start"))
        if self.optimizers != optimizers:
            problems.append(
                f"the optimizer is {', '.join(optimizers)} here and {', '.join(self.optimizers)} "
                "in start"
            )
        if problems:
            raise ParameterError(
                f"the optimizer state of start= does not fit: {'; '.join(problems)}. Pass "
                "optimizer_state=False to go on with the weights alone."
            )
