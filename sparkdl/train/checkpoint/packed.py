"""Slices as bytes that lie in no checkpoint: what one fit hands to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
