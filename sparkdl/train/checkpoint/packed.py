"""What one fit hands to the next: slices as bytes outside of checkpoints, and what is read of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.sync.owner import EMA
from sparkdl.sync.plan import SlicePlan
from sparkdl.sync.state import SliceState
from sparkdl.train.checkpoint.slices import Part, recut, to_bytes, unpack


@dataclass(frozen=True)
class PackSlice:
    """Run on the owner: its slice as bytes, in the form of a checkpoint's file."""

    def __call__(self, index: int, plan: SlicePlan, state: SliceState) -> bytes:
        return to_bytes(plan, state)


@dataclass(frozen=True)
class ReadCarried:
    """Run on the owner: its slice out of all slices of an earlier run, whatever their number.

    ``packed``: the bytes, or a broadcast of them.
    """

    packed: Any

    def __call__(self, plan: SlicePlan, dtype: torch.dtype) -> SliceState:
        slices: Sequence[bytes] = getattr(self.packed, "value", self.packed)
        parts: list[Part] = [unpack(data) for data in slices]
        return recut(parts, plan, dtype)


@dataclass(frozen=True)
class WithoutAverage:
    """What ``read`` gives, for a run that keeps no moving average: one that stood still would be taken
    up by the next run that does."""

    read: Callable[[SlicePlan, torch.dtype], SliceState]

    def __call__(self, plan: SlicePlan, dtype: torch.dtype) -> SliceState:
        state = self.read(plan, dtype)
        state.arrays.pop(EMA, None)
        return state
