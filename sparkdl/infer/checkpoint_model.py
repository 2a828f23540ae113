"""The model of a checkpoint: its description in the manifest, and how it is built from that."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from sparkdl.checkpoint.files import Folder
from sparkdl.checkpoint.identity import ModelIdentity, first_few
from sparkdl.checkpoint.manifest import Manifest, SliceFile
from sparkdl.checkpoint.slice_io import read_slice_files
from sparkdl.checkpoint.store import CheckpointStore
from sparkdl.codec.describe import is_secret, without_credentials
from sparkdl.codec.safe import from_plain
from sparkdl.errors import DamagedCheckpoint, ModelError, ParameterError
from sparkdl.infer.saved_content import built, columns_of, content_of, signature_of
from sparkdl.infer.saved_model import ModelManifest, Saved
from sparkdl.infer.saved_recipe import WithoutName, read_recipe, recipe_by_name
from sparkdl.infer.trained_model import TrainedModel
from sparkdl.loop.engine import AVERAGE, CURRENT, weights_of
from sparkdl.loop.history import History
from sparkdl.model.flat import filled, layout_of
from sparkdl.model.preparation import freeze
from sparkdl.model.recipe import frozen_digest
from sparkdl.slices.spec import slice_specs

MOST = 1 << 16
"""The most characters that a recipe may have in a manifest."""


def manifest_of_model(
    untrained: TrainedModel, freeze: Sequence[str] = (), unfreeze: Sequence[str] = ()
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


def load_checkpoint(
    path: str | os.PathLike[str],
    model: Callable[[], nn.Module] | nn.Module | None,
    loss: Callable[..., Any] | None,
    trust: bool,
) -> TrainedModel:
    """Return the model of the checkpoint at ``path``, or of the newest whole one in that folder.

    Its ``best`` and ``ema`` are loaded, too, if it has them. ``model`` takes the place of the
    recipe in the manifest; ``trust`` is that of :func:`sparkdl.load`.
    """
    store = CheckpointStore.open(path)
    for uri, manifest in store.candidates():
        try:
            history = History.from_bytes(store.read_history(uri, manifest))
            return _model_of(uri, manifest, history, model, loss, trust)
        except DamagedCheckpoint as error:
            store.skip(uri, str(error))
    raise store.none_usable()


def _model_of(
    uri: str,
    manifest: Manifest,
    history: History,
    model: Callable[[], nn.Module] | nn.Module | None,
    loss: Callable[..., Any] | None,
    trust: bool,
) -> TrainedModel:
    """Return the model of one checkpoint. Raises DamagedCheckpoint, ModelError and TrustError."""
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
    columns, signature = columns_of(saved, trust), signature_of(saved, trust)
    build = model if model is not None else read_recipe(saved, trust)

    def made() -> nn.Module:
        module = built(build, saved)
        freeze(module, frozen, unfrozen)
        return module

    module = made()
    _check(module, manifest, where)
    layout = layout_of(module)
    (plan,) = slice_specs(layout, 1)

    def trained(files: Sequence[SliceFile], which: str) -> TrainedModel | None:
        state = read_slice_files(uri, files, plan, layout.dtype)
        weights = weights_of(state, which)
        if which == AVERAGE and weights is state.weights:
            return None
        return TrainedModel(
            module=filled(module if which == CURRENT else made(), weights),
            model=build,
            loss=loss,
            features=described.features,
            label=described.label,
            columns=columns,
            fields=described.fields,
            num_features=described.num_features,
            float_dtype=described.float_dtype,
            output=described.output,
            history=history,
            seed=described.seed,
            judging=described.judging,
            signature=signature,
        )

    ema = trained(manifest.files, AVERAGE)
    best = manifest.best.files if manifest.best else ()
    best_of_all = trained(best, "best") if best else None
    found = trained(manifest.files, CURRENT)
    assert found is not None
    found.ema, found.best = ema, best_of_all
    return found


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
