"""Snapshots of a gang: its whole state in files on some nodes, from which new ranks start.

Work that a rank does in the background, on a copy of its state, while it continues to train.
"""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sparkdl.codec.packed import (
    ByParameter,
    copy_packed,
    head_from_bytes,
    head_to_bytes,
    join_files,
    open_packed,
    packed_nbytes,
    specs_of,
    split_files,
)
from sparkdl.engines.gang.rank_state import RankState, States
from sparkdl.engines.gang.strategies.base import GradientSync
from sparkdl.slab.root import open_private, read_private
from sparkdl.slices.slice_file import ReadCarried, to_bytes
from sparkdl.slices.spec import SliceSpec, SliceState


@dataclass(frozen=True)
class NodeFiles:
    """A snapshot: files that the first rank of each node has written there."""

    name: str
    holders: tuple[int, ...]


@dataclass(frozen=True)
class SnapshotFiles:
    """The snapshot files of this node, in its slab root."""

    folder: Path

    def write(self, name: str, number: int, packed: bytes) -> None:
        """Write one part of a snapshot, completely or not at all."""
        path = self._path(name, number)
        draft = path.with_name(f"{path.name}.new")
        try:
            with open(draft, "xb", opener=open_private) as file:
                file.write(packed)
            os.replace(draft, path)
        except BaseException:  # such as a full disk: half a slice is useless
            draft.unlink(missing_ok=True)
            raise

    def read(self, name: str, number: int) -> bytes:
        return read_private(self._path(name, number))

    def there(self, name: str, slices: int) -> list[bool]:
        """Return, for each of the ``slices`` parts, whether there is a file."""
        return [self._path(name, n).exists() for n in range(slices)]

    def delete(self, name: str, slices: int) -> None:
        for n in range(slices):
            self._path(name, n).unlink(missing_ok=True)

    def _path(self, name: str, number: int) -> Path:
        return self.folder / f"{name}-{number}"


def pack(plan: SliceSpec, states: Sequence[SliceState]) -> bytes:
    """Pack CPU states of one slice, each as a safetensors file preceded by its length."""
    return bytes(join_files(to_bytes(plan, state) for state in states))


def unpack(plan: SliceSpec, packed: bytes, dtype: torch.dtype) -> list[SliceState]:
    """Unpack what :func:`pack` has packed."""
    return [ReadCarried((file,))(plan, dtype) for file in split_files(packed)]


def pack_kept(kept: ByParameter | None) -> bytes:
    """Pack the compression residuals of a rank. The result is empty if there are none yet."""
    if kept is None:
        return b""
    specs = specs_of(kept)
    data = np.zeros(packed_nbytes(specs), np.uint8)
    copy_packed(open_packed(specs, data), kept)
    return head_to_bytes(specs) + data.tobytes()


def unpack_kept(packed: bytes) -> ByParameter | None:
    """Unpack what :func:`pack_kept` has packed."""
    if not packed:
        return None
    data = np.frombuffer(bytearray(packed), np.uint8)
    specs, _, start = head_from_bytes(data)
    return open_packed(specs, data[start:])


def broadcast_bytes(content: bytes | None, source: int) -> bytes:
    """Return the bytes of rank ``source`` on every rank."""
    size = torch.tensor([len(content or b"")])
    dist.broadcast(size, source)
    data = torch.empty(int(size), dtype=torch.uint8)
    if content and dist.get_rank() == source:
        data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(data, source)
    return data.numpy().tobytes()


