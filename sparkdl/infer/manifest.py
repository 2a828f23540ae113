"""The data of a trained model, the manifest ``model.json`` of a saved one, and checks of its files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from sparkdl.codec.files import MAX_JSON_BYTES, is_changed, mappable, parse_json, read_plain
from sparkdl.codec.safe import from_plain
from sparkdl.data.columns.base import Specs
from sparkdl.data.fields import Field
from sparkdl.errors import ModelError
from sparkdl.infer.outputs import Output
from sparkdl.loop.history import History
from sparkdl.metrics.classes import Judging
from sparkdl.model.recipe import BY_POSITION, Signature

FORMAT = "sparkdl-model"
VERSION = 1
MODEL, WEIGHTS, HISTORY = "model.json", "model.safetensors", "history.json"
PICKLE = "recipe.pkl"
BUFFERS = "buffers.safetensors"
"""The file of buffers that are not in the state_dict (``persistent=False``), if there are any."""
FILES = (WEIGHTS, HISTORY, BUFFERS, PICKLE, MODEL)
"""The files of a model in the order in which they are written."""
_STAGED = re.compile(
    r"(model|history|buffers|recipe)-[0-9a-f]{16}(-[0-9a-f]{8})?\.(safetensors|json|pkl)"
)
_DRAFT = re.compile(r"\.(model|history|buffers|recipe)\.[0-9a-f]{16}\.part\.[a-z]+")


def staged_name(name: str, checksum: str, mark: str = "") -> str:
    """Return the name that a file has until it replaces the one before.

    [Note: replacing a model] All files are first written under such names, which contain their
    digests. Then ``model.json`` is replaced, from when on the new model is the one in the folder, and
    then the other files. Who reads takes the file that has the digest, by either name. Where a file
    cannot be replaced at once, as at a URI, it may be found half written: then the staged one is read,
    which no second save writes to, because of its ``mark``.
    """
    stem, _, suffix = name.partition(".")
    return f"{stem}-{checksum[:16]}{mark}.{suffix}"


def is_staged(name: str) -> bool:
    """Return whether a name is one of :func:`staged_name`."""
    return _STAGED.fullmatch(name) is not None


def is_draft(name: str) -> bool:
    """Return whether a file was left by a save that was killed while writing it."""
    return _DRAFT.fullmatch(name) is not None


def holds_manifest(names: Iterable[str]) -> bool:
    """Return whether a model is among the files with these names."""
    return any(name == MODEL or (is_staged(name) and name.endswith(".json")) for name in names)


@dataclass(kw_only=True, eq=False, repr=False)
class ModelDescription:
    """The data of a model that its ``model.json`` holds as they are."""

    features: tuple[str, ...]
    label: tuple[str, ...]
    fields: tuple[Field, ...]  # of the training, features first, then labels
    num_features: int
    float_dtype: str
    output: Output | None = None  # for one sample; None: it is not a single tensor
    seed: int = 0  # with which ``model`` is called
    judging: Judging = field(default_factory=Judging)  # how an accuracy reads output and label


@dataclass(kw_only=True, eq=False, repr=False)
class ModelData(ModelDescription):
    """The data of a :class:`sparkdl.TrainedModel`, which can be saved except for the loss."""

    module: nn.Module
    model: Any  # the function that built the module, or the module that was passed
    loss: Callable[..., Any] | None
    history: History
    columns: Specs = field(default_factory=dict)
    signature: Signature = BY_POSITION

    def __post_init__(self) -> None:
        self.columns = dict(self.columns or {})
        if self.loss is not None:
            self.judging = Judging.of(self.loss)


@dataclass(kw_only=True, eq=False, repr=False)
class ModelManifest(ModelDescription):
    """The content of ``model.json`` except for the recipe and the columns."""

    inputs: tuple[str, ...] = ()  # if the module takes them by keyword
    files: Mapping[str, str]  # checksums

    def check(self) -> None:
        """Raise ValueError for values that were never saved."""
        forms: list[Any] = [*self.fields, *([self.output] if self.output else [])]
        for dtype in [self.float_dtype, *(form.dtype for form in forms)]:
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ValueError(f"there is no dtype {dtype!r}")
        if any(not 0 <= length < 2**63 for form in forms for length in form.shape):
            raise ValueError("a shape has an impossible length")
        if self.seed < 0:
            raise ValueError(f"the seed is {self.seed}")
        if not 0 <= self.num_features <= len(self.fields):
            raise ValueError(f"num_features is {self.num_features}")


@dataclass(frozen=True)
class Saved:
    """The folder of a saved model."""

    folder: Path
    content: dict[str, Any]  # all of its ``model.json``
    manifest: ModelManifest  # the checked part of that

    @staticmethod
    def read(folder: Path) -> Saved:
        """Read the ``model.json`` of a folder; FileNotFoundError if there is no model."""
        try:
            content = _content(folder, MODEL)
        except (ModelError, FileNotFoundError):
            for other in _staged(folder, "model-", ".json"):
                with contextlib.suppress(ModelError, FileNotFoundError):
                    content = _content(folder, other)
                    break
            else:
                raise
        try:
            manifest: ModelManifest = from_plain(content, ModelManifest)
            manifest.check()
        except (ValueError, TypeError, RecursionError) as error:
            raise ModelError(f"{folder}/{MODEL} is damaged: {error}.") from error
        return Saved(folder, content, manifest)

    def checked(self, name: str) -> bytes:
        """Return the bytes of a file. Raises ModelError if it is not the one that was saved."""
        data = b""

        def read(path: Path) -> str:
            nonlocal data
            data = read_plain(path)
            return hashlib.sha256(data).hexdigest()

        self._find(name, read)
        return data

    def mapped(self, name: str, block: contextlib.ExitStack) -> str:
        """Return a path of a safetensors file until the block ends, whatever replaces the file.

        Raises ModelError if it is not the one that was saved.
        """
        file = ""

        def open_it(path: Path) -> str:
            nonlocal file
            file = block.enter_context(mappable(path))
            return file_checksum(file)

        self._find(name, open_it)
        return file

    def _find(self, name: str, digest: Callable[[Path], str]) -> None:
        """Call ``digest`` on the places of a file until it returns the one that was saved."""
        checksum, problem = self.manifest.files.get(name, ""), ""
        start, _, suffix = staged_name(name, checksum).partition(".")
        for place in [*(_staged(self.folder, start, suffix) if checksum else ()), name]:
            try:
                if digest(self.folder / place) == checksum:
                    return
            except (OSError, ValueError) as error:
                problem = f"{self.folder / place} cannot be read: {_reason(error)}."
            else:
                problem = (
                    f"{self.folder / name} is not the file that was saved: its checksum differs."
                )
        raise ModelError(problem)


def file_checksum(path: str | os.PathLike[str], sync: bool = False) -> str:
    """Return the SHA-256 of a file in hexadecimal digits; with ``sync``, its content is on the disk."""
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _staged(folder: Path, start: str, suffix: str) -> list[str]:
    """Return the names of files that were to replace others, with this start and end."""
    with contextlib.suppress(OSError):
        names = sorted(filter(is_staged, os.listdir(folder)))
        return [name for name in names if name.startswith(start) and name.endswith(suffix)]
    return []


def _content(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of ``model.json``. Raises ModelError for another format or version."""
    try:
        data = read_plain(folder / name, MAX_JSON_BYTES)
        if name != MODEL and hashlib.sha256(data).hexdigest()[:16] not in name:
            raise ValueError("it is not whole")
        content = parse_json(data)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{folder} is not a saved model of sparkdl (there is no {MODEL} in it)."
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}/{MODEL} cannot be read: {_reason(error)}.") from error
    found = content if isinstance(content, dict) else {}
    if found.get("format") != FORMAT or found.get("version") != VERSION:
        raise ModelError(
            f"{folder}/{MODEL} is not a {FORMAT} of version {VERSION} "
            f"(format {found.get('format')!r}, version {found.get('version')!r})."
        )
    if is_changed(found):
        raise ModelError(f"{folder}/{MODEL} is not the file that was saved: its checksum differs.")
    return found


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def save_buffers(buffers: Mapping[str, torch.Tensor], draft: Path) -> None:
    """Write the buffers to a safetensors file, each with memory of its own."""
    apart = {
        name: buffer.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, buffer in buffers.items()
    }
    safetensors.torch.save_file(apart, str(draft))


