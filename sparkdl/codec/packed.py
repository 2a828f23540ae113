"""Named tensors of parameters packed into bytes, each at a multiple of 64 bytes. Pure torch.

Frames between jobs: a small header and, between nodes, the raw bytes of a tensor.

A frame is 4 bytes of header length (big-endian), the header (a pickled record of metadata), and the
payload as it lies in memory. The payload never passes through pickle.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

_HEADER = struct.Struct(">I")


def encode(header: Any, *payload: torch.Tensor | None) -> bytes:
    """Return a frame; ``payload`` has contiguous CPU tensors, which follow one after another."""
    head = pickle.dumps(header, protocol=pickle.HIGHEST_PROTOCOL)
    parts: list[Any] = [_HEADER.pack(len(head)), head]
    for tensor in payload:
        if tensor is not None:
            parts.append(tensor.detach().numpy().view(np.uint8).data)
    return b"".join(parts)


def decode(frame: bytes) -> tuple[Any, memoryview]:
    """Return the header and the payload (a view of the frame, empty if there is none)."""
    (length,) = _HEADER.unpack_from(frame)
    body = memoryview(frame)[_HEADER.size :]
    return pickle.loads(body[:length]), body[length:]


def as_tensor(data: memoryview | np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return raw bytes as a one-dimensional tensor that shares their memory.

    Do not write to the tensor if the bytes are read-only.
    """
    if len(data) == 0:
        return torch.empty(0, dtype=dtype)
    if not (data if isinstance(data, memoryview) else data.data).readonly:
        return torch.frombuffer(data, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=dtype)


ALIGNMENT = 64
"""Segments start at multiples of this many bytes, as separately allocated tensors do."""
_LENGTH = struct.Struct("<q")
Tensors = Mapping[str, torch.Tensor]
"""Tensors by name."""
ByParameter = Mapping[int, Tensors]
"""Named tensors by the number of their parameter."""


class TensorSpec(NamedTuple):
    """A spec of a tensor: number of its parameter, name, dtype (without ``torch.``), shape."""

    number: int
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the values."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


def specs_of(tensors: ByParameter) -> tuple[TensorSpec, ...]:
    """Return the specs needed to unpack these tensors, in packed order."""
    return tuple(
        TensorSpec(number, name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for number, named in tensors.items()
        for name, tensor in named.items()
    )


def packed_nbytes(specs: Sequence[TensorSpec]) -> int:
    """Return the bytes of all tensors when packed; a multiple of 64."""
    return sum(aligned(spec.nbytes) for spec in specs)


def open_packed(
    specs: Sequence[TensorSpec], data: np.ndarray | memoryview
) -> dict[int, dict[str, torch.Tensor]]:
    """Return tensors that share the memory of ``data``, for reading or for writing."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    place = 0
    for spec in specs:
        raw = np.frombuffer(data, np.uint8, spec.nbytes, place)
        tensor = as_tensor(raw.data, getattr(torch, spec.dtype)).view(spec.shape)
        found.setdefault(spec.number, {})[spec.name] = tensor
        place += aligned(spec.nbytes)
    return found


def copy_packed(places: ByParameter, tensors: ByParameter) -> None:
    """Copy the values of ``tensors`` into ``places``, which :func:`open_packed` returned."""
    for number, named in places.items():
        for name, place in named.items():
            place.copy_(tensors[number][name])


def head_to_bytes(specs: Sequence[TensorSpec], **more: object) -> bytes:
    """Return the specs of packed tensors and the JSON values ``more`` as a header.

    The header is a length and JSON, padded to a multiple of 64 bytes. It suits bytes from
    elsewhere: unlike a pickle, it cannot run code.
    """
    text = json.dumps({**more, "specs": specs}).encode()
    return (_LENGTH.pack(len(text)) + text).ljust(aligned(_LENGTH.size + len(text)), b"\0")


def head_from_bytes(data: np.ndarray) -> tuple[tuple[TensorSpec, ...], dict[str, Any], int]:
    """Return the specs, the other values, and the offset at which the tensors begin."""
    (length,) = _LENGTH.unpack_from(data.data, 0)
    start = _LENGTH.size
    more = json.loads(data[start : start + length].tobytes())
    specs = tuple(
        TensorSpec(n, name, kind, tuple(shape)) for n, name, kind, shape in more.pop("specs")
    )
    return specs, more, aligned(start + length)


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of 64."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def join_files(files: Iterable[bytes]) -> bytearray:
    """Join files, each prefixed with its length."""
    data = bytearray()
    for file in files:
        data += _LENGTH.pack(len(file)) + file
    return data


def split_files(data: bytes | memoryview) -> Iterator[bytes]:
    """Yield the files that :func:`join_files` joined."""
    place = 0
    while place < len(data):
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size
        yield bytes(data[place : place + length])
        place += length
