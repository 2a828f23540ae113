"""The local file system: atomic, durable writes; plain files only."""

from __future__ import annotations

import contextlib
import os

from sparkdl.codec.files import read_plain


def make(path: str) -> None:
    """Make a folder and its parents."""
    os.makedirs(path, exist_ok=True)
    _sync_folder(os.path.dirname(path))


def write(path: str, temporary: str, data: bytes) -> None:
    """Write and fsync ``temporary``, rename it to ``path``, and fsync the folder."""
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(handle, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:  # one call writes 2 GiB at most
                view = view[file.write(view) :]
            os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(os.path.dirname(path))


def read(path: str, limit: int | None = None) -> bytes:
    """The bytes of a plain file. Raises OSError for a link, a folder, a pipe, a larger file."""
    return read_plain(path, limit)


def entries(path: str) -> list[tuple[str, str, int]]:
    """Name, kind and size of each entry; links are "other"."""
    listed = []
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError):  # it went while it was looked at
                listed.append(_entry(entry))
    return listed


def delete(path: str) -> None:
    """Delete a file; it may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def delete_empty(path: str) -> None:
    """Delete a folder if it is empty."""
    if not entries(path):
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(path)


def _entry(entry: os.DirEntry[str]) -> tuple[str, str, int]:
    if entry.is_symlink():
        return entry.name, "other", 0
    if entry.is_dir():
        return entry.name, "folder", 0
    if entry.is_file():
        return entry.name, "file", entry.stat().st_size
    return entry.name, "other", 0


def _sync_folder(path: str) -> None:
    """So that a name outlives a crash of the machine; some file systems cannot, and need not."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
