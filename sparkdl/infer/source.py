"""A model to predict with, as users give it: a module, a function that builds one, a file, a folder."""

from __future__ import annotations

import functools
import io
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from sparkdl.codec.files import mappable, path_here
from sparkdl.errors import (
    ModelError,
    ParameterError,
    TrustError,
    first_line,
    in_short,
    kind_of,
    optional_library,
)
from sparkdl.infer.model import TrainedModel, load
from sparkdl.infer.score import ModelSource, source_of
from sparkdl.model.preparation import plain, start_from
from sparkdl.process.determinism import seeded

CLASSIFIER = "ForSequenceClassification"
"""The end of the names of the classes that classify texts."""
_DDP = "module."
"""The prefix of all names in the state_dict of a ``DataParallel`` or ``DistributedDataParallel``."""
_REMEDY = (
    "Give a torch.nn.Module, a function that builds one, an exported program, or the path of a "
    "TorchScript file, an exported program (.pt2) or a folder of save_pretrained."
)


def read_model(model: Any, weights: Any = None, head: str | None = None) -> ModelSource:
    """Return the model that a user gave.

    ``head`` is that of :func:`pretrained`.
    """
    if isinstance(model, (str, os.PathLike)):
        source = _of_path(path_here(model), head)
    elif isinstance(model, TrainedModel):
        source = source_of(model)
    elif (module := as_module(model)) is not None:
        source = ModelSource(module, module)
    elif isinstance(getattr(model, "model", None), nn.Module) and hasattr(model, "tokenizer"):
        parts = "its .model, and tokenizer= its .tokenizer"
        raise ParameterError(
            f"model is {kind_of(model)}, a pipeline of transformers: give {parts}."
        )
    elif callable(model):
        source = ModelSource(_built(model), model)
    else:
        raise ParameterError(f"model is {kind_of(model)}: {_REMEDY[0].lower()}{_REMEDY[1:]}")
    if weights is None:
        return source
    if not callable(model) or isinstance(model, (nn.Module, TrainedModel)):
        raise ParameterError(
            "weights= goes with a function that builds the module: "
            "predict(df, make_model, weights=...)."
        )
    start_from(source.module, _read_weights(weights, source.module), strict=True)
    return source


def _built(make: Callable[[], Any]) -> nn.Module:
    try:
        with seeded(0):
            made = make()
    except Exception as error:
        raise ModelError(
            f"the function of the model raises {type(error).__name__}: {error}. It is called without "
            "arguments; functools.partial(Net, ...) holds them."
        ) from error
    if isinstance(made, TrainedModel) or as_module(made) is None:
        raise ModelError(
            f"the function of the model returns {kind_of(made)}, not a torch.nn.Module."
        )
    module = as_module(made)
    assert module is not None
    return plain(module)


def _of_path(path: Path, head: str | None) -> ModelSource:
    """Return the model of a file or folder. It is read once, unless it changes."""
    if not path.exists():
        hint = ""
        if not path.is_absolute() and len(path.parts) == 2:
            hint = " A model of a hub must be there first: huggingface_hub.snapshot_download(...)."
        raise ModelError(f'there is no file or folder "{path}" on the driver.{hint}')
    return _read_path(path.resolve(), tuple(_stamps(path)), head)


def _stamps(path: Path) -> Iterator[tuple[str, int, int]]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        found = file.stat()
        yield file.name, found.st_mtime_ns, found.st_size


@functools.lru_cache(maxsize=2)
def _read_path(path: Path, stamps: Any, head: str | None) -> ModelSource:
    if path.is_dir():
        return _of_folder(path, head)
    names = zipfile.ZipFile(path).namelist() if zipfile.is_zipfile(path) else []
    inner = {name.partition("/")[2] for name in names}
    try:
        if "constants.pkl" in inner and any(name.startswith("code/") for name in inner):
            found = as_module(torch.jit.load(str(path), map_location="cpu"))
        elif "archive_format" in inner or "serialized_exported_program.json" in names:
            found = as_module(torch.export.load(path))
        else:
            found = None
    except Exception as error:
        raise ModelError(f'"{path}" cannot be read: {type(error).__name__}: {error}') from error
    if found is None:
        raise ModelError(
            f'"{path}" is neither a TorchScript file nor an exported program. If it holds weights, '
            "give the function that builds their module too: "
            f'predict(df, make_model, weights="{path.name}").'
        )
    return ModelSource(found, found)


