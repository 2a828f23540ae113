"""Saving and reading of trained models: folders of safetensors and JSON, and models of checkpoints.

The folder has ``model.safetensors`` (the plain state_dict), ``model.json`` (the recipe by name, the
seed, the columns, the output, and how a metric reads it) and ``history.json``. If the model has
buffers that are not in the state_dict, ``buffers.safetensors`` has them. If the recipe can be
imported by name, no pickle is written. Otherwise ``recipe.pkl`` holds it, which :func:`sparkdl.load`
opens only with ``trust=True``. ``model.json`` has a checksum of each of the other files. The checksums
find damage, not forgery. A model that is replaced can be read at every moment: [Note: replacing a
model].
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import safetensors.torch
import torch
from safetensors.torch import save_model
from torch import nn

from sparkdl.checkpoint.files import Folder
from sparkdl.checkpoint.manifest import Manifest, ModelIdentity, first_few
from sparkdl.checkpoint.store import CheckpointStore, holds_checkpoints, read_slice_files
from sparkdl.codec.describe import is_secret, without_credentials
from sparkdl.codec.files import with_checksum
from sparkdl.codec.safe import from_plain
from sparkdl.errors import DamagedCheckpoint, ModelError, ParameterError, kind_of
from sparkdl.infer.manifest import (
    BUFFERS,
    HISTORY,
    MODEL,
    PICKLE,
    WEIGHTS,
    ModelData,
    ModelDescription,
    ModelManifest,
    Saved,
    file_checksum,
    is_draft,
    is_staged,
    load_buffers,
    save_buffers,
    staged_name,
    take_dtypes,
)
from sparkdl.infer.new_forward import sparse_inputs
from sparkdl.infer.program import Program, operations
from sparkdl.infer.recipe import (
    REMEDY,
    WithoutName,
    built,
    columns_of,
    content_of,
    read_recipe,
    recipe_by_name,
    signature_of,
)
from sparkdl.infer.remote import downloaded, holds_model, local_path, uploaded
from sparkdl.loop.engine import AVERAGE, CURRENT, weights_of
from sparkdl.loop.history import History
from sparkdl.model.flat import filled, layout_of
from sparkdl.model.preparation import dumps, freeze, passing_buffers, with_shared
from sparkdl.model.recipe import frozen_digest
from sparkdl.slices.spec import slice_specs

logger = logging.getLogger("sparkdl")
MOST_REPLACED = 3
"""How often a model is read again because it was replaced meanwhile."""
MOST = 1 << 16
"""The most characters that a recipe may have in a manifest."""
Builder: TypeAlias = Callable[[], nn.Module] | nn.Module | None
"""A substitute for a saved recipe: a function that builds the module, or a module."""


def save(
    trained: ModelData,
    path: str | os.PathLike[str],
    overwrite: bool = False,
    shown: str | None = None,
) -> Path | str:
    """Write ``trained`` into a folder, and return it; messages name it ``shown``."""
    here = local_path(path)
    if here is None:
        uri = os.fspath(path)
        with uploaded(uri, overwrite) as folder:
            _save_here(trained, folder, overwrite, shown or uri)
        return uri
    return _save_here(trained, here, overwrite, shown or str(here))


def _save_here(trained: ModelData, folder: Path, overwrite: bool, shown: str) -> Path:
    """Write ``trained`` into a folder of this machine; messages call it ``shown``."""
    why, alone = None, ""
    recipe: dict[str, Any]
    try:
        recipe = recipe_by_name(trained.model)
    except WithoutName as error:
        recipe, why = {"kind": "pickle"}, str(error)
        try:
            recipe["program"] = recipe_by_name(functools.partial(Program, operations(trained)))
        except ModelError as unable:
            alone = str(unable)
    content = content_of(trained, recipe)
    json.dumps(content)  # fail before a file of an older model is replaced
    pickled = dumps(trained.model) if why is not None else b""
    buffers = passing_buffers(trained.module)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if (folder / MODEL).exists() and not overwrite:
            raise FileExistsError(
                f"{folder} already holds a model: pass overwrite=True to replace it."
            )
        before = os.listdir(folder)
        files = {
            WEIGHTS: _place(folder / WEIGHTS, functools.partial(_save_weights, trained.module)),
            HISTORY: _place(folder / HISTORY, trained.history.save),
        }
        if buffers:
            files[BUFFERS] = _place(folder / BUFFERS, functools.partial(save_buffers, buffers))
        if why is not None:
            files[PICKLE] = _place(folder / PICKLE, lambda draft: draft.write_bytes(pickled))
            if alone:
                logger.warning(
                    "%s/%s: the model is saved as a pickle, which sparkdl.load opens only with "
                    "trust=True, or with model=make_model: %s. %s A program for predictions without "
                    "its code cannot be stored beside it: %s",
                    *(shown, PICKLE, why, REMEDY, alone),
                )
        text = json.dumps(with_checksum({**content, "files": files}), indent=1) + "\n"
        manifest = _place(folder / MODEL, lambda draft: draft.write_text(text, encoding="utf-8"))
        for name, checksum in {MODEL: manifest, **files}.items():
            os.replace(folder / staged_name(name, checksum), folder / name)
        for name in before:
            if is_staged(name) or is_draft(name) or name in {PICKLE, BUFFERS} - files.keys():
                (folder / name).unlink(missing_ok=True)
    return folder


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process saves a model into the folder, if its file system has locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a forked process may have the handle, too
        os.close(handle)


def not_tensors(module: nn.Module) -> Iterator[str]:
    """Yield why the state_dict cannot be written, for each value in it that is no tensor."""
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            yield (
                f'state_dict() has "{name}", {kind_of(value)}, but a safetensors file can hold '
                "only tensors: let get_extra_state() return a tensor, or register a buffer."
            )


def _save_weights(module: nn.Module, draft: Path) -> None:
    """Write the state_dict as a safetensors file. Raises :class:`ModelError` for a non-tensor in it."""
    for problem in not_tensors(module):
        raise ModelError(problem)
    save_model(_apart(copy.deepcopy(module)) if _views(module) else module, str(draft))


def _apart(module: nn.Module) -> nn.Module:
    """Give each tensor that is a part of another one memory of its own; return ``module``."""
    for tensor in _views(module):
        tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)
    return module


def _views(module: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that are a part of another one, or one element repeated.

    Safetensors refuses them.
    """
    tensors = (*module.parameters(), *module.buffers())
    return [t for t in tensors if t.untyped_storage().nbytes() != t.nbytes]


