"""Folders on any file system: a local path, or a URI of pyarrow or fsspec.

A :class:`Folder` is only its URI, so that it can be sent to tasks. A file appears under its name
only when it is complete: it is written under another name in the same folder and then renamed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from sparkdl.codec.describe import without_credentials
from sparkdl.codec.files import check_size, read_plain
from sparkdl.errors import CheckpointError

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/+)(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_PART = re.compile(r"\.([A-Za-z0-9._-]+)\.[0-9a-f]{16}\.part")


@dataclass(frozen=True)
class Entry:
    """An entry of a folder. ``kind`` is "file", "folder" or "other" (a link)."""

    name: str
    kind: str
    nbytes: int = 0


@dataclass(frozen=True)
class Folder:
    """A folder, given by its URI (if local: its absolute path). See :meth:`of`."""

    uri: str

    @staticmethod
    def of(path: str | os.PathLike[str]) -> Folder:
        """Return the folder at a path or URI; local ones become absolute paths."""
        text = os.fspath(path)
        found = _URI.fullmatch(text)
        if found is None:
            return Folder(os.path.abspath(os.path.expanduser(text)))
        scheme, slashes, rest = found.groups()
        if scheme.lower() == "file":
            host, _, path = rest.partition("/") if len(slashes) == 2 else ("", "", rest)
            if host not in ("", "localhost"):
                raise CheckpointError(
                    f'"{text}" names the host "{host}": a file: URI is a path on each node itself, '
                    f"so write file:///{path}"
                )
            return Folder(os.path.abspath("/" + unquote(path)))
        start = slashes if len(slashes) > 1 else "///"  # hdfs:/a is hdfs:///a
        place, mark, query = rest.partition("?")
        return Folder(f"{scheme}:{start}{place.rstrip('/')}{mark}{query}")

    def __str__(self) -> str:
        """Return the URI for messages, without a user and password that it may contain."""
        return without_credentials(self.uri)

    def folder(self, name: str) -> Folder:
        """Return the folder ``name`` in this one."""
        return Folder(self._join(name))

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.uri.partition("?")[0].rpartition("/")[2]

    def make(self) -> None:
        """Create the folder and its parents; nothing happens if it exists."""
        self._do("make the folder", "make")

    def write(self, name: str, data: bytes) -> None:
        """Write a file that is complete as soon as it is visible.

        The folder must exist: a local folder that another node created does not exist here.
        """
        check_name(name)
        self._do("write", "write", name, f".{name}.{secrets.token_hex(8)}.part", data)

    def read(self, name: str, limit: int | None = None) -> bytes:
        """Return the bytes of a file; never follow a link, and never read more than ``limit``
        bytes."""
        check_name(name)
        data: bytes = self._do("read", "read", name, limit)
        return data

    def move(self, name: str, target: Folder) -> None:
        """Move a file into another folder of the same file system, which has no file of this name."""
        check_name(name)
        self._do("move", "move", name, target)

    def entries(self) -> dict[str, Entry]:
        """Return the entries of the folder by name; empty if the folder does not exist."""
        return {entry.name: entry for entry in self._do("list", "entries")}

    def delete(self, name: str) -> None:
        """Delete one file, or the temporary file that an interrupted write left."""
        if not _PART.fullmatch(name):
            check_name(name)
        self._do("delete", "delete", name)

    def delete_empty(self) -> None:
        """Delete the folder if it is empty."""
        self._do("delete", "delete_empty")

    def _do(self, doing: str, method: str, name: str = "", *more: Any) -> Any:
        """Call a method of the file system for the folder, or for a file in it; a folder among
        ``more`` is one for a file of the same name.

        Any failure becomes a CheckpointError that names the place: storage clients raise errors of
        many types.
        """
        slash = "/" if name else ""
        try:
            system, path = _open(self.uri)
            given = [f"{_open(o.uri)[1]}/{name}" if isinstance(o, Folder) else o for o in more]
            return getattr(system, method)(f"{path}{slash}{name}", *given)
        except CheckpointError:
            raise
        except Exception as error:
            lines = (error.strerror if isinstance(error, OSError) else None) or str(error)
            reason = without_credentials(lines.strip().partition("\n")[0]) or type(error).__name__
            raise CheckpointError(f"cannot {doing} {self}{slash}{name}: {reason}.") from error

    def _join(self, name: str) -> str:
        check_name(name)
        place, mark, query = self.uri.partition("?") if "://" in self.uri else (self.uri, "", "")
        return f"{place.rstrip('/')}/{name}{mark}{query}"


def check_name(name: str) -> None:
    """Raise CheckpointError unless ``name`` is a plain file name, without a path or a leading dot."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r} is not a plain file name: a checkpoint may name only its own files."
        )


def unfinished(name: str) -> str | None:
    """Return the final name of a temporary file, or None if ``name`` is no temporary file."""
    found = _PART.fullmatch(name)
    return found.group(1) if found else None


@functools.lru_cache(maxsize=256)
def _open(uri: str) -> tuple[Local | Remote, str]:
    if "://" not in uri:
        return Local(), uri
    system, path = open_uri(uri)
    return system, path.rstrip("/")


class Local:
    """The local file system: atomic, durable writes; plain files only."""

    def make(self, path: str) -> None:
        """Create a folder and its parents."""
        os.makedirs(path, exist_ok=True)
        _sync_folder(os.path.dirname(path))

    def write(self, path: str, temporary: str, data: bytes) -> None:
        """Write and fsync the file ``temporary`` beside ``path``, rename it, and fsync the folder."""
        temporary = os.path.join(os.path.dirname(path), temporary)
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

    def entries(self, path: str) -> list[Entry]:
        """Return the entries of a folder; links are "other"."""
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
        temporary = f"{path.rpartition('/')[0]}/{temporary}"
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

    def entries(self, path: str) -> list[Entry]:
        """Return the entries of a folder."""
        self._refresh()
        selector = fs.FileSelector(path, allow_not_found=True, recursive=False)
        kinds = {fs.FileType.File: "file", fs.FileType.Directory: "folder"}
        return [
            Entry(info.base_name, kinds.get(info.type, "other"), info.size or 0)
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


def _entry(entry: os.DirEntry[str]) -> Entry:
    if entry.is_file(follow_symlinks=False):
        return Entry(entry.name, "file", entry.stat().st_size)
    folder = entry.is_dir(follow_symlinks=False)
    return Entry(entry.name, "folder" if folder else "other")


def _sync_folder(path: str) -> None:
    """Make a name survive a crash of the machine. Some file systems do not support this, and do not
    need it."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