def _of_folder(path: Path, head: str | None) -> ModelSource:
    if (path / "model.json").exists() and not (path / "config.json").exists():
        try:
            trained = load(path)
        except TrustError as error:
            there = "These are arguments of sparkdl.load, whose result is a model for scoring, too."
            raise TrustError(f"{error} {there}") from None
        return source_of(trained)
    if not (path / "config.json").exists():
        raise ModelError(
            f'the folder "{path}" has no config.json: give one that save_pretrained wrote, or '
            "trained.save."
        )
    module = pretrained(path, head)
    return ModelSource(module, module, folder=path)


def _read_weights(weights: Any, module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return a state_dict, without the prefix of data parallel modules if only the weights have it."""
    if isinstance(weights, (str, os.PathLike)):
        weights = _weights_of_file(path_here(weights))
    if not isinstance(weights, Mapping):
        raise ParameterError(
            f"weights is {kind_of(weights)}: give a state_dict, or the path of a safetensors file or "
            "of what torch.save(module.state_dict(), path) wrote."
        )
    nested = [name for name, value in weights.items() if isinstance(value, Mapping)]
    if nested:
        raise ParameterError(
            f"weights holds mappings ({', '.join(map(repr, nested[:5]))}), not tensors alone: give the "
            f"state_dict inside it, as weights=torch.load(path)[{nested[0]!r}]."
        )
    own = module.state_dict()
    if weights and all(name.startswith(_DDP) and name not in own for name in weights):
        return {name.removeprefix(_DDP): value for name, value in weights.items()}
    return weights


def _weights_of_file(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f'weights: there is no file "{path}" on the driver.')
    try:
        if path.suffix == ".safetensors":
            with mappable(path, links=True) as file:
                return safetensors.torch.load_file(file)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelError(
            f'weights: "{path}" cannot be read as a state_dict ({in_short(error)}). A '
            "pickled module is read with torch.load(path, weights_only=False), if you trust the file; "
            "pass the module."
        ) from error


def library() -> Any:
    """Return the package transformers."""
    return optional_library("transformers", "this", "transformers")


def pretrained(folder: Path, head: str | None) -> nn.Module:
    """Return the model of a folder; nothing is downloaded, and no code in the folder is run.

    ``head``: "none", "classes" (it classifies texts), or None for the class that the folder names.
    """
    transformers = library()
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise _unreadable(folder, error) from error
    named = next(iter(config.architectures or ()), "")
    if head == "classes" and not named.endswith(CLASSIFIER):
        raise ModelError(
            f'the folder "{folder}" has a {named or config.model_type}, which has no head that '
            f"classifies: give one of a model ...{CLASSIFIER}, as fine-tuning leaves it."
        )
    kind = transformers.AutoModel if head == "none" else getattr(transformers, named, None)
    if kind is None:
        raise ModelError(
            f'the folder "{folder}" names the class {named!r}, which this transformers '
            f"({transformers.__version__}) does not have: load the model, and pass it."
        )
    try:
        with seeded(0):  # a pooler that the folder lacks
            return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise _unreadable(folder, error) from error


def tokenizer_of(given: Any, folder: Path | None, where: str) -> Any:
    """Return ``given``, a tokenizer or the path of one; if None, the tokenizer in ``folder``."""
    if given is not None and not isinstance(given, (str, Path)):
        if not callable(given) and not hasattr(given, "encode_batch"):
            raise ParameterError(
                f"tokenizer is {kind_of(given)}: give a tokenizer of transformers or tokenizers, or "
                "the path of its folder."
            )
        return given
    place = Path(given) if given is not None else folder
    if place is None:
        raise ParameterError(
            f'column "{where}" is text: give the tokenizer of the model, tokenizer=... (a folder of '
            "save_pretrained may have both)."
        )
    if not place.is_dir():
        raise ParameterError(f'tokenizer: there is no folder "{place}" on the driver.')
    try:
        found = library().AutoTokenizer.from_pretrained(
            place, local_files_only=True, trust_remote_code=False
        )
        files = getattr(found, "vocab_files_names", {}).values()
        if files and not any((place / name).exists() for name in files):  # it knows no word
            raise FileNotFoundError(f"there is no {' or '.join(files)}")
        return found
    except Exception as error:
        raise ParameterError(
            f'the folder "{place}" has no tokenizer that can be read ({first_line(error)}): give '
            "tokenizer=..., or write it there with tokenizer.save_pretrained."
        ) from error


def longest(module: Any, tokenizer: Any) -> int | None:
    """Return the most tokens that model and tokenizer name as their limit, or None."""
    config = getattr(module, "config", None)
    limits = [
        getattr(config, "max_position_embeddings", None),
        getattr(tokenizer, "model_max_length", None),
    ]
    if limits[0] and getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert"):
        limits[0] -= 2  # its first positions stand for padding
    known = [int(limit) for limit in limits if limit and 0 < limit < 1 << 20]
    return min(known, default=None)


def _unreadable(folder: Path, error: Exception) -> ModelError:
    return ModelError(f'the folder "{folder}" has no model that can be read: {first_line(error)}.')


class ScriptedModule(nn.Module):
    """A TorchScript module; its pickle holds what ``torch.jit.save`` writes."""

    def __init__(self, scripted: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.scripted = scripted

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the TorchScript module."""
        return self.scripted(*inputs, **named)

    def __reduce__(self) -> Any:
        with io.BytesIO() as file:
            torch.jit.save(self.scripted, file)
            return _scripted, (file.getvalue(),)


def _scripted(data: bytes) -> ScriptedModule:
    with io.BytesIO(data) as file:
        return ScriptedModule(torch.jit.load(file, map_location="cpu"))


class ExportedModule(nn.Module):
    """An exported program; its pickle holds what ``torch.export.save`` writes.

    The module that torch makes of a program refuses ``eval()``, so it is no submodule of this one.
    ``fixed_rows`` is the number of rows that it was exported for; None: any.
    """

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        self._program = program
        self._made: list[nn.Module] = []
        self.register_buffer("_place", torch.zeros(0), persistent=False)  # tells the device
        self.fixed_rows = _fixed_rows(program)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the program."""
        if not self._made:
            self._made.append(self._program.module())
        return self._made[0](*inputs, **named)

    def to(self, device: Any) -> ExportedModule:  # type: ignore[override]
        """Move the program, with the constants in it, to a device."""
        if torch.device(device).type != "cpu":
            from torch.export.passes import move_to_device_pass

            self._program = move_to_device_pass(self._program, device)
            self._made.clear()
        super().to(device)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tensors of the program."""
        return dict(self._program.state_dict)

    def __reduce__(self) -> Any:
        with io.BytesIO() as file:
            torch.export.save(self._program, file)
            return _exported, (file.getvalue(),)


def _exported(data: bytes) -> ExportedModule:
    with io.BytesIO(data) as file:
        return ExportedModule(torch.export.load(file))


def _fixed_rows(program: torch.export.ExportedProgram) -> int | None:
    """Return the first dimension of the first input, if it is a number."""
    inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in inputs:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.ndim and isinstance(value.shape[0], int):
                return int(value.shape[0])
            return None
    return None


def as_module(model: Any) -> nn.Module | None:
    """Return a module that pickles, if ``model`` is a module or an exported program, else None."""
    if isinstance(model, torch.jit.ScriptModule):
        return ScriptedModule(model)
    if isinstance(model, torch.export.ExportedProgram):
        return ExportedModule(model)
    return model if isinstance(model, nn.Module) else None


def tensors_of(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return all parameters and buffers by name; packed weights of quantized layers are no tensors."""
    found = {**module.state_dict(), **dict(module.named_buffers())}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
