"""What one fit hands to the next: slices as bytes outside of checkpoints, and what is read of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sparkdl.slices.slice_file import reslice, to_bytes, unpack
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState
from sparkdl.slices.update import EMA


@dataclass(frozen=True)
class PackSlice:
    """Run on the owner: its slice as bytes, in the form of a checkpoint's file."""

    def __call__(self, index: int, plan: SliceSpec, state: SliceState) -> bytes:
        return to_bytes(plan, state)


class InTasks(Protocol):
    """Byte strings that tasks have, such as :class:`sparkdl.spark.broadcasts.BroadcastBytes`."""

    def parts(self) -> Iterator[bytes]:
        """One after another, none of which is kept."""


@dataclass(frozen=True)
class ReadCarried:
    """Run on the owner: its slice out of all slices of an earlier run, whatever their number.

    ``packed``: the bytes, or what has them in a task.
    """

    packed: Sequence[bytes] | InTasks

    def __call__(self, plan: SliceSpec, dtype: torch.dtype) -> SliceState:
        packed = self.packed
        slices = packed if isinstance(packed, Sequence) else packed.parts()
        return reslice(map(unpack, slices), plan, dtype)


@dataclass(frozen=True)
class WithoutAverage:
    """What ``read`` gives, for a run that keeps no moving average: one that stood still would be taken
    up by the next run that does."""

    read: Callable[[SliceSpec, torch.dtype], SliceState]

    def __call__(self, plan: SliceSpec, dtype: torch.dtype) -> SliceState:
        state = self.read(plan, dtype)
        state.arrays.pop(EMA, None)
        return state
