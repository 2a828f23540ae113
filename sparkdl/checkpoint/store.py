"""Checkpoints in a folder: begin, commit, find and prune them on the driver; write and read slices, of
any cut, in tasks.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch

from sparkdl.checkpoint.files import Folder, unfinished
from sparkdl.checkpoint.manifest import (
    INCOMPLETE,
    MANIFEST,
    Manifest,
    ReplicaFile,
    SliceFile,
    StoredFile,
)
from sparkdl.codec.files import parse_tensors
from sparkdl.codec.packed import ByParameter
from sparkdl.codec.safe import STORABLE
from sparkdl.errors import CheckpointError, DamagedCheckpoint, ParameterError
from sparkdl.slices.slice_file import StoredSlice, reslice, to_bytes, unpack
from sparkdl.slices.spec import SliceSpec, SliceState

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

        ``probes`` are the results of :class:`TryFolder`.
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
        manifest = replace(manifest, history=StoredFile.write(folder, HISTORY, history))
        folder.write(MANIFEST, manifest.to_json())
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
            folders = [folder for _, folder in self._folders()]
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
            return manifest.history.read(folder)
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
        for _, folder in self._folders():
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
        """Return the folders with the name of a checkpoint and their stamps, the newest first; links
        are ignored."""
        found = []
        for name, entry in self._root.entries().items():
            match = _FOLDER.fullmatch(name)
            if match and entry.kind == "folder":
                found.append((int(match.group(2), 16), self._root.folder(name)))
        return sorted(found, reverse=True, key=lambda item: (item[0], item[1].name))


def _milliseconds() -> int:
    return time.time_ns() // 1_000_000


def _delete(folder: Folder) -> None:
    """Delete a checkpoint, its manifest first, so that a half-deleted one never looks complete."""
    entries = folder.entries()
    own = [n for n, e in entries.items() if e.kind == "file" and _OWN.fullmatch(unfinished(n) or n)]
    for name in sorted(own, key=lambda n: n != MANIFEST):
        folder.delete(name)
    folder.delete_empty()


def write_probe(directory: str) -> str:
    """Write a small file into a folder, to test whether that works, and return its name."""
    name = f"probe-{secrets.token_hex(8)}"
    Folder(directory).write(name, b"probe\n")
    return name


def read_slice_files(
    directory: str, files: Sequence[SliceFile], plan: SliceSpec, dtype: torch.dtype
) -> SliceState:
    """Return the state of slice ``plan`` from a checkpoint, whatever N it was written with.

    Only files that overlap with the slice are read; raise DamagedCheckpoint if one is damaged.
    """
    needed = [f for f in files if f.start < plan.stop and plan.start < f.stop]
    if not needed:  # an empty slice: any file shows which arrays a state has
        needed = sorted(files, key=lambda f: f.nbytes)[:1]
    folder = Folder(directory)
    try:
        return reslice((_read_part(folder, file) for file in needed), plan, dtype)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{folder}: {error}") from error


def _read_part(folder: Folder, file: SliceFile) -> StoredSlice:
    try:
        part = unpack(file.read(folder))
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{file.name}: {error}") from error
    if (part.start, part.stop) != (file.start, file.stop):
        raise DamagedCheckpoint(f"{file.name}: it holds another slice than the manifest says")
    return part


_KEY = re.compile(r"[0-9]{1,9}\..*", re.DOTALL)


@dataclass(frozen=True)
class WriteResiduals:
    """Callable that runs where a replica is: write what it keeps into the checkpoint ``directory``.

    No two attempts write the same file, so a task may run twice.
    """

    directory: str

    def __call__(self, replica: int, kept: ByParameter) -> ReplicaFile:
        tensors = {
            f"{number}.{name}": tensor.contiguous()
            for number, named in kept.items()
            for name, tensor in named.items()
        }
        data = safetensors.torch.save(tensors)
        name = f"residual-{replica:05d}-{secrets.token_hex(8)}.safetensors"
        return ReplicaFile.write(Folder(self.directory), name, data, replica=replica)


@dataclass(frozen=True)
class ReadResiduals:
    """Callable that runs where a replica is: return what it kept, or None if it kept nothing.

    A call raises :class:`sparkdl.DamagedCheckpoint`, which names the file.
    """

    directory: str
    files: Sequence[ReplicaFile]

    def __call__(self, replica: int) -> ByParameter | None:
        file = next((file for file in self.files if file.replica == replica), None)
        if file is None:
            return None
        folder, found = Folder(self.directory), dict[int, dict[str, torch.Tensor]]()
        try:
            tensors, _ = parse_tensors(file.read(folder))
            for key, tensor in tensors.items():
                if not _KEY.fullmatch(key) or tensor.dtype not in STORABLE:
                    raise ValueError(f'it holds "{key}" of {tensor.dtype}')
                number, _, name = key.partition(".")
                found.setdefault(int(number), {})[name] = tensor
        except (DamagedCheckpoint, ValueError) as error:
            raise DamagedCheckpoint(f"{folder}: {file.name}: {error}") from error
        return found


@dataclass(frozen=True)
class TryFolder:
    """Callable that runs on a slice's owner: test whether it can write into the folder of a
    checkpoint."""

    directory: str

    def __call__(self, index: int, plan: SliceSpec, state: SliceState) -> str | CheckpointError:
        """Return the name from :func:`write_probe`, or the error with which it failed."""
        try:
            return write_probe(self.directory)
        except CheckpointError as error:
            return CheckpointError(str(error))


@dataclass(frozen=True)
class WriteSlice:
    """Callable that runs on a slice's owner: write the slice, and return its record for the manifest.

    No two attempts write the same file, so a task may run twice.
    """

    directory: str
    kind: str

    def __call__(self, index: int, plan: SliceSpec, state: SliceState) -> SliceFile:
        return self.packed(index, plan, to_bytes(plan, state))

    def packed(self, index: int, part: SliceSpec | StoredSlice, data: bytes) -> SliceFile:
        """Write the bytes of a slice that holds the elements of ``part``."""
        name = f"{self.kind}-{index:05d}-{secrets.token_hex(8)}.safetensors"
        bounds = {"start": part.start, "stop": part.stop}
        return SliceFile.write(Folder(self.directory), name, data, index=index, **bounds)