class Snapshots:
    """The snapshots of a rank.

    Every method but :meth:`begin` is a command that all ranks get at the same time.

    A snapshot has one part for each slice and, if gradients are compressed, one more for the
    residuals of each rank: ``residuals`` in all, else 0.
    """

    def __init__(self, files: SnapshotFiles, rank: int, slices: int, residuals: int) -> None:
        self._files, self._rank = files, rank
        self._slices, self._residuals = slices, residuals

    def begin(self, held: RankState, sync: GradientSync) -> None:
        """Set the state and the gradients of which to take snapshots."""
        self._held, self._sync = held, sync

    def save(self, name: str, holders: Sequence[int]) -> str | None:
        """Write this state to files on the nodes of ``holders``, the first rank of each node.

        Returns a problem on this rank, such as a full disk; no other rank waits because of it.
        """
        self._sync.settle()
        holds, held = self._rank in holders, self._held
        current, best = held.as_slices(held.states), held.as_slices(held.best)
        problems: list[str] = []
        for n, plan in enumerate(held.slices):
            packed = None
            if n in current and (self._slices > 1 or holds):
                kept = [states[n] for states in (current, best) if n in states]
                packed = _tried(functools.partial(pack, plan, kept), problems)
            if self._slices > 1:
                packed = broadcast_bytes(packed, n)
            if packed and holds:
                _tried(functools.partial(self._files.write, name, n, packed), problems)
        for r in range(self._residuals):
            mine = None
            if r == self._rank:
                mine = _tried(functools.partial(pack_kept, self._sync.kept), problems)
            packed = broadcast_bytes(mine, r)
            if holds:
                _tried(
                    functools.partial(self._files.write, name, self._slices + r, packed), problems
                )
        return problems[0] if problems else None

    def drop(self, name: str, holders: Sequence[int]) -> None:
        """Delete a snapshot that is no longer needed."""
        if self._rank in holders:
            self._files.delete(name, self._slices + self._residuals)

    def there(self, name: str) -> list[bool]:
        """Return which parts are on this node: first the slices, then the residuals of each rank."""
        return self._files.there(name, self._slices + self._residuals)

    def load(self, name: str, sources: Sequence[int]) -> None:
        """Continue from a snapshot. ``sources`` has, for each part, a rank whose node has it."""
        current: States = {}
        best: States = {}
        for n, source in enumerate(sources):
            mine = self._rank == source
            packed = broadcast_bytes(self._files.read(name, n) if mine else None, source)
            if n in self._held.owners:
                dtype = self._held.live.flat.layout.dtype
                current[n], *kept = unpack(self._held.slices[n], packed, dtype)
                if kept:
                    best[n] = kept[0]
            if n - self._slices == self._rank:
                self._sync.place_kept(unpack_kept(packed))
        self._held.place(current)
        if best:
            self._held.place_best(best)


def _tried(action: Callable[[], Any], problems: list[str]) -> Any:
    """Return the result of ``action``. If it fails, add the problem to ``problems`` and return None."""
    try:
        return action()
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
        return None


def copied(state: SliceState) -> SliceState:
    """Return a copy of a state, which later training does not change."""
    arrays = {name: _aside(array) for name, array in state.arrays.items()}
    others = copy.deepcopy(state.others)
    return SliceState(_aside(state.weights), arrays, dict(state.held), others)


def _aside(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor.

    The copy of a GPU tensor is in pinned CPU memory, because a GPU has no room for a second one. It
    is made asynchronously: synchronize before reading it.
    """
    if tensor.device.type != "cuda":
        return tensor.clone()
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


def copied_residuals(kept: ByParameter) -> ByParameter:
    """Return a copy of the compression residuals of a rank."""
    return copy.deepcopy(dict(kept))


@dataclass
class BackgroundResult:
    """The results of one rank's background work."""

    states: list[dict[int, Any]] = field(default_factory=list)  # for each use, by slice
    residuals: list[Any] = field(default_factory=list)
    error: Exception | None = None


class Background:
    """A thread that makes a series of calls, one after another."""

    def __init__(
        self,
        name: str,
        states: Sequence[Mapping[int, Callable[[], Any]]],
        residuals: Sequence[Callable[[], Any]],
    ) -> None:
        self.name = name
        self._states, self._residuals = list(states), list(residuals)
        self._results = BackgroundResult()
        self._copied = torch.cuda.Event() if torch.cuda.is_initialized() else None
        if self._copied is not None:
            self._copied.record()
        self._thread = threading.Thread(target=self._run, name="sparkdl-background", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread.is_alive()

    def results(self) -> BackgroundResult:
        """Wait for the calls to finish and return their results."""
        self._thread.join()
        return self._results

    def _run(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        try:
            while self._states:  # this frees each copy as soon as it has been used
                calls = self._states.pop(0)
                self._results.states.append({n: call() for n, call in calls.items()})
            self._results.residuals.extend([call() for call in self._residuals])
        except Exception as error:
            self._results = replace(self._results, error=error)
        finally:
            self._states, self._residuals = [], []


def on_copies(
    use: Callable[..., Any], plans: Mapping[int, Any], states: Mapping[int, SliceState]
) -> dict[int, Callable[[], Any]]:
    """Return calls ``use(index, plan, state)`` with copies of the states, which are made now."""
    return {n: functools.partial(use, n, plans[n], copied(state)) for n, state in states.items()}
