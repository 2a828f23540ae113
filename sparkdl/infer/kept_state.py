"""The optimizer state of every slice, passed from one fit to the next."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.checkpoint.identity import ModelIdentity, first_few
from sparkdl.errors import ParameterError


@dataclass(frozen=True)
class StoredState:
    """The packed state of every slice, and the model and optimizers that it belongs to."""

    slices: tuple[bytes, ...]
    model: ModelIdentity
    optimizers: tuple[str, ...]
    weights: str  # digest of those of the trained module

    def check(self, model: ModelIdentity, optimizers: tuple[str, ...]) -> None:
        """Raise :class:`sparkdl.ParameterError` if the state is not of this model and optimizers."""
        problems = first_few(model.differences(self.model, "start"))
        if self.optimizers != optimizers:
            problems.append(
                f"the optimizer is {', '.join(optimizers)} here and {', '.join(self.optimizers)} "
                "in start"
            )
        if problems:
            raise ParameterError(
                f"the optimizer state of the model in start= does not fit: {'; '.join(problems)}. "
                "Pass optimizer_state=False to continue with the weights alone."
            )