def load_buffers(module: nn.Module, file: str, folder: Path) -> None:
    """Load buffers into ``module``."""
    for name, value in safetensors.torch.load_file(file).items():
        path, _, attribute = name.rpartition(".")
        try:
            owner = module.get_submodule(path)
            own = owner._buffers.get(attribute)
            if own is not None and (own.shape, own.dtype) == (value.shape, value.dtype):
                own.copy_(value)  # in place: several modules may share it
            elif attribute in owner._buffers:
                owner._buffers[attribute] = value
            else:  # a buffer that the first forward pass would create
                owner.register_buffer(attribute, value, persistent=False)
        except (AttributeError, KeyError, TypeError) as error:
            raise ModelError(
                f'the model has no place for the buffer "{name}" of {folder}: {error}'
            ) from None


def take_dtypes(module: nn.Module, file: str) -> None:
    """Convert the floating-point tensors of ``module`` to the dtypes that they have in ``file``.

    They follow torch's default dtype, which may have been another one where the model was trained.
    """
    with safetensors.safe_open(file, "pt") as saved:
        names = saved.keys()
        dtypes = {name: _DTYPES.get(saved.get_slice(name).get_dtype()) for name in names}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        dtype = dtypes.get(name)
        if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
            tensor.data = tensor.detach().to(dtype)
