"""Snapshot files of a gang: the state of slices on the nodes, which outlives ranks and executors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from sparkdl.slab.root import open_private, read_private
from sparkdl.slices.slice_file import ReadCarried, to_bytes
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState


@dataclass(frozen=True)
class NodeFiles:
    """A snapshot: files that the first rank of each node has written there.

    Attributes:
        name: The name of the snapshot, which is part of the file names.
        holders: The first rank of each node.
    """

    name: str
    holders: tuple[int, ...]


@dataclass(frozen=True)
class SnapshotFiles:
    """The snapshot files of this node, in its slab root."""

    folder: Path

    def write(self, name: str, number: int, packed: bytes) -> None:
        """Write one part of a snapshot, completely or not at all.

        Args:
            name: The name of the snapshot.
            number: The number of the part.
            packed: The content of the file.
        """
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
    """Unpack what :func:`pack` has packed.

    Args:
        plan: The slice.
        packed: The packed states.
        dtype: The dtype of the weights.
    """
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
