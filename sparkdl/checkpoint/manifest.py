"""The manifest of a checkpoint: the state of the run, its identity (the model's layout and the
data), and the files of the checkpoint."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from sparkdl.checkpoint.files import Entry, Folder, check_name
from sparkdl.codec.describe import redact
from sparkdl.codec.files import MAX_JSON_BYTES, checksum, json_checksum, parse_json
from sparkdl.codec.safe import from_plain, to_plain
from sparkdl.data.fields import SampleHandle
from sparkdl.errors import CheckpointError, DamagedCheckpoint, counted
from sparkdl.loop.state import Validated
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.flat import Layout
from sparkdl.settings import __version__

MANIFEST = "manifest.json"
INCOMPLETE = "it has no manifest, so it was never completed"
FORMAT = "sparkdl-checkpoint"
VERSION = 1
CONSTANTS = ("replicas", "batch_size", "local_steps", "consistency", "seed", "sampling")
"""The constants that a resumed run must have in common with the checkpoint."""
OF_STATE = ("iteration", "epoch", "position", "samples", "seconds", "loss_scale", "skipped")
"""The counters that a manifest has in common with the state of the run."""
FEW = 5
"""The number of differences that are listed; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class TensorIdentity:
    """A tensor of the flat vector: its name, kind, shape and dtype (without ``torch.``)."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f'{"parameter" if self.kind == "parameter" else "buffer"} "{self.name}"'


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """The tensors of a model in the order of the flat vector, and the flat vector's dtype."""

    dtype: str
    tensors: tuple[TensorIdentity, ...]

    @staticmethod
    def of(layout: Layout) -> ModelIdentity:
        """Return the identity of a model with this layout."""
        return ModelIdentity(
            dtype=_plain(layout.dtype),
            tensors=tuple(
                TensorIdentity(
                    name=s.name, kind=s.kind, shape=tuple(s.shape), dtype=_plain(s.dtype)
                )
                for s in layout.segments
            ),
        )

    def differences(self, stored: ModelIdentity, where: str = "the checkpoint") -> Iterator[str]:
        """Yield a phrase for each difference of this model from the one ``stored`` in ``where``."""
        here, there = ({t.name: t for t in m.tensors} for m in (self, stored))
        for name, one in here.items():
            other = there.get(name)
            if other is None:
                yield f"{one} is not in {where}"
            elif one.shape != other.shape:
                yield f"{one} is {list(one.shape)} here and {list(other.shape)} in {where}"
            elif one.dtype != other.dtype:
                yield f"{one} is {one.dtype} here and {other.dtype} in {where}"
            elif one.kind != other.kind:
                yield f'{one} is of kind "{one.kind}" here and "{other.kind}" in {where}'
        for name, other in there.items():
            if name not in here:
                yield f"{other} of {where} is not in this model"
        if self.dtype != stored.dtype:
            yield f"the model trains in {self.dtype} here and in {stored.dtype} in {where}"
        if list(here) != list(there) and set(here) == set(there):
            i = next(i for i, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)
            one, other = self.tensors[i], stored.tensors[i]
            yield f"tensor {i} is {one} here and {other} in {where}: the order differs"


