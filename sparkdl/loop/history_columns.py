"""The columns of a history as a safetensors file, for checkpoints.

A number takes 8 bytes. JSON takes twice as many, and needs seconds to write the history of a long
run, every time.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from sparkdl.codec.files import parse_json, parse_tensors

DTYPES = {"q": torch.int64, "d": torch.float64}
_REST = "history"


def pack(columns: Mapping[str, array[Any]], length: int, rest: Mapping[str, Any]) -> bytes:
    """Return the file as bytes.

    Args:
        columns: The columns by name.
        length: How many numbers of each column are written, from the first.
        rest: Everything else, as plain values.
    """
    # by way of torch, each new length would leave a ctypes class behind
    arrays = {
        name: np.frombuffer(column, dtype=column.typecode, count=length)
        if length
        else np.empty(0, dtype=column.typecode)
        for name, column in columns.items()
    }
    return safetensors.numpy.save(arrays, {_REST: json.dumps(rest)})


def unpack(data: bytes, codes: Mapping[str, str]) -> tuple[dict[str, array[Any]], dict[str, Any]]:
    """Read the columns and the rest from the bytes that :func:`pack` made.

    Args:
        data: The bytes.
        codes: The typecodes of the columns that must be there; other columns have "d".

    Raises:
        ValueError: The content is wrong.
        KeyError: The metadata is missing.
        TypeError: A value has the wrong type.
    """
    tensors, metadata = parse_tensors(data)
    missing = [name for name in codes if name not in tensors]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}")
    columns = {}
    for name, tensor in tensors.items():
        code = codes.get(name, "d")
        if tensor.ndim != 1 or tensor.dtype != DTYPES[code]:
            raise ValueError(f"its {name} is {list(tensor.shape)} of {tensor.dtype}")
        column = columns[name] = array(code)
        column.frombytes(tensor.numpy().tobytes())
    if len({len(column) for column in columns.values()}) > 1:
        raise ValueError("its columns differ in length")
    rest = parse_json(metadata[_REST].encode())
    if not isinstance(rest, dict):
        raise ValueError("its metadata is not an object")
    return columns, rest
