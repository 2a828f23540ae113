"""The model that a user names for scoring: a module, a function that builds it, a file or a folder."""

from __future__ import annotations

import functools
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from sparkdl.codec.files import mappable, path_here
from sparkdl.errors import ModelError, ParameterError, TrustError, kind_of
from sparkdl.infer.model import TrainedModel, load
from sparkdl.infer.scoring.programs import as_module
from sparkdl.model.preparation import plain, start_from
from sparkdl.process.determinism import seeded

_DDP = "module."
"""The prefix of all names in the state_dict of a ``DataParallel`` or ``DistributedDataParallel``."""
_REMEDY = (
    "Give a torch.nn.Module, a function that builds one, an exported program, or the path of a "
    "TorchScript file, an exported program (.pt2) or a folder of save_pretrained."
)


@dataclass(frozen=True)
class ModelSource:
    """A model as it was found."""

    module: nn.Module  # on the CPU
    build: Any  # the function that builds it if it does not pickle, or the module
    trained: TrainedModel | None = None
    folder: Path | None = None  # of ``save_pretrained``
    inner: nn.Module | None = None  # as it was found, if ``module`` was made of it

    @property
    def origin(self) -> nn.Module:
        """The module as it was found."""
        return self.module if self.inner is None else self.inner


def read_model(model: Any, weights: Any = None, head: str | None = None) -> ModelSource:
    """Return the model that a user gave.

    ``head`` is that of :func:`sparkdl.infer.scoring.pretrained.pretrained`.
    """
    if isinstance(model, (str, os.PathLike)):
        source = _of_path(path_here(model), head)
    elif isinstance(model, TrainedModel):
        source = ModelSource(model.module, model.model, trained=model)
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
        return ModelSource(trained.module, trained.model, trained=trained)
    if not (path / "config.json").exists():
        raise ModelError(
            f'the folder "{path}" has no config.json: give one that save_pretrained wrote, or '
            "trained.save."
        )
    from sparkdl.infer.scoring.pretrained import pretrained

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
        first = str(error).strip().partition("\n")[0]
        raise ModelError(
            f'weights: "{path}" cannot be read as a state_dict ({type(error).__name__}: {first}). A '
            "pickled module is read with torch.load(path, weights_only=False), if you trust the file; "
            "pass the module."
        ) from error
