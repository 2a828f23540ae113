"""The local file system, those of pyarrow, and those of fsspec through pyarrow's interface."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pyarrow as pa
from pyarrow import fs

from sparkdl.codec.files import check_size, read_plain
from sparkdl.errors import CheckpointError


class Local:
    """The local file system: atomic, durable writes; plain files only."""

    def make(self, path: str) -> None:
        """Create a folder and its parents."""
        os.makedirs(path, exist_ok=True)
        _sync_folder(os.path.dirname(path))

    def write(self, path: str, temporary: str, data: bytes) -> None:
        """Write and fsync ``temporary``, rename it to ``path``, and fsync the folder."""
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with open(handle, "wb", buffering=0) as file:
                view = memoryview(data)
                while view:  # one call writes at most 2 GiB
                    view = view[file.write(view) :]
                os.fsync(handle)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _sync_folder(os.path.dirname(path))

    def read(self, path: str, limit: int | None = None) -> bytes:
        """Return the bytes of a plain file; OSError if it is none, or larger than ``limit``."""
        return read_plain(path, limit)

    def entries(self, path: str) -> list[tuple[str, str, int]]:
        """Return name, kind and size of each entry; links are "other"."""
        listed = []
        with contextlib.suppress(FileNotFoundError), os.scandir(path) as found:
            for entry in found:
                with contextlib.suppress(FileNotFoundError):  # it was deleted in the meantime
                    listed.append(_entry(entry))
        return listed

    def move(self, path: str, target: str) -> None:
        """Give a file another path."""
        os.replace(path, target)
        _sync_folder(os.path.dirname(target))

    def delete(self, path: str) -> None:
        """Delete a file; it may be deleted already."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def delete_empty(self, path: str) -> None:
        """Delete a folder if it is empty."""
        if not self.entries(path):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(path)


class Remote:
    """One ``pyarrow.fs.FileSystem``. Its exceptions are not converted here."""

    def __init__(self, system: fs.FileSystem, refresh: Any = None) -> None:
        self._system = system
        self._refresh = refresh or (lambda: None)

    def make(self, path: str) -> None:
        """Create a folder and its parents."""
        self._system.create_dir(path, recursive=True)

    def write(self, path: str, temporary: str, data: bytes) -> None:
        """Write ``data`` to a file that is complete as soon as it is visible.

        The data is written to ``temporary``, which is then renamed to ``path``, because a stream
        that fails may leave half a file. On S3 it is written directly, because an object is visible
        only when all of it has arrived. A rename is a copy there, which takes as long again and
        fails above 5 GiB.
        """
        at_once = self._system.type_name == "s3"
        try:
            with self._system.open_output_stream(path if at_once else temporary) as stream:
                stream.write(data)
            if not at_once:
                self._system.move(temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._system.delete_file(temporary)
            raise

    def read(self, path: str, limit: int | None = None) -> bytes:
        """Return the bytes of a file; OSError if it is larger than ``limit``."""
        with self._system.open_input_file(path) as file:
            check_size(file.size(), limit)
            return file.read()

    def entries(self, path: str) -> list[tuple[str, str, int]]:
        """Return name, kind and size of each entry."""
        self._refresh()
        selector = fs.FileSelector(path, allow_not_found=True, recursive=False)
        kinds = {fs.FileType.File: "file", fs.FileType.Directory: "folder"}
        return [
            (info.base_name, kinds.get(info.type, "other"), info.size or 0)
            for info in self._system.get_file_info(selector)
        ]

    def move(self, path: str, target: str) -> None:
        """Give a file another path; an object store copies it."""
        self._system.move(path, target)

    def delete(self, path: str) -> None:
        """Delete a file; it may be deleted already."""
        with contextlib.suppress(FileNotFoundError):
            self._system.delete_file(path)

    def delete_empty(self, path: str) -> None:
        """Delete a folder if it is empty; in an object store it may have vanished with its last
        file."""
        if (
            not self.entries(path)
            and self._system.get_file_info(path).type == fs.FileType.Directory
        ):
            self._system.delete_dir(path)


def open_uri(uri: str) -> tuple[Remote, str]:
    """Return the file system of ``uri`` and the path in it.

    The file system is pyarrow's if that supports the scheme, otherwise fsspec's.
    """
    try:
        system, path = fs.FileSystem.from_uri(uri)
        return Remote(system), path
    except pa.ArrowInvalid as error:
        if "Unrecognized filesystem" not in str(error):
            raise
    scheme = uri.partition(":")[0]
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError:
        raise CheckpointError(
            f'"{scheme}" is not a file system that pyarrow knows. fsspec may know it: pip install '
            'fsspec (the extra "remote"), and the package for that file system.'
        ) from None
    known, path = fsspec.core.url_to_fs(uri)
    return Remote(fs.PyFileSystem(fs.FSSpecHandler(known)), known.invalidate_cache), path


def _entry(entry: os.DirEntry[str]) -> tuple[str, str, int]:
    if entry.is_symlink():
        return entry.name, "other", 0
    if entry.is_dir():
        return entry.name, "folder", 0
    if entry.is_file():
        return entry.name, "file", entry.stat().st_size
    return entry.name, "other", 0


def _sync_folder(path: str) -> None:
    """Make a name survive a crash of the machine. Some file systems do not support this, and do not
    need it."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