@dataclass(frozen=True, kw_only=True)
class FieldIdentity:
    """An input or label of a sample: name, NumPy dtype, shape without the rows."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.shape else self.dtype


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """The training data: its fields, and for each of the M partitions its rows and their checksum."""

    rows: tuple[int, ...]
    checksums: tuple[int, ...]
    fields: tuple[FieldIdentity, ...]

    @staticmethod
    def of(handles: Sequence[SampleHandle]) -> DataIdentity:
        """Return the identity of partitions; the fields are those of the first partition that has
        rows."""
        fields = next((h.fields for h in handles if h.num_rows), ())
        return DataIdentity(
            rows=tuple(int(h.num_rows) for h in handles),
            checksums=tuple(int(h.checksum) for h in handles),
            fields=tuple(
                FieldIdentity(name=f.name, dtype=f.dtype, shape=tuple(f.shape)) for f in fields
            ),
        )

    def differences(self, stored: DataIdentity) -> Iterator[str]:
        """Yield a phrase for each difference of this data from that ``stored`` in a checkpoint."""
        here, there = ({f.name: f for f in d.fields} for d in (self, stored))
        for name, one in here.items():
            if name not in there:
                yield f'the field "{name}" is not in the checkpoint'
            elif one != there[name]:
                yield f'the field "{name}" is {one} here and {there[name]} in the checkpoint'
        for name in there:
            if name not in here:
                yield f'the field "{name}" of the checkpoint is not in this data'
        if list(here) != list(there) and set(here) == set(there):
            yield f"the fields are {_listed(here)} here and {_listed(there)} in the checkpoint"
        total, before = sum(self.rows), sum(stored.rows)
        if total != before:
            yield f"the data has {total:,} rows here and {before:,} in the checkpoint"
        elif len(self.rows) != len(stored.rows):
            yield (
                f"the data is in {counted(len(self.rows), 'partition')} here and in "
                f"{len(stored.rows)} in the checkpoint"
            )
        else:
            if self.rows != stored.rows:
                yield (
                    "the number of rows is that of the checkpoint, but they are divided "
                    "differently (an RDD with as many partitions as replicas keeps its partitions: "
                    "divide it as before)"
                )
            for i, (rows, old) in enumerate(zip(self.rows, stored.rows, strict=True)):
                if rows != old:
                    yield f"partition {i} has {rows:,} rows here and {old:,} in the checkpoint"
                elif self.checksums[i] != stored.checksums[i]:
                    yield (
                        f"partition {i} holds other rows than in the checkpoint (the checksums "
                        "differ)"
                    )


def consistency_text(text: str) -> str:
    """Return the description of a consistency model without the options that are None.

    So a model that gets an option more, None by default, is still that of older checkpoints.
    """
    return re.sub(r", \w+=None\b|\b\w+=None(, |(?=\)))", "", text)


def first_few(phrases: Iterator[str]) -> list[str]:
    """Return at most :data:`FEW` phrases, and then a phrase with the number of the others."""
    few = list(itertools.islice(phrases, FEW))
    more = sum(1 for _ in phrases)
    return [*few, f"and {more:,} more"] if more else few


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of a checkpoint: its plain name, size in bytes and checksum."""

    name: str
    nbytes: int
    checksum: str

    @classmethod
    def write(cls, folder: Folder, name: str, data: bytes, **more: Any) -> Self:
        """Write a file into a checkpoint, and return its record."""
        folder.write(name, data)
        return cls(name=name, nbytes=len(data), checksum=checksum(data), **more)

    def read(self, folder: Folder) -> bytes:
        """Return the bytes of the file; DamagedCheckpoint if it is not as it was written."""
        try:
            data = folder.read(self.name, limit=self.nbytes)
        except CheckpointError as error:
            raise DamagedCheckpoint(str(error)) from error
        if len(data) != self.nbytes:
            raise DamagedCheckpoint(f"it has {len(data)} bytes instead of {self.nbytes}")
        if checksum(data) != self.checksum:
            raise DamagedCheckpoint("its bytes were changed (its checksum differs)")
        return data

    def problem_in(self, entries: dict[str, Entry]) -> str | None:
        """Return what is wrong with the file among the entries of its folder, or None."""
        entry = entries.get(self.name)
        if entry is None:
            return f'the file "{self.name}" is missing'
        if entry.kind != "file":
            return f'"{self.name}" is not a regular file'
        if entry.nbytes != self.nbytes:
            return f'the file "{self.name}" has {entry.nbytes} bytes instead of {self.nbytes}'
        return None


