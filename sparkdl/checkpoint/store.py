"""Checkpoints in a folder: begin, commit, find and prune them. For the driver.

One checkpoint is one folder, ``iteration-0000000120-<stamp><random>``. Tasks write its slices, each
attempt under its own name. Then the driver checks that it sees them all and writes the manifest
last. A folder without a manifest is no checkpoint. The stamp grows with every checkpoint in the
folder, whatever the clocks show: "newest" is the checkpoint that was begun last, even after a run
went back to an earlier one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sparkdl.checkpoint.files import Folder, unfinished
from sparkdl.checkpoint.manifest import INCOMPLETE, MANIFEST, Manifest, StoredFile
from sparkdl.checkpoint.slice_io import read_checked, write_probe
from sparkdl.codec.files import checksum
from sparkdl.errors import CheckpointError, DamagedCheckpoint, ParameterError

logger = logging.getLogger("sparkdl")
HISTORY = "history.safetensors"

_WRITABLE = (
    "Give Checkpoint(path) a folder that can be written, on a file system that the driver and all "
    "executors share."
)
_OPEN = (
    "The path must be on a file system that the driver and all executors share, and the executors' "
    "user must be able to write to the folders that the driver creates there (see the driver's "
    "umask)."
)
NOT_SHARED = "The path must be on a file system that the driver and all executors share."

_FOLDER = re.compile(r"iteration-(\d{10,})-([0-9a-f]{12})[0-9a-f]{8}")
_OWN = re.compile(
    r"manifest\.json|history\.safetensors|[a-z]+-\d{5,}-[0-9a-f]{16}\.safetensors|probe-[0-9a-f]{16}"
    r"|piece-\d{5,}"
)
_RESULT = re.compile(r"result-([0-9a-f]{12})[0-9a-f]{8}")
RESULT_HOURS = 24
"""The age at which the result of a client that went away is deleted."""


def result_name() -> str:
    """Return the name of the folder of a new result, which lies beside the checkpoints for a while."""
    return f"result-{_milliseconds():012x}{secrets.token_hex(4)}"


def piece_name(number: int) -> str:
    """Return the name of a file of a result."""
    return f"piece-{number:05d}"


def holds_checkpoints(folder: Path) -> bool:
    """Return whether a folder of this machine is a checkpoint, or contains any."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return MANIFEST in names or any(map(_FOLDER.fullmatch, [folder.name, *names]))


class Skipped(NamedTuple):
    """A checkpoint that cannot be used, and the reason."""

    uri: str
    reason: str

    @property
    def incomplete(self) -> bool:
        """Return whether it was begun and never completed, for example because the driver was
        killed."""
        return self.reason == INCOMPLETE


