"""Saved models at URIs: written and read through a local folder.

A URI belongs to a Hadoop file system of the running session, as the paths that Spark reads and
writes, or else to one that checkpoints reach (:mod:`sparkdl.checkpoint.files`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext

from sparkdl.checkpoint.files import Folder
from sparkdl.codec.describe import without_credentials
from sparkdl.codec.files import is_uri
from sparkdl.errors import CheckpointError, ParameterError, UserError
from sparkdl.infer.manifest import (
    FILES,
    MODEL,
    file_checksum,
    holds_manifest,
    is_staged,
    staged_name,
)

NEW, OLD = ".sparkdl-new", ".sparkdl-old"
"""The ends of the names of a folder that replaces another, and of the other one meanwhile."""


class CheckpointFolder:
    """A folder that checkpoints reach, with the methods of :class:`HadoopFolder`."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def names(self) -> set[str]:
        """Return the names in the folder."""
        return set(self._folder.entries())

    def upload(self, file: Path, name: str) -> None:
        """Write a local file into the folder, and make the folder."""
        self._folder.make()
        self._folder.write(name, file.read_bytes())

    def download(self, name: str, file: Path) -> None:
        """Copy a file of the folder to a local one."""
        file.write_bytes(self._folder.read(name))

    def delete(self, name: str) -> None:
        """Delete a file of the folder."""
        self._folder.delete(name)


class HadoopFolder:
    """A folder at a URI of a Hadoop file system; see :meth:`of`."""

    def __init__(self, uri: str, system: Any, jvm: Any) -> None:
        self._uri, self._system, self._jvm = uri.rstrip("/"), system, jvm

    @staticmethod
    def of(uri: str) -> HadoopFolder | None:
        """Return the folder; None if no session runs here, or its Hadoop does not know the scheme."""
        context = SparkContext._active_spark_context
        if context is None or context._jvm is None or context._jsc is None:
            return None
        try:
            return HadoopFolder.at(uri, context._jvm, context._jsc.hadoopConfiguration())
        except Py4JError:  # no such scheme, or its classes are not there
            return None

    @staticmethod
    def at(uri: str, jvm: Any, configuration: Any) -> HadoopFolder:
        """Return the folder at a URI or path; Py4JError if Hadoop does not know the scheme."""
        system = jvm.org.apache.hadoop.fs.Path(uri).getFileSystem(configuration)
        return HadoopFolder(uri, system, jvm)

    def qualified(self) -> str:
        """Return the URI of the folder, with its scheme and host."""
        return str(self._system.makeQualified(self._path("")).toUri().toString())

    def names(self) -> set[str]:
        """Return the names in the folder; none if there is no folder."""
        with self._explained("list"):
            folder = self._path("")
            if not self._system.exists(folder):
                return set()
            return {status.getPath().getName() for status in self._system.listStatus(folder)}

    def upload(self, file: Path, name: str) -> None:
        """Write a local file, or a folder with its files, into the folder, which is made."""
        with self._explained("write"):
            self._system.copyFromLocalFile(False, True, self._local(file), self._path(name))

    def download(self, name: str, file: Path) -> None:
        """Copy a file of the folder to a local one, or a folder in it with its files."""
        with self._explained("read"):
            self._system.copyToLocalFile(False, self._path(name), self._local(file), True)

    def delete(self, name: str) -> None:
        """Delete a file of the folder."""
        with self._explained("delete"):
            self._system.delete(self._path(name), False)

    @contextlib.contextmanager
    def replacing(self) -> Iterator[str]:
        """Yield the path of a new folder, which takes the place of this one after the block.

        Whenever the process is killed, one of them is whole, and :meth:`readable` says where it is.
        """
        here, new, old = self._path(""), self._path("", NEW), self._path("", OLD)
        with self._explained("replace"):
            if self.readable() != self._uri:
                self._rename(new, here)
            self._system.delete(new, True)
        try:
            yield self._uri + NEW
        except BaseException:
            with contextlib.suppress(CheckpointError), self._explained("delete"):
                self._system.delete(new, True)
            raise
        with self._explained("replace"):
            self._system.delete(old, True)
            if self._system.exists(here):
                self._rename(here, old)
            self._rename(new, here)
            self._system.delete(old, True)

    def readable(self) -> str:
        """Return the path of the folder: another one where :meth:`replacing` was killed at its end."""
        here, new, old = self._path(""), self._path("", NEW), self._path("", OLD)
        with self._explained("read"):
            moved = not self._system.exists(here) and self._system.exists(old)
            return self._uri + NEW if moved and self._system.exists(new) else self._uri

    def _rename(self, path: Any, target: Any) -> None:
        if not self._system.rename(path, target):
            raise CheckpointError(
                f"cannot rename {without_credentials(str(path))} to {target.getName()}."
            )

    def _path(self, name: str, suffix: str = "") -> Any:
        place = f"{self._uri}/{name}" if name else self._uri
        return self._jvm.org.apache.hadoop.fs.Path(place + suffix)

    def _local(self, file: Path) -> Any:
        # in parts, which Hadoop takes as they are: it does not decode the %20 of a URI
        return self._jvm.org.apache.hadoop.fs.Path("file", None, str(file.absolute()))

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Convert Java's errors. Raises CheckpointError, which names the place."""
        try:
            yield
        except Py4JError as error:
            java = getattr(error, "java_exception", None)
            said = str(error if java is None else java.toString()).strip().partition("\n")[0]
            place, reason = without_credentials(self._uri), without_credentials(said)
            raise CheckpointError(f"cannot {what} {place}: {reason}.") from error


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """Return the local folder that a path or a ``file:`` URI names; None for another URI."""
    text = os.fspath(path)
    if not text:
        raise ParameterError("the path of the model is empty: name a folder.")
    if not is_uri(text):
        return Path(text).expanduser()
    folder = Folder.of(text)
    return None if "://" in folder.uri else Path(folder.uri)


