"""What replicas keep between iterations in a checkpoint: one safetensors file a replica.

Tensors are named ``NUMBER.NAME``: the number of the parameter, and what the tensor is of it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import safetensors.torch
import torch

from sparkdl.checkpoint.files import Folder
from sparkdl.checkpoint.manifest import ReplicaFile, checksum
from sparkdl.checkpoint.slice_io import read_checked
from sparkdl.codec.files import parse_tensors
from sparkdl.codec.packed import ByParameter
from sparkdl.codec.safe import STORABLE
from sparkdl.errors import DamagedCheckpoint

_KEY = re.compile(r"[0-9]{1,9}\..*", re.DOTALL)


@dataclass(frozen=True)
class WriteResiduals:
    """Run at a replica's place: write what it keeps into the checkpoint ``directory``.

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
    """Run at a replica's place: what it kept, or None where it kept nothing.

    Raises :class:`sparkdl.DamagedCheckpoint` that names the file.
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