class CheckpointStore:
    """The checkpoints in one folder.

    ``skipped`` lists the checkpoints that :meth:`candidates` skipped, and those added with
    :meth:`skip`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._root = Folder.of(path)
        self._single = False
        self.skipped: list[Skipped] = []

    @staticmethod
    def open(path: str | os.PathLike[str]) -> CheckpointStore:
        """Open the store at ``path``, a folder of checkpoints or a single checkpoint.

        Raise ParameterError if the folder is empty or does not exist.
        """
        store = CheckpointStore(path)
        entries = store._root.entries()
        store._single = MANIFEST in entries or _FOLDER.fullmatch(store._root.name) is not None
        if not entries:
            raise ParameterError(
                f"there is no checkpoint in {store}: the folder is empty or does not exist."
            )
        return store

    def __str__(self) -> str:
        return str(self._root)

    def holds(self, uri: str) -> bool:
        """Return whether the checkpoint ``uri`` is in this folder."""
        return any(folder.uri == uri for _, folder in self._folders())

    def prepare(self) -> None:
        """Create the folder and write into it, so that a path that is not writable fails early.

        Results in it whose clients went away are deleted.
        """
        try:
            self._root.make()
            self._root.delete(write_probe(self._root.uri))
        except CheckpointError as error:
            raise CheckpointError(f"{error} {_WRITABLE}") from None
        oldest = _milliseconds() - RESULT_HOURS * 3_600_000
        with contextlib.suppress(CheckpointError):
            for name in self._root.entries():
                match = _RESULT.fullmatch(name)
                if match and int(match[1], 16) < oldest:
                    self.discard(self._root.folder(name).uri)

    def tell_of_another_run(self, keep: int | None) -> None:
        """Log a warning if :meth:`prune` will delete checkpoints of another run.

        Call it for a run that does not continue from a checkpoint in this folder.
        """
        newest = None if keep is None else next(self.candidates(), None)
        if newest is not None:
            logger.warning(
                "%s holds checkpoints of another run, the newest of iteration %s, and this run "
                "deletes them when it writes its own (keep=%s). Use another folder, or continue "
                'that run with resume="latest".',
                self,
                f"{newest[1].iteration:,}",
                keep,
            )

    def check_probes(self, directory: str, probes: Iterable[str | CheckpointError]) -> None:
        """Check that the driver sees what tasks wrote into ``directory``, which :meth:`begin` made.

        ``probes`` are the results of :func:`sparkdl.checkpoint.slice_io.try_probe`.
        """
        entries = Folder(directory).entries()
        for probe in probes:
            if isinstance(probe, CheckpointError):
                raise CheckpointError(f"an executor {probe} {_OPEN}")
            if probe not in entries:
                raise CheckpointError(
                    f"what an executor wrote into {self} is not visible from the driver. "
                    f"{NOT_SHARED}"
                )

    def begin(self, iteration: int) -> str:
        """Create the folder of a new checkpoint, and return its URI for the tasks that write
        slices."""
        self._root.make()
        last = max((stamp for stamp, _ in self._folders()), default=0)
        stamp = max(_milliseconds(), last + 1)
        name = f"iteration-{iteration:010d}-{stamp:012x}{secrets.token_hex(4)}"
        folder = self._root.folder(name)
        folder.make()
        return folder.uri

    def discard(self, directory: str) -> None:
        """Delete the folder of an abandoned checkpoint. Anything that remains is pruned later."""
        with contextlib.suppress(CheckpointError):
            _delete(Folder(directory))

    def commit(self, directory: str, manifest: Manifest, history: bytes) -> Manifest:
        """Complete the checkpoint: check its files, write the history, then the manifest.

        Return the manifest as written; ``manifest`` lacks the history.
        """
        folder = Folder(directory)
        entries = folder.entries()
        for file in replace(manifest, history=None).all_files:
            problem = file.problem_in(entries)
            if problem:
                raise CheckpointError(
                    f"the checkpoint {folder} is not complete: seen from the driver, {problem}. "
                    f"{NOT_SHARED}"
                )
        record = StoredFile(name=HISTORY, nbytes=len(history), checksum=checksum(history))
        manifest = replace(manifest, history=record)
        data = manifest.to_json()
        folder.write(HISTORY, history)
        folder.write(MANIFEST, data)
        return manifest

    def candidates(self) -> Iterator[tuple[str, Manifest]]:
        """Yield the complete checkpoints, the newest first, as (URI, manifest).

        Only the sizes of files are checked here; their contents are checked when they are read.
        Clears ``skipped`` at its start.
        """
        self.skipped = []
        if self._single:
            folders = [self._root]
        else:
            folders = [folder for _, folder in sorted(self._folders(), reverse=True, key=_stamp)]
        for folder in folders:
            try:
                yield folder.uri, Manifest.read(folder)
            except CheckpointError as error:
                self.skip(folder.uri, str(error))

    def skip(self, uri: str, reason: str) -> None:
        """Record that the checkpoint ``uri`` is unusable."""
        self.skipped.append(Skipped(str(Folder(uri)), reason))

    def none_usable(self) -> CheckpointError | ParameterError:
        """Return the error to raise when no candidate is left; it says why each was skipped."""
        if not self.skipped:
            return ParameterError(f"there is no checkpoint to resume from in {self}.")
        reasons = "".join(f"\n  - {s.uri}: {s.reason}" for s in self.skipped)
        return CheckpointError(f"there is no checkpoint to resume from in {self}.{reasons}")

    def read_history(self, uri: str, manifest: Manifest) -> bytes:
        """Return the history's bytes; raise DamagedCheckpoint if there is no whole one."""
        folder = Folder(uri)
        if manifest.history is None:
            raise DamagedCheckpoint(f"{folder}: its manifest lists no history")
        try:
            return read_checked(folder, manifest.history)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{folder}: {manifest.history.name}: {error}") from error

    def prune(self, keep: int | None) -> list[str]:
        """Delete old and incomplete checkpoints.

        Only sparkdl's own files are deleted; a folder with other files in it stays. If a folder
        cannot be listed or deleted, the others are still processed, and the first error is raised
        at the end.

        ``keep``: how many of the newest complete ones stay (None: all). Incomplete ones that are
        newer than the newest complete one stay, too. Return the URIs of the deleted ones.
        """
        complete: list[Folder] = []
        doomed: list[Folder] = []
        problems: list[CheckpointError] = []
        for _, folder in sorted(self._folders(), reverse=True, key=_stamp):
            try:
                whole = MANIFEST in folder.entries()
            except CheckpointError as error:
                problems.append(error)
                continue
            if whole:
                complete.append(folder)
            elif complete:
                doomed.append(folder)
        doomed += complete[keep:] if keep is not None else []
        for folder in doomed:
            try:
                _delete(folder)
            except CheckpointError as error:
                problems.append(error)
        if problems:
            raise problems[0]
        return [folder.uri for folder in doomed]

    def _folders(self) -> list[tuple[int, Folder]]:
        """Return the folders with the name of a checkpoint and their stamps; links are ignored."""
        found = []
        for name, entry in self._root.entries().items():
            match = _FOLDER.fullmatch(name)
            if match and entry.kind == "folder":
                found.append((int(match.group(2), 16), self._root.folder(name)))
        return found


def _milliseconds() -> int:
    return time.time_ns() // 1_000_000


def _stamp(item: tuple[int, Folder]) -> tuple[int, str]:
    return item[0], item[1].name


def _delete(folder: Folder) -> None:
    """Delete a checkpoint, its manifest first, so that a half-deleted one never looks complete."""
    entries = folder.entries()
    own = [n for n, e in entries.items() if e.kind == "file" and _OWN.fullmatch(unfinished(n) or n)]
    for name in sorted(own, key=lambda n: n != MANIFEST):
        folder.delete(name)
    folder.delete_empty()
