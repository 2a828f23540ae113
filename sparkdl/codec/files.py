"""Reading of files that may have been tampered with: no link is followed, and sizes are checked first.

Any problem with the bytes of a file is a ValueError, and any problem with the file itself an OSError;
the callers turn both into their own errors. Nothing here runs code from a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import safetensors
import safetensors.torch
import torch

from sparkdl.codec.describe import without_credentials
from sparkdl.errors import ParameterError

MAX_JSON_BYTES = 32 << 20
"""Limit for a manifest or a ``model.json``. Parsed, it can take twenty times as much memory."""
MAX_HEADER_BYTES = 32 << 20
"""Limit for the header of a safetensors file: about 200,000 tensors."""
_LENGTH_BYTES = 8
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def is_uri(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` names a place in another file system."""
    return _URI.match(os.fspath(path)) is not None


def path_here(path: str | os.PathLike[str]) -> Path:
    """Return a path of this machine, not a URI, which would make a folder named "s3:"."""
    if is_uri(path):
        raise ParameterError(
            f'"{without_credentials(os.fspath(path))}" is a URI, which only checkpoints and models '
            "support: give a path on the driver's file system, and copy the files there yourself."
        )
    return Path(path)


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading, without ever waiting for it: no link, folder or pipe."""
    return open(path, "rb", opener=_plain)


def _plain(path: str, flags: int) -> int:
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError("it is not a regular file")
    return handle


def read_plain(path: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """Return the bytes of a plain file."""
    with open_plain(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        check_size(nbytes, limit)
        return file.read(nbytes)


def check_size(nbytes: int, limit: int | None) -> None:
    """Raise OSError if a file of ``nbytes`` is larger than ``limit``."""
    if limit is not None and nbytes > limit:
        raise OSError(f"it has {nbytes:,} bytes, and {limit:,} at most are expected")


def parse_json(data: bytes, finite: bool = False) -> Any:
    """Return the value of a JSON text without repeated keys; if ``finite``, without NaN and inf."""
    constant, number = (_refuse, _finite) if finite else (None, None)
    text = data.decode()
    try:
        return json.loads(
            text, object_pairs_hook=_once, parse_constant=constant, parse_float=number
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def checksum(data: bytes | memoryview) -> str:
    """Return the 20-byte BLAKE2b digest in hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=20).hexdigest()


def json_checksum(content: Mapping[str, Any]) -> str:
    """Return the checksum of a JSON object without its key "checksum", which is to hold it."""
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return checksum(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object as it will be read, with its :func:`json_checksum`."""
    plain = json.loads(json.dumps(content))
    return {**plain, "checksum": json_checksum(plain)}


def is_changed(content: Any) -> bool:
    """Return whether a JSON object differs from what was written; without a checksum it does not."""
    return (
        isinstance(content, dict)
        and "checksum" in content
        and content["checksum"] != json_checksum(content)
    )


def parse_tensors(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return a copy of the tensors of a safetensors file, and its metadata."""
    length = _header_bytes(data[:_LENGTH_BYTES], len(data))
    header = parse_json(data[_LENGTH_BYTES : _LENGTH_BYTES + length], finite=True)
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    with _one_error():
        return safetensors.torch.load(data), dict(header.get("__metadata__") or {})


@contextlib.contextmanager
def mappable(path: str | os.PathLike[str], links: bool = False) -> Iterator[str]:
    """Yield a path under which safetensors may map the checked file inside the block.

    It stays the same file even if another one takes its name. safetensors' and torch's errors
    inside the block become ValueErrors. With ``links``, follow links, for a file that a user named.
    """
    with open_plain(os.path.realpath(path) if links else path) as file:
        _header_bytes(file.read(_LENGTH_BYTES), os.fstat(file.fileno()).st_size)
        with _one_error():
            yield f"/dev/fd/{file.fileno()}"


def _header_bytes(first: bytes, nbytes: int) -> int:
    """Return the length of the header of a safetensors file of ``nbytes``."""
    length = int.from_bytes(first, "little")
    if len(first) < _LENGTH_BYTES or length > nbytes - _LENGTH_BYTES:
        raise ValueError("it is too short for a safetensors file")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length:,} bytes: more than {MAX_HEADER_BYTES:,}")
    return length


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    """Turn errors of safetensors and torch on malformed bytes into ValueErrors."""
    try:
        yield
    except (
        safetensors.SafetensorError,
        ArithmeticError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
    ) as error:
        kind = f"{type(error).__name__} " if isinstance(error, (LookupError, MemoryError)) else ""
        raise ValueError(f"{kind}{error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is given twice")
        found[key] = value
    return found


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not an allowed number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _refuse(text)
    return number
