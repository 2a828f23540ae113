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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote

from sparkdl.checkpoint.file_systems import Local, open_uri
from sparkdl.codec.describe import without_credentials
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


class Backend(Protocol):
    """The operations of a file system, with its own paths."""

    def make(self, path: str) -> None:
        """Create a folder and its parents; it is no error if they exist."""

    def write(self, path: str, temporary: str, data: bytes) -> None:
        """Write ``temporary``, then rename it to ``path``."""

    def read(self, path: str, limit: int | None) -> bytes:
        """Return the bytes of a file; raise OSError unless it is a plain file of at most ``limit``
        bytes."""

    def entries(self, path: str) -> list[tuple[str, str, int]]:
        """Return name, kind and size of the entries of a folder; [] if it does not exist."""

    def move(self, path: str, target: str) -> None:
        """Give a file another path, which no file has."""

    def delete(self, path: str) -> None:
        """Delete a file."""

    def delete_empty(self, path: str) -> None:
        """Delete a folder if it is empty."""


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
        with _explained("make the folder", str(self)):
            backend, path = self._open()
            backend.make(path)

    def write(self, name: str, data: bytes) -> None:
        """Write a file that is complete as soon as it is visible.

        The folder must exist: a local folder that another node created does not exist here.
        """
        check_name(name)
        temporary = f".{name}.{secrets.token_hex(8)}.part"
        with _explained("write", f"{self}/{name}"):
            backend, path = self._open()
            backend.write(f"{path}/{name}", f"{path}/{temporary}", data)

    def read(self, name: str, limit: int | None = None) -> bytes:
        """Return the bytes of a file; never follow a link, and never read more than ``limit``
        bytes."""
        check_name(name)
        with _explained("read", f"{self}/{name}"):
            backend, path = self._open()
            return backend.read(f"{path}/{name}", limit)

    def move(self, name: str, target: Folder) -> None:
        """Move a file into another folder of the same file system, which has no file of this name."""
        check_name(name)
        with _explained("move", f"{self}/{name}"):
            backend, path = self._open()
            backend.move(f"{path}/{name}", f"{target._open()[1]}/{name}")

    def entries(self) -> dict[str, Entry]:
        """Return the entries of the folder by name; empty if the folder does not exist."""
        with _explained("list", str(self)):
            backend, path = self._open()
            return {name: Entry(name, kind, size) for name, kind, size in backend.entries(path)}

    def delete(self, name: str) -> None:
        """Delete one file, or the temporary file that an interrupted write left."""
        if not _PART.fullmatch(name):
            check_name(name)
        with _explained("delete", f"{self}/{name}"):
            backend, path = self._open()
            backend.delete(f"{path}/{name}")

    def delete_empty(self) -> None:
        """Delete the folder if it is empty."""
        with _explained("delete", str(self)):
            backend, path = self._open()
            backend.delete_empty(path)

    def _join(self, name: str) -> str:
        check_name(name)
        place, mark, query = self.uri.partition("?") if "://" in self.uri else (self.uri, "", "")
        return f"{place.rstrip('/')}/{name}{mark}{query}"

    def _open(self) -> tuple[Backend, str]:
        return _open(self.uri)


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
def _open(uri: str) -> tuple[Backend, str]:
    if "://" not in uri:
        return Local(), uri
    system, path = open_uri(uri)
    return system, path.rstrip("/")


@contextlib.contextmanager
def _explained(what: str, where: str) -> Iterator[None]:
    """Convert any failure to a CheckpointError that names the place (storage clients raise errors
    of many types)."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        lines = (error.strerror if isinstance(error, OSError) else None) or str(error)
        reason = without_credentials(lines.strip().partition("\n")[0]) or type(error).__name__
        raise CheckpointError(f"cannot {what} {where}: {reason}.") from error