def read(path: str | os.PathLike[str], model: Builder, trust: bool) -> dict[str, ModelData]:
    """Return the model in a folder, and "ema" and "best" of a checkpoint; see :func:`sparkdl.load`."""
    here = local_path(path)
    if here is None and holds_model(os.fspath(path)):
        with downloaded(os.fspath(path)) as folder:
            return {"": _read_here(folder, model, trust)}
    if here is None or holds_checkpoints(here):
        return _read_checkpoint(path, model, trust)
    return {"": _read_here(here, model, trust)}


def _read_here(folder: Path, model: Builder, trust: bool) -> ModelData:
    """Read a folder of this machine; if its model is replaced meanwhile, the new one is read."""
    for _ in range(MOST_REPLACED):
        saved = Saved.read(folder)
        try:
            return _read_saved(saved, model, trust)
        except ModelError:
            if Saved.read(folder).manifest.files == saved.manifest.files:
                raise
    return _read_saved(Saved.read(folder), model, trust)


def _read_saved(saved: Saved, model: Builder, trust: bool) -> ModelData:
    data = _described(saved, model, trust)
    try:
        data.history = History.from_json_bytes(saved.checked(HISTORY))
    except ParameterError as error:
        raise ModelError(f"{saved.folder}/{HISTORY}: {error}") from error
    module = built(data.model, saved)
    try:
        with contextlib.ExitStack() as block:
            file = saved.mapped(WEIGHTS, block)
            if model is None:
                take_dtypes(module, file)
            weights = safetensors.torch.load_file(file)
            _apart(module).load_state_dict(with_shared(weights, module))
        if BUFFERS in saved.manifest.files:
            with contextlib.ExitStack() as block:
                load_buffers(module, saved.mapped(BUFFERS, block), saved.folder)
    except ModelError:
        raise
    except (OSError, ValueError) as error:
        raise ModelError(f"the weights in {saved.folder} do not fit the model: {error}") from error
    data.module = module.eval()
    return data


def _described(saved: Saved, model: Builder, trust: bool) -> ModelData:
    """Return the model without its weights and history."""
    columns = columns_of(saved, trust)
    sparse = sparse_inputs(saved.manifest.features, columns)
    signature = replace(signature_of(saved, trust), sparse=sparse)
    description = {one.name: getattr(saved.manifest, one.name) for one in fields(ModelDescription)}
    return ModelData(
        module=nn.Identity(),
        model=model if model is not None else read_recipe(saved, trust),
        loss=None,
        columns=columns,
        history=History(),
        signature=signature,
        **description,
    )


def _place(path: Path, write: Callable[[Path], Any]) -> str:
    """Let ``write`` make a file beside ``path``, under its staged name, and return its checksum.

    A file or link that has the name already is replaced, and never written through.
    """
    draft = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.part{path.suffix}")
    try:
        write(draft)
        checksum = file_checksum(draft, sync=True)
        os.replace(draft, path.with_name(staged_name(path.name, checksum)))
    finally:
        draft.unlink(missing_ok=True)
    return checksum


