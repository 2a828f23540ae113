"""Frames between jobs: a small header and, between nodes, the raw bytes of a tensor.

A frame is 4 bytes of header length (big-endian), the header (a pickled record of metadata), and the
payload as it lies in memory. The payload never passes through pickle.
"""

from __future__ import annotations

import pickle
import struct
import warnings
from typing import Any

import numpy as np
import torch

_LENGTH = struct.Struct(">I")


def encode(header: Any, *payload: torch.Tensor | None) -> bytes:
    """Return a frame; ``payload`` has contiguous CPU tensors, which follow one after another."""
    head = pickle.dumps(header, protocol=pickle.HIGHEST_PROTOCOL)
    parts: list[Any] = [_LENGTH.pack(len(head)), head]
    for tensor in payload:
        if tensor is not None:
            parts.append(tensor.detach().numpy().view(np.uint8).data)
    return b"".join(parts)


def decode(frame: bytes) -> tuple[Any, memoryview]:
    """Return the header and the payload (a view of the frame, empty if there is none)."""
    (length,) = _LENGTH.unpack_from(frame)
    body = memoryview(frame)[_LENGTH.size :]
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
