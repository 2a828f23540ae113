"""Options for making and applying gradients: constants of a run that travel with its recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from sparkdl.model.buffers import Rule

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Names of ``Trainer.precision`` and ``Trainer.wire`` -> dtype (None: the model's own)."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The training options; see the fields of :class:`sparkdl.Trainer` with the same names."""

    accumulate: int = 1
    local_steps: int = 1
    precision: str = "fp32"
    wire: str = "fp32"
    clip_norm: float | None = None
    clip_value: float | None = None
    l1: float | Mapping[str, float] = 0.0
    l2: float | Mapping[str, float] = 0.0
    on_nan: str = "raise"
    ema: float | None = None
    weighted: bool = False
    """Samples have weights: the loss gives one value a sample, and the weights average them."""
    class_weights: tuple[float, ...] | None = None
    sync_batchnorm: bool = False
    activation_checkpointing: tuple[str, ...] = ()
    compile: bool | Mapping[str, object] = False
    outer: bool = False
    """An outer optimizer is given the distance that local steps have moved the weights."""
    topology: str | None = None
    """Replicas have weights of their own, and average them over this topology."""
    buffers: Mapping[str, Rule] = field(default_factory=dict)

    @property
    def steps_on_replicas(self) -> bool:
        """Return whether replicas take the steps of the user's optimizer themselves."""
        return self.keeps_own or self.local_steps > 1

    @property
    def keeps_own(self) -> bool:
        """Return whether each replica keeps the state of its optimizer from step to step."""
        return self.outer or self.topology is not None

    @property
    def averages(self) -> bool:
        """Return whether replicas are averaged, with their optimizer state, after local steps."""
        return self.steps_on_replicas and not self.keeps_own

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return PRECISIONS[self.precision]

    @property
    def wire_dtype(self) -> torch.dtype | None:
        return PRECISIONS[self.wire]

    @property
    def clips_norm(self) -> bool:
        """Return whether slice owners need each other's norms.

        After local steps replicas clip their own.
        """
        return self.clip_norm is not None and not self.steps_on_replicas

    @property
    def scales_loss(self) -> bool:
        return self.precision == "fp16"
