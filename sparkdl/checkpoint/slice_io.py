"""The parts of checkpoints that run in tasks: write a slice, read a slice of any cut. Needs no
Spark."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import safetensors.torch
import torch

from sparkdl.checkpoint.files import Folder
from sparkdl.checkpoint.manifest import ReplicaFile, SliceFile, StoredFile
from sparkdl.codec.files import checksum, parse_tensors
from sparkdl.codec.packed import ByParameter
from sparkdl.codec.safe import STORABLE
from sparkdl.errors import CheckpointError, DamagedCheckpoint
from sparkdl.slices.slice_file import StoredSlice, reslice, to_bytes, unpack
from sparkdl.slices.spec import SliceSpec, SliceState


def write_slice(
    directory: str, index: int, plan: SliceSpec, state: SliceState, kind: str = "slice"
) -> SliceFile:
    """Write one slice into a checkpoint, and return its record for the manifest.

    No two attempts write the same file, so a task may run twice.
    """
    return write_packed(directory, index, (plan.start, plan.stop), to_bytes(plan, state), kind)


def write_packed(
    directory: str, index: int, bounds: tuple[int, int], data: bytes, kind: str
) -> SliceFile:
    """Write a packed slice of elements [start, stop), and return its record for the manifest."""
    name = f"{kind}-{index:05d}-{secrets.token_hex(8)}.safetensors"
    Folder(directory).write(name, data)
    return SliceFile(
        name=name,
        nbytes=len(data),
        checksum=checksum(data),
        index=index,
        start=bounds[0],
        stop=bounds[1],
    )


def write_probe(directory: str) -> str:
    """Write a small file into a folder, to test whether that works, and return its name."""
    name = f"probe-{secrets.token_hex(8)}"
    Folder(directory).write(name, b"probe\n")
    return name


def try_probe(directory: str) -> str | CheckpointError:
    """Return the name from :func:`write_probe`, or the error with which it failed."""
    try:
        return write_probe(directory)
    except CheckpointError as error:
        return CheckpointError(str(error))


def read_slice_files(
    directory: str, files: Sequence[SliceFile], plan: SliceSpec, dtype: torch.dtype
) -> SliceState:
    """Return the state of slice ``plan`` from a checkpoint, whatever N it was written with.

    Only files that overlap with the slice are read; raise DamagedCheckpoint if one is damaged.
    """
    needed = [f for f in files if f.start < plan.stop and plan.start < f.stop]
    if not needed:  # an empty slice: any file shows which arrays a state has
        needed = sorted(files, key=lambda f: f.nbytes)[:1]
    folder = Folder(directory)
    try:
        return reslice((_read_part(folder, file) for file in needed), plan, dtype)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{folder}: {error}") from error


def _read_part(folder: Folder, file: SliceFile) -> StoredSlice:
    try:
        part = unpack(read_checked(folder, file))
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{file.name}: {error}") from error
    if (part.start, part.stop) != (file.start, file.stop):
        raise DamagedCheckpoint(f"{file.name}: it holds another slice than the manifest says")
    return part


def read_checked(folder: Folder, file: StoredFile) -> bytes:
    """Return the bytes of a file; raise DamagedCheckpoint if they are not those of the manifest."""
    try:
        data = folder.read(file.name, limit=file.nbytes)
    except CheckpointError as error:
        raise DamagedCheckpoint(str(error)) from error
    if len(data) != file.nbytes:
        raise DamagedCheckpoint(f"it has {len(data)} bytes instead of {file.nbytes}")
    if checksum(data) != file.checksum:
        raise DamagedCheckpoint("its bytes were changed (its checksum differs)")
    return data


_KEY = re.compile(r"[0-9]{1,9}\..*", re.DOTALL)


@dataclass(frozen=True)
class WriteResiduals:
    """Callable that runs where a replica is: write what it keeps into the checkpoint ``directory``.

    No two attempts write the same file, so a task may run twice.
    """

    directory: str

    def __call__(self, replica: int, kept: ByParameter) -> ReplicaFile:
        tensors = {
            f"{number}.{name}": tensor.contiguous()
            for number, named in kept.items()
            for name, tensor in named.items()
        }
        data = safetensors.torch.save(tensors)
        name = f"residual-{replica:05d}-{secrets.token_hex(8)}.safetensors"
        Folder(self.directory).write(name, data)
        return ReplicaFile(name=name, nbytes=len(data), checksum=checksum(data), replica=replica)


@dataclass(frozen=True)
class ReadResiduals:
    """Callable that runs where a replica is: return what it kept, or None if it kept nothing.

    A call raises :class:`sparkdl.DamagedCheckpoint`, which names the file.
    """

    directory: str
    files: Sequence[ReplicaFile]

    def __call__(self, replica: int) -> ByParameter | None:
        file = next((file for file in self.files if file.replica == replica), None)
        if file is None:
            return None
        folder, found = Folder(self.directory), dict[int, dict[str, torch.Tensor]]()
        try:
            tensors, _ = parse_tensors(read_checked(folder, file))
            for key, tensor in tensors.items():
                if not _KEY.fullmatch(key) or tensor.dtype not in STORABLE:
                    raise ValueError(f'it holds "{key}" of {tensor.dtype}')
                number, _, name = key.partition(".")
                found.setdefault(int(number), {})[name] = tensor
        except (DamagedCheckpoint, ValueError) as error:
            raise DamagedCheckpoint(f"{folder}: {file.name}: {error}") from error
        return found


@dataclass(frozen=True)
class TryFolder:
    """Callable that runs on a slice's owner: test whether it can write into the folder of a
    checkpoint."""

    directory: str

    def __call__(self, index: int, plan: SliceSpec, state: SliceState) -> str | CheckpointError:
        return try_probe(self.directory)


def _bounds(index: int, plan: SliceSpec, state: SliceState) -> tuple[int, int]:
    """Return the elements of the flat vector that are in a slice. Runs on the owner."""
    return plan.start, plan.stop


@dataclass(frozen=True)
class WriteSlice:
    """Callable that runs on a slice's owner: write the slice into the checkpoint."""

    directory: str
    kind: str

    def __call__(self, index: int, plan: SliceSpec, state: SliceState) -> SliceFile:
        return write_slice(self.directory, index, plan, state, self.kind)
