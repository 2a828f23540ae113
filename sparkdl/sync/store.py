"""The state of a slice in slabs: read version t, write version t+1."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparkdl.slab.pool import Claim, Pool
from sparkdl.sync.codec import as_tensor
from sparkdl.sync.records import SliceHandle
from sparkdl.sync.state import ARRAY_DTYPES, SliceState

_ROUND = 4096


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
        if old.others is not None:
            state.held, state.others = unpack(pool.read(old.others).data)
        for reference in old.references():
            pool.check(reference)
        yield state, new


class NewVersion:
    """Version t+1 of a slice while it is being written."""

    def __init__(
        self,
        pool: Pool,
        tick: int,
        floor: int,
        claims: contextlib.ExitStack,
        role: str = "state",
    ) -> None:
        self._pool, self._tick, self._floor, self._claims = pool, tick, floor, claims
        self._role = role
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
        """Write what is not in slabs yet (new optimizer state, others); the new version's handle."""
        for name, array in state.arrays.items():
            if name not in self._claimed:
                self.array(name, array)
        others = None
        if state.others:
            data = np.frombuffer(pack(state), dtype=np.uint8)
            claim = self._claim(-(-len(data) // _ROUND) * _ROUND)
            claim.bytes[: len(data)] = data
            others = claim.reference.part(0, len(data))
        return SliceHandle(
            self._claimed["weights"][0].reference,
            tuple(
                (name, str(self._claimed[name][1].numpy().dtype), self._claimed[name][0].reference)
                for name in state.arrays
            ),
            others,
        )

    def _claim(self, nbytes: int) -> Claim:
        return self._claims.enter_context(
            self._pool.claim(self._role, nbytes, self._tick, self._floor)
        )


@dataclass(frozen=True)
class _Array:
    """A tensor as pickle sees it."""

    values: np.ndarray


def pack(state: SliceState) -> bytes:
    """``held`` and ``others`` of a state as bytes.

    Tensors go as NumPy arrays: torch's own pickling takes a millisecond for a step count.
    """
    plain = state.held, _mapped(state.others, torch.Tensor, _to_array)
    return pickle.dumps(plain, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(
    data: bytes | memoryview,
) -> tuple[dict[int, tuple[str, ...]], dict[int, dict[str, Any]]]:
    """``held`` and ``others``, the tensors in them with memory of their own."""
    held, others = pickle.loads(data)
    return held, _mapped(others, _Array, lambda array: torch.tensor(array.values))


def _to_array(tensor: torch.Tensor) -> _Array | torch.Tensor:
    plain = tensor.layout == torch.strided and tensor.dtype in ARRAY_DTYPES
    return _Array(tensor.detach().numpy()) if plain else tensor


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """``value`` with every ``kind`` in its dicts, lists and tuples changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, kind, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, kind, change) for item in value)
    return value


def first_version(pool: Pool, state: SliceState, tick: int, role: str = "state") -> SliceHandle:
    """Write a state that is not in slabs yet, in buffers of ``role``."""
    with contextlib.ExitStack() as claims:
        new = NewVersion(pool, tick, tick, claims, role)
        new.array("weights", state.weights)
        return new.seal(state)


def read_version(pool: Pool, handle: SliceHandle, dtype: torch.dtype) -> SliceState:
    """A state as it lies in slabs: not to be written to, and the references to be checked after."""
    state = SliceState(as_tensor(pool.read(handle.weights), dtype))
    for name, kind, reference in handle.arrays:
        state.arrays[name] = torch.from_numpy(pool.read(reference).view(kind))
    if handle.others is not None:
        state.held, state.others = unpack(pool.read(handle.others).data)
    return state


def copy_weights(pool: Pool, handle: SliceHandle, tick: int) -> SliceHandle:
    """A copy of a slice's weights in a buffer that only a later copy takes."""
    source = pool.read(handle.weights)
    with pool.claim("best", len(source), tick, tick) as claim:
        claim.bytes[:] = source
        pool.check(handle.weights)
        return SliceHandle(claim.reference)