def manifest_of_model(
    untrained: ModelData, freeze: Sequence[str] = (), unfreeze: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the description of the model, for :attr:`Manifest.model`.

    It holds no pickle: a recipe that cannot be told by name must be passed to ``load``. It holds no
    secrets: a recipe whose arguments look like one is left out.
    ``untrained`` is the model that the run will return, except for its weights.
    """
    try:
        recipe = recipe_by_name(untrained.model)
        if _secret("", [recipe["args"], recipe["kwargs"]]):
            raise WithoutName("its arguments look like secrets, which a checkpoint never contains")
        if len(json.dumps(recipe)) > MOST:
            raise WithoutName("its arguments are large")
    except WithoutName as error:
        recipe = {"kind": "none", "why": str(error)}
    try:
        content = json.loads(json.dumps(content_of(untrained, recipe)))
    except ParameterError as error:  # a function of a column, or of the output, has no name
        return {"unknown": str(error)}
    return {**content, "freeze": list(freeze), "unfreeze": list(unfreeze)}


def _secret(key: str, value: Any) -> bool:
    """Return whether anything in ``value``, which is JSON, looks like a secret."""
    if isinstance(value, dict):
        return any(_secret(str(name), item) for name, item in value.items())
    if isinstance(value, list):
        pair = len(value) == 2 and isinstance(value[0], str)  # an item of an encoded dict
        return any(_secret(value[0] if pair else key, item) for item in value)
    return is_secret(key, value) or (isinstance(value, str) and without_credentials(value) != value)


def _read_checkpoint(
    path: str | os.PathLike[str], model: Builder, trust: bool
) -> dict[str, ModelData]:
    """Return the models of the checkpoint at ``path``, or of the newest whole one in that folder."""
    store = CheckpointStore.open(path)
    for uri, manifest in store.candidates():
        try:
            history = History.from_bytes(store.read_history(uri, manifest))
            return _models_of(uri, manifest, history, model, trust)
        except DamagedCheckpoint as error:
            store.skip(uri, str(error))
    raise store.none_usable()


def _models_of(
    uri: str, manifest: Manifest, history: History, model: Builder, trust: bool
) -> dict[str, ModelData]:
    """Return the models of one checkpoint. Raises DamagedCheckpoint, ModelError and TrustError."""
    where = Folder(uri)
    if "features" not in manifest.model:
        why = manifest.model.get("unknown", "an older sparkdl wrote it")
        raise ModelError(
            f"the checkpoint {where} does not contain its columns: {why} Continue it with "
            "fit(resume=...), which returns a model."
        )
    try:
        described: ModelManifest = from_plain({**manifest.model, "files": {}}, ModelManifest)
        described.check()
        frozen, unfrozen = (
            from_plain(manifest.model.get(name, []), tuple[str, ...], name)
            for name in ("freeze", "unfreeze")
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"it does not describe a model: {error}") from error
    saved = Saved(Path(str(where)), dict(manifest.model), described)
    data = replace(_described(saved, model, trust), history=history)

    def made() -> nn.Module:
        module = built(data.model, saved)
        freeze(module, frozen, unfrozen)
        return module

    module = made()
    _check(module, manifest, where)
    layout = layout_of(module)
    (plan,) = slice_specs(layout, 1)
    best = manifest.best.files if manifest.best else ()
    models = {}
    for which, files in {"ema": manifest.files, "best": best, "": manifest.files}.items():
        if not files:
            continue
        state = read_slice_files(uri, files, plan, layout.dtype)
        weights = weights_of(state, {"ema": AVERAGE, "": CURRENT}.get(which, which))
        if which == "ema" and weights is state.weights:
            continue
        models[which] = replace(data, module=filled(made() if which else module, weights))
    return models


def _check(module: nn.Module, manifest: Manifest, where: Folder) -> None:
    """Raise :class:`ModelError` if the module is not the one that the run trained."""
    here = ModelIdentity.of(layout_of(module))
    differences = first_few(here.differences(manifest.layout))
    if not differences and manifest.frozen not in ("", frozen_digest(module)):
        differences = [
            "the parameters that are frozen hold other values, and a checkpoint contains only "
            "trained parameters"
        ]
    if differences:
        raise ModelError(
            f"the model is not that of the checkpoint {where}: {'; '.join(differences)}. Pass "
            "model=make_model, a function that builds the trained model, or a module with its "
            "frozen values."
        )


@dataclass(frozen=True)
class StoredState:
    """The packed state of every slice, and the model and optimizers that it belongs to."""

    slices: tuple[bytes, ...]
    model: ModelIdentity
    optimizers: tuple[str, ...]
    weights: str  # digest of those of the trained module

    def check(self, model: ModelIdentity, optimizers: tuple[str, ...]) -> None:
        """Raise :class:`sparkdl.ParameterError` if the state is not of this model and optimizers."""
        problems = first_few(model.differences(self.model, "start"))
        if self.optimizers != optimizers:
            problems.append(
                f"the optimizer is {', '.join(optimizers)} here and {', '.join(self.optimizers)} "
                "in start"
            )
        if problems:
            raise ParameterError(
                f"the optimizer state of the model in start= does not fit: {'; '.join(problems)}. "
                "Pass optimizer_state=False to continue with the weights alone."
            )
