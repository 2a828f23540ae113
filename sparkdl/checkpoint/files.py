"""Folders on any file system: a local path, or a URI of pyarrow or fsspec.

A :class:`Folder` is its URI and nothing else, so that it travels to tasks. A file appears under its
name only when it is complete: it is written under another name beside it and then moved.
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

from sparkdl.checkpoint import file_systems
from sparkdl.codec.describe import without_credentials
from sparkdl.errors import CheckpointError

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/+)(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PART = re.compile(r"\.([A-Za-z0-9._-]+)\.[0-9a-f]{16}\.part")


@dataclass(frozen=True)
class Entry:
    """What a folder holds under ``name``; ``kind``: "file", "folder" or "other" (a link)."""

    name: str
    kind: str
    nbytes: int = 0


class Backend(Protocol):
    """What a file system must be able to do, with paths of its own."""

    def make(self, path: str) -> None:
        """Make a folder and its parents; none is an error if it exists."""

    def write(self, path: str, temporary: str, data: bytes) -> None:
        """Write ``temporary``, then move it to ``path``."""

    def read(self, path: str, limit: int | None) -> bytes:
        """The bytes of a file; raises OSError unless it is a plain one, of ``limit`` bytes at most."""

    def entries(self, path: str) -> list[tuple[str, str, int]]:
        """Name, kind and size of what a folder holds; [] where there is none."""

    def delete(self, path: str) -> None:
        """Delete a file."""

    def delete_empty(self, path: str) -> None:
        """Delete a folder if nothing is in it."""


@dataclass(frozen=True)
class Folder:
    """A folder by its URI (for a local one: its absolute path). See :meth:`of`."""

    uri: str

    @staticmethod
    def of(path: str | os.PathLike[str]) -> Folder:
        """The folder at a path or URI; ``file:`` URIs become paths, relative paths absolute."""
        text = os.fspath(path)
        found = _URI.fullmatch(text)
        if found is None:
            return Folder(os.path.abspath(os.path.expanduser(text)))
        scheme, slashes, rest = found.groups()
        if scheme.lower() == "file":
            host, _, path = rest.partition("/") if len(slashes) == 2 else ("", "", rest)
            if host not in ("", "localhost"):
                raise CheckpointError(
                    f'"{text}" is a folder of the host "{host}": a file: URI is one of every '
                    f"node's own, file:///{path}"
                )
            return Folder(os.path.abspath("/" + unquote(path)))
        start = slashes if len(slashes) > 1 else "///"  # hdfs:/a is hdfs:///a
        place, mark, query = rest.partition("?")
        return Folder(f"{scheme}:{start}{place.rstrip('/')}{mark}{query}")

    def __str__(self) -> str:
        """For messages: without a user and password that a URI may hold."""
        return without_credentials(self.uri)

    def folder(self, name: str) -> Folder:
        """The folder ``name`` in this one."""
        return Folder(self._join(name))

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.uri.partition("?")[0].rpartition("/")[2]

    def make(self) -> None:
        """Make the folder and its parents; nothing happens if it exists."""
        with _explained("make the folder", str(self)):
            backend, path = self._open()
            backend.make(path)

    def write(self, name: str, data: bytes) -> None:
        """Write a file that is complete as soon as it can be seen.

        The folder must exist: a local folder that another node made does not exist here.
        """
        check_name(name)
        temporary = f".{name}.{secrets.token_hex(8)}.part"
        with _explained("write", f"{self}/{name}"):
            backend, path = self._open()
            backend.write(f"{path}/{name}", f"{path}/{temporary}", data)

    def read(self, name: str, limit: int | None = None) -> bytes:
        """The bytes of a file, never those behind a link, never more than ``limit``."""
        check_name(name)
        with _explained("read", f"{self}/{name}"):
            backend, path = self._open()
            return backend.read(f"{path}/{name}", limit)

    def entries(self) -> dict[str, Entry]:
        """What is in the folder, by name; empty where the folder does not exist."""
        with _explained("list", str(self)):
            backend, path = self._open()
            return {name: Entry(name, kind, size) for name, kind, size in backend.entries(path)}

    def delete(self, name: str) -> None:
        """Delete one file, or what an interrupted write of it left."""
        if not _PART.fullmatch(name):
            check_name(name)
        with _explained("delete", f"{self}/{name}"):
            backend, path = self._open()
            backend.delete(f"{path}/{name}")

    def delete_empty(self) -> None:
        """Delete the folder if nothing is in it."""
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
    """Raise CheckpointError unless ``name`` is the plain name of a file: no path, no dots first."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r} is no plain file name: a checkpoint names only its own files."
        )


def unfinished(name: str) -> str | None:
    """The file that a temporary file was to become, or None where ``name`` is no temporary file."""
    found = _PART.fullmatch(name)
    return found.group(1) if found else None


@functools.lru_cache(maxsize=256)
def _open(uri: str) -> tuple[Backend, str]:
    if "://" not in uri:
        return file_systems, uri
    system, path = file_systems.open_uri(uri)
    return system, path.rstrip("/")


@contextlib.contextmanager
def _explained(what: str, where: str) -> Iterator[None]:
    """Any failure as a CheckpointError that names the place (storage clients have errors of all
    kinds)."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        lines = (error.strerror if isinstance(error, OSError) else None) or str(error)
        reason = without_credentials(lines.strip().partition("\n")[0]) or type(error).__name__
        raise CheckpointError(f"cannot {what} {where}: {reason}.") from error