def folder_at(uri: str) -> HadoopFolder | CheckpointFolder:
    """Return the folder at a URI."""
    return HadoopFolder.of(uri) or CheckpointFolder(Folder.of(uri))


def holds_model(uri: str) -> bool:
    """Return whether a saved model is at ``uri``; a folder that cannot be listed holds none."""
    try:
        return holds_manifest(folder_at(uri).names())
    except CheckpointError:
        return False


@contextlib.contextmanager
def uploaded(uri: str, overwrite: bool) -> Iterator[Path]:
    """Yield a local folder, whose files are uploaded to ``uri`` after the block.

    The manifest comes last; where a model is replaced, see [Note: replacing a model].
    """
    folder = folder_at(uri)
    before = folder.names()
    replacing = holds_manifest(before)
    if replacing and not overwrite:
        place = without_credentials(uri)
        raise FileExistsError(f"{place} already holds a model: pass overwrite=True to replace it.")
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as made:
        yield Path(made)
        present = [name for name in FILES if Path(made, name).exists()]
        mark = f"-{secrets.token_hex(4)}"
        staged = {
            name: staged_name(name, file_checksum(Path(made, name)), mark) for name in present
        }
        for name in present if replacing else ():
            folder.upload(Path(made, name), staged[name])
        for name in [MODEL, *present[:-1]] if replacing else present:
            folder.upload(Path(made, name), name)
    left = {name for name in before if is_staged(name)} | (before & {*FILES} - {*present})
    for name in sorted(left | ({*staged.values()} if replacing else set()), reverse=True):
        folder.delete(name)


@contextlib.contextmanager
def downloaded(uri: str) -> Iterator[Path]:
    """Yield a local copy of the model at ``uri``; errors inside the block name the URI instead."""
    folder = folder_at(uri)
    names = folder.names()
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as made:
        for name in names:
            if name in FILES or is_staged(name):
                folder.download(name, Path(made, name))
        try:
            yield Path(made)
        except UserError as error:
            text = str(error).replace(made, without_credentials(uri))
            raise type(error)(text) from error.__cause__
