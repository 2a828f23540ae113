"""Saved models at URIs: written and read through a local folder.

A URI belongs to a Hadoop file system of the running session, as the paths that Spark reads and
writes, or else to one that checkpoints reach (:mod:`sparkdl.checkpoint.file_systems`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from sparkdl.checkpoint.files import Folder
from sparkdl.codec.describe import without_credentials
from sparkdl.codec.files import is_uri
from sparkdl.errors import CheckpointError, ParameterError, UserError
from sparkdl.infer.hadoop_folder import HadoopFolder
from sparkdl.infer.saved_model import (
    FILES,
    MODEL,
    file_checksum,
    holds_manifest,
    is_staged,
    staged_name,
)


class RemoteFolder(Protocol):
    """A folder of another file system."""

    def names(self) -> set[str]:
        """Return the names in the folder; none if there is no folder."""

    def upload(self, file: Path, name: str) -> None:
        """Write a local file into the folder."""

    def download(self, name: str, file: Path) -> None:
        """Copy a file of the folder to a local one."""

    def delete(self, name: str) -> None:
        """Delete a file of the folder."""


class CheckpointFolder:
    """A folder that checkpoints reach."""

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


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """Return the local folder that a path or a ``file:`` URI names; None for another URI."""
    text = os.fspath(path)
    if not text:
        raise ParameterError("the path of the model is empty: name a folder.")
    if not is_uri(text):
        return Path(text).expanduser()
    folder = Folder.of(text)
    return None if "://" in folder.uri else Path(folder.uri)


def folder_at(uri: str) -> RemoteFolder:
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
