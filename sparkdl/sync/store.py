"""The state of a slice in slabs: read version t, write version t+1."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from sparkdl.slab.pool import Claim, Pool
from sparkdl.sync.codec import as_tensor
from sparkdl.sync.records import SliceHandle
from sparkdl.sync.update import SliceState

_ROUND = 4096
Scalars = dict[int, dict[str, Any]]


@contextlib.contextmanager
def next_version(
    pool: Pool, old: SliceHandle, dtype: torch.dtype, tick: int, floor: int
) -> Iterator[tuple[SliceState, NewVersion]]:
    """Claim buffers and copy version t into them; the block may change the copy, then ``seal`` it.

    The old buffers are checked after the copy, see [Note: who may write a buffer].
    """
    with contextlib.ExitStack() as claims:
        new = NewVersion(pool, tick, floor, claims)
        state = SliceState(new.array("weights", as_tensor(pool.read(old.weights), dtype)))
        for name, kind, reference in old.arrays:
            source = torch.from_numpy(pool.read(reference).view(kind))
            state.arrays[name] = new.array(name, source)
        if old.scalars is not None:
            state.scalars = _scalars_from(pool.read(old.scalars).data)
        for reference in old.references():
            pool.check(reference)
        yield state, new


class NewVersion:
    """Version t+1 of a slice while it is being written."""

    def __init__(self, pool: Pool, tick: int, floor: int, claims: contextlib.ExitStack) -> None:
        self._pool, self._tick, self._floor, self._claims = pool, tick, floor, claims
        self._claimed: dict[str, tuple[Claim, torch.Tensor]] = {}

    def array(self, name: str, source: torch.Tensor) -> torch.Tensor:
        """A slab-backed copy of ``source``."""
        claim = self._claim(source.numel() * source.element_size())
        kind = source.numpy().dtype
        copy = torch.from_numpy(claim.bytes.view(kind))
        copy.copy_(source)
        self._claimed[name] = claim, copy
        return copy

    def seal(self, state: SliceState) -> SliceHandle:
        """Write what is not in slabs yet (new optimizer state, scalars); the new version's handle."""
        for name, array in state.arrays.items():
            if name not in self._claimed:
                self.array(name, array)
        scalars = None
        if state.scalars:
            data = np.frombuffer(_scalars_to(state.scalars), dtype=np.uint8)
            claim = self._claim(-(-len(data) // _ROUND) * _ROUND)
            claim.bytes[: len(data)] = data
            scalars = claim.reference.part(0, len(data))
        return SliceHandle(
            self._claimed["weights"][0].reference,
            tuple(
                (name, str(self._claimed[name][1].numpy().dtype), self._claimed[name][0].reference)
                for name in state.arrays
            ),
            scalars,
        )

    def _claim(self, nbytes: int) -> Claim:
        return self._claims.enter_context(
            self._pool.claim("state", nbytes, self._tick, self._floor)
        )


def _scalars_to(scalars: Scalars) -> bytes:
    """Tensors go as NumPy arrays: torch's own pickling takes a millisecond for a step count."""
    plain = {
        number: {
            name: (isinstance(v, torch.Tensor), v.numpy() if isinstance(v, torch.Tensor) else v)
            for name, v in values.items()
        }
        for number, values in scalars.items()
    }
    return pickle.dumps(plain, protocol=pickle.HIGHEST_PROTOCOL)


def _scalars_from(data: memoryview) -> Scalars:
    return {
        number: {
            name: torch.tensor(value) if is_tensor else value
            for name, (is_tensor, value) in values.items()
        }
        for number, values in pickle.loads(data).items()
    }


def first_version(pool: Pool, weights: torch.Tensor, tick: int) -> SliceHandle:
    """Version 0 of a slice: the initial weights and no optimizer state."""
    with contextlib.ExitStack() as claims:
        new = NewVersion(pool, tick, tick, claims)
        return new.seal(SliceState(new.array("weights", weights)))