@dataclass(frozen=True, kw_only=True)
class SliceFile(StoredFile):
    """The file of slice ``index``: elements [start, stop) of the flat vector."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class ReplicaFile(StoredFile):
    """The file of the state that ``replica`` keeps between iterations."""

    replica: int


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best validation so far, and its weights (in ``files``, if they were kept)."""

    iteration: int
    epoch: int
    metric: str
    value: float
    files: tuple[SliceFile, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything in a checkpoint except the large files. Counters are those of
    :class:`sparkdl.TrainState`."""

    iteration: int
    epoch: int
    position: int
    """Iterations completed in the current epoch."""
    samples: int
    seconds: float
    replicas: int
    """M; it determines which rows are in which batch."""
    slices: int
    """N; another run may use another number."""
    batch_size: int
    seed: int
    local_steps: int = 1
    consistency: str = "Synchronous()"
    """The consistency model as text, see :func:`consistency_text`."""
    sampling: str = "None"
    layout: ModelIdentity
    data: DataIdentity
    optimizers: tuple[str, ...] = ()
    """Names of the optimizer classes."""
    frozen: str = ""
    """A digest of the parameters that are not trained, which are in no file; empty: there are none,
    or it is not known."""
    files: tuple[SliceFile, ...] = ()
    """One for each slice."""
    residuals: tuple[ReplicaFile, ...] = ()
    """The files of residuals if gradients are compressed: one for each replica that keeps any."""
    loss_scale: float = 1.0
    skipped: int = 0
    validations: tuple[Validated, ...] = ()
    best: Best | None = None
    config: Mapping[str, str] = field(default_factory=dict)
    """For people; values whose keys suggest a secret are hidden when the manifest is written."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other state of the loop (such as the age of the loss scale), as nested plain values."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """The recipe of the model and its columns, as in a saved model's ``model.json``, for
    :func:`sparkdl.load`; empty in checkpoints of older versions."""
    history: StoredFile | None = None
    """Set when the checkpoint is committed."""
    sparkdl: str = __version__
    """The version of sparkdl that wrote it."""

    @property
    def all_files(self) -> tuple[StoredFile, ...]:
        """Return every file that the checkpoint needs in addition to the manifest."""
        best = self.best.files if self.best else ()
        return (*self.files, *self.residuals, *best, *([self.history] if self.history else []))

    def to_json(self) -> bytes:
        """Return the manifest as JSON with its own checksum."""
        try:
            content = to_plain(self, Manifest)
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the manifest cannot be written: {error}.") from error
        content["config"] = redact(self.config)
        content = {"format": FORMAT, "version": VERSION, **content}
        content["checksum"] = json_checksum(content)
        data = (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()
        if len(data) > MAX_JSON_BYTES:
            raise CheckpointError(
                f"the manifest has {len(data):,} bytes, and {MAX_JSON_BYTES:,} at most can be "
                "read: validate less often."
            )
        return data

    @staticmethod
    def read(folder: Folder) -> Manifest:
        """Return the manifest of a complete checkpoint; raise DamagedCheckpoint for another one.

        Only the sizes of its files are checked.
        """
        entries = folder.entries()
        if MANIFEST not in entries:
            raise DamagedCheckpoint(INCOMPLETE)
        manifest = Manifest.from_json(folder.read(MANIFEST, limit=MAX_JSON_BYTES))
        for file in manifest.all_files:
            problem = file.problem_in(entries)
            if problem:
                raise DamagedCheckpoint(problem)
        return manifest

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """Read the JSON that :meth:`to_json` wrote; raise DamagedCheckpoint if it is wrong."""
        try:
            content = parse_json(data, finite=True)
        except ValueError as error:
            raise DamagedCheckpoint(f"its manifest is not JSON ({error})") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else None
            raise DamagedCheckpoint(f"its manifest is not a {FORMAT} (format {found!r})")
        if content.get("version") != VERSION:
            raise DamagedCheckpoint(
                f"it has version {content.get('version')!r} of the format, and this sparkdl reads "
                f"version {VERSION}"
            )
        try:
            if content.pop("checksum", None) != json_checksum(content):
                raise DamagedCheckpoint("its manifest was changed (its checksum differs)")
            manifest: Manifest = from_plain(content, Manifest)
            manifest = replace(manifest, consistency=consistency_text(manifest.consistency))
            manifest._check()
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DamagedCheckpoint(f"its manifest is wrong: {error}") from None
        return manifest

    def _check(self) -> None:
        """Raise ValueError for values that no run writes, and for a file name that leaves the
        folder."""
        least = dict.fromkeys(("iteration", "epoch", "position", "samples", "skipped", "seed"), 0)
        least |= dict.fromkeys(("replicas", "slices", "batch_size", "local_steps"), 1)
        for name, smallest in least.items():
            if not smallest <= getattr(self, name) < 2**63:
                raise ValueError(f"{name} is {getattr(self, name)}")
        for name in ("seconds", "loss_scale"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if not len(self.data.rows) == len(self.data.checksums) == self.replicas:
            raise ValueError("it lacks the rows and the checksum of some partition")
        for file in self.all_files:
            try:
                check_name(file.name)
            except CheckpointError as error:
                raise ValueError(str(error)) from None
            if file.nbytes < 0:
                raise ValueError(f"{file.name} has {file.nbytes} bytes")
            if isinstance(file, SliceFile) and not 0 <= file.start <= file.stop:
                raise ValueError(f"{file.name} holds elements {file.start} to {file.stop}")

    def differences(
        self, layout: ModelIdentity, data: DataIdentity, constants: Mapping[str, Any] | None = None
    ) -> list[str]:
        """Return a phrase for each difference that prevents a run from continuing here.

        These are the first few of each sort; ``constants`` have names of :data:`CONSTANTS`.
        """
        return [
            *first_few(layout.differences(self.layout)),
            *(
                f"{name} is {value!r} here and {stored!r} in the checkpoint"
                for name, value in (constants or {}).items()
                if value != (stored := getattr(self, name))
            ),
            *first_few(data.differences(self.data)),
        ]


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """The description of a run in its checkpoints."""

    model: ModelIdentity
    data: DataIdentity
    constants: Mapping[str, Any]  # those of CONSTANTS, which decide how rows become batches
    optimizers: tuple[str, ...]
    options: TrainingOptions
    frozen: str = ""  # digest of the parameters that are not trained
    metric: str | None = None  # None: the best weights are not kept
    compression: str = "None"
    config: Mapping[str, str] = field(default_factory=dict)  # for people who read a manifest
