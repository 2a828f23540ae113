"""Saving and loading of trained models: safetensors, JSON, and a recipe that builds the module.

The folder has ``model.safetensors`` (the plain state_dict), ``model.json`` (the recipe by name, the
seed, the columns, the output, and how a metric reads it) and ``history.json``. If the model has
buffers that are not in the state_dict, ``buffers.safetensors`` has them. If the recipe can be
imported by name, no pickle is written. Otherwise ``recipe.pkl`` holds it, which :func:`load` opens
only with ``trust=True``. ``model.json`` has a checksum of each of the other files. The checksums find
damage, not forgery. A model that is replaced can be read at every moment: [Note: replacing a model].
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors.torch import save_model
from torch import nn

from sparkdl.checkpoint.store import holds_checkpoints
from sparkdl.codec.files import mappable, with_checksum
from sparkdl.errors import ModelError, ParameterError, kind_of
from sparkdl.infer.remote_model import downloaded, holds_model, local_path, uploaded
from sparkdl.infer.saved_content import built, columns_of, content_of, signature_of
from sparkdl.infer.saved_model import (
    BUFFERS,
    HISTORY,
    MODEL,
    PICKLE,
    WEIGHTS,
    Saved,
    file_checksum,
    is_draft,
    is_staged,
    load_buffers,
    save_buffers,
    staged_name,
    take_dtypes,
)
from sparkdl.infer.saved_recipe import REMEDY, WithoutName, read_recipe, recipe_by_name
from sparkdl.infer.trained_model import TrainedModel
from sparkdl.loop.history import History
from sparkdl.model.preparation import dumps, passing_buffers, with_shared

logger = logging.getLogger("sparkdl")
MOST_REPLACED = 3
"""How often a model is read again because it was replaced meanwhile."""


def save(
    trained: TrainedModel,
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


def _save_here(trained: TrainedModel, folder: Path, overwrite: bool, shown: str) -> Path:
    """Write ``trained`` into a folder of this machine; messages call it ``shown``."""
    if (folder / "model.json").exists() and not overwrite:
        raise FileExistsError(f"{folder} already holds a model: pass overwrite=True to replace it.")
    why = None
    try:
        recipe = recipe_by_name(trained.model)
    except WithoutName as error:
        recipe, why = {"kind": "pickle"}, str(error)
    content = content_of(trained, recipe)
    json.dumps(content)  # fail before a file of an older model is replaced
    pickled = dumps(trained.model) if why is not None else b""
    buffers = passing_buffers(trained.module)
    folder.mkdir(parents=True, exist_ok=True)
    before = os.listdir(folder)
    files = {
        WEIGHTS: _place(folder / WEIGHTS, functools.partial(_save_weights, trained.module)),
        HISTORY: _place(folder / HISTORY, trained.history.save),
    }
    if buffers:
        files[BUFFERS] = _place(folder / BUFFERS, functools.partial(save_buffers, buffers))
    if why is not None:
        files[PICKLE] = _place(folder / PICKLE, lambda draft: draft.write_bytes(pickled))
        logger.warning(
            "%s/%s: the model is saved as a pickle, which sparkdl.load opens only with trust=True, or "
            "with model=make_model: %s. %s",
            shown,
            PICKLE,
            why,
            REMEDY,
        )
    text = json.dumps(with_checksum({**content, "files": files}), indent=1) + "\n"
    manifest = _place(folder / MODEL, lambda draft: draft.write_text(text, encoding="utf-8"))
    for name, checksum in {MODEL: manifest, **files}.items():
        os.replace(folder / staged_name(name, checksum), folder / name)
    for name in before:
        if is_staged(name) or is_draft(name) or name in {PICKLE, BUFFERS} - files.keys():
            (folder / name).unlink(missing_ok=True)
    return folder


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


def load(
    path: str | os.PathLike[str],
    model: Callable[[], nn.Module] | nn.Module | None = None,
    loss: Callable[..., Any] | None = None,
    trust: bool = False,
) -> TrainedModel:
    """Load a trained model that :meth:`sparkdl.TrainedModel.save` wrote, or the model of a checkpoint.

    Links in the folder are not followed.

    Args:
        path: The folder of the model; or a checkpoint, or a folder of checkpoints, of which the
            newest whole one is loaded. It may be a URI.
        model: A module, which is copied, or a function that builds it, instead of the saved recipe.
            The function is called with seeded random numbers, as in ``fit``.
        loss: The loss for ``evaluate``, which a saved model does not contain.
        trust: Allow the folder to run code of its own choice: its pickle, or any function that it
            names. Without it only ``torch.nn.Module`` classes and functions that are annotated
            ``-> torch.nn.Module`` are called.

    Returns:
        The trained model, with ``best`` and ``ema`` if the checkpoint has them.

    Raises:
        TrustError: The folder would run code, and ``trust`` is False.
        ModelError: A file is damaged, or the weights do not fit the model.
        CheckpointError: There is no checkpoint that can be read.
        FileNotFoundError: There is no model in the folder.
    """
    here = local_path(path)
    if here is None and holds_model(os.fspath(path)):
        with downloaded(os.fspath(path)) as folder:
            return _load_here(folder, model, loss, trust)
    if here is None or holds_checkpoints(here):
        from sparkdl.infer.checkpoint_model import load_checkpoint

        return load_checkpoint(path, model, loss, trust)
    return _load_here(here, model, loss, trust)


def _load_here(
    folder: Path,
    model: Callable[[], nn.Module] | nn.Module | None,
    loss: Callable[..., Any] | None,
    trust: bool,
) -> TrainedModel:
    """Load a saved model from a folder of this machine; see :func:`load`.

    If it is replaced meanwhile, the new one is loaded.
    """
    for _ in range(MOST_REPLACED):
        saved = Saved.read(folder)
        try:
            return _load_saved(saved, model, loss, trust)
        except ModelError:
            if Saved.read(folder).manifest.files == saved.manifest.files:
                raise
    return _load_saved(Saved.read(folder), model, loss, trust)


def _load_saved(
    saved: Saved,
    model: Callable[[], nn.Module] | nn.Module | None,
    loss: Callable[..., Any] | None,
    trust: bool,
) -> TrainedModel:
    folder = saved.folder
    columns, signature = columns_of(saved, trust), signature_of(saved, trust)
    history = _history(saved)
    build = model if model is not None else read_recipe(saved, trust)
    module = built(build, saved)
    try:
        with contextlib.ExitStack() as block:
            file = _file(saved, WEIGHTS, block)
            if model is None:
                take_dtypes(module, file)
            weights = safetensors.torch.load_file(file)
            _apart(module).load_state_dict(with_shared(weights, module))
        if BUFFERS in saved.manifest.files:
            with contextlib.ExitStack() as block:
                load_buffers(module, _file(saved, BUFFERS, block), folder)
    except ModelError:
        raise
    except (OSError, ValueError) as error:
        raise ModelError(f"the weights in {folder} do not fit the model: {error}") from error
    return TrainedModel(
        module=module.eval(),
        model=build,
        loss=loss,
        features=saved.manifest.features,
        label=saved.manifest.label,
        columns=columns,
        fields=saved.manifest.fields,
        num_features=saved.manifest.num_features,
        float_dtype=saved.manifest.float_dtype,
        output=saved.manifest.output,
        signature=signature,
        history=history,
        seed=saved.manifest.seed,
        judging=saved.manifest.judging,
    )


def _file(saved: Saved, name: str, block: contextlib.ExitStack) -> str:
    """Return the path of a file until the block ends. Raises ModelError if it is not the saved one."""
    try:
        file = block.enter_context(mappable(saved.place(name)))
    except (OSError, ValueError) as error:
        raise ModelError(f"{saved.folder}/{name} cannot be read: {error}.") from error
    saved.compare(file, name)
    return file


def _history(saved: Saved) -> History:
    try:
        return History.from_json_bytes(saved.checked(HISTORY))
    except ParameterError as error:
        raise ModelError(f"{saved.folder}/{HISTORY}: {error}") from error


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
