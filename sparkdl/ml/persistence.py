"""Writers and readers of estimators and models: a folder of any Hadoop file system.

``metadata`` is that of pyspark.ml: the class, the uid, and the Params that JSON can hold. A model's
folder ``model`` is what :meth:`sparkdl.TrainedModel.save` writes: weights as safetensors, and the
recipe of the module by name. An estimator's model, loss and optimizer are stored by name, too.
Whatever has no name is pickled, and a pickle is opened only if the user trusts it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeAlias

import torch
from py4j.protocol import Py4JError
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter
from pyspark.sql import SparkSession
from torch import nn

from sparkdl.codec.safe import decode, encode
from sparkdl.compat import for_metadata
from sparkdl.errors import ModelError, ParameterError, SessionError, TrustError, UserError
from sparkdl.infer.model import load
from sparkdl.infer.recipe import WithoutName, by_name, named_object, recipe_by_name
from sparkdl.infer.remote import HadoopFolder
from sparkdl.infer.saved import save
from sparkdl.loop.triggers import Trigger
from sparkdl.model.preparation import dumps
from sparkdl.session import is_connected

logger = logging.getLogger("sparkdl")
OBJECTS = ("model", "loss", "optimizer", "trainerArgs")
"""The Params that may hold what JSON cannot."""
FOLDER = "model"
"""The folder of a model's weights and recipe, beside its metadata."""
_HARMLESS = (torch.optim.Optimizer, Trigger)


_Builder: TypeAlias = Callable[[], nn.Module] | nn.Module | None
_Allowed: TypeAlias = tuple[_Builder, bool]
_permission: ContextVar[_Allowed] = ContextVar("sparkdl-ml-loading", default=(None, False))
"""The ``model`` and the ``trust`` that the user gives inside :func:`loading`."""


@contextlib.contextmanager
def loading(model: _Builder = None, trust: bool = False) -> Iterator[None]:
    """Say how saved models are built while the block loads some, in a pipeline too.

    It is needed if the recipe of a module cannot be imported by name, as that of a function of a
    notebook::

        with sparkdl.ml.loading(model=make_model):
            pipeline = PipelineModel.load(path)

    Args:
        model: A module, or a function that builds it, instead of the saved recipe.
        trust: Allow the folder to run code of its own choice, as in :func:`sparkdl.load`.
    """
    token = _permission.set((model, trust))
    try:
        yield
    finally:
        _permission.reset(token)


class _Writer(MLWriter):
    """A writer of ``instance``."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def save(self, path: str) -> None:
        """Write the stage; with ``overwrite()``, it replaces another one once it is complete."""
        if not self.shouldOverwrite:
            super().save(path)
            return
        with _folder(self.sparkSession, path).replacing() as new:
            self._write(new, path)

    def saveImpl(self, path: str) -> None:
        """Write the stage."""
        self._write(path, path)

    def _write(self, path: str, shown: str) -> None:
        """Write the stage to ``path``; messages call it ``shown``."""
        raise NotImplementedError


class ModelWriter(_Writer):
    """Writes a :class:`sparkdl.ml.TorchModel`."""

    def _write(self, path: str, shown: str) -> None:
        """Write metadata, weights and recipe."""
        instance, target = self.instance, _folder(self.sparkSession, path)
        with tempfile.TemporaryDirectory(prefix="sparkdl-") as scratch:
            folder = Path(scratch) / FOLDER
            save(instance.trained, folder, shown=f"{shown}/{FOLDER}")
            told = {"labels": list(instance._labels)}
            DefaultParamsWriter.saveMetadata(instance, path, for_metadata(self.sparkSession), told)
            target.upload(folder, FOLDER)


class _Reader(MLReader[Any]):
    """A reader of stages of the class ``cls``."""

    def __init__(self, cls: type[Any]) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> Any:
        """Read the stage, as far as :func:`loading` trusts its folder."""
        place = _readable(self.sparkSession, path)
        metadata = _metadata(place, self.sparkSession, self.cls)
        stage = self._read(place, path, metadata, _permission.get())
        stage._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
        return stage

    def _read(self, place: str, path: str, metadata: dict[str, Any], allowed: _Allowed) -> Any:
        """Return the stage in the folder ``place`` without its Params; messages call it ``path``."""
        raise NotImplementedError


class ModelReader(_Reader):
    """Reads a :class:`sparkdl.ml.TorchModel`."""

    def _read(self, place: str, path: str, metadata: dict[str, Any], allowed: _Allowed) -> Any:
        with tempfile.TemporaryDirectory(prefix="sparkdl-") as scratch:
            folder = Path(scratch) / FOLDER
            _download(self.sparkSession, place, FOLDER, folder)
            with _told_of(str(folder), f"{path}/{FOLDER}"):
                trained = load(folder, allowed[0], trust=allowed[1])
        return self.cls(trained, metadata["labels"])


class EstimatorWriter(_Writer):
    """Writes a :class:`sparkdl.ml.TorchEstimator`."""

    def _write(self, path: str, shown: str) -> None:
        """Write the Params: JSON and names, and a pickle of whatever has neither form."""
        instance = self.instance
        plain = {param.name: value for param, value in instance._paramMap.items()}
        objects = {name: plain.pop(name) for name in OBJECTS if name in plain}
        why, pickled = None, b""
        try:
            named = _by_name(objects)
            json.dumps(named)
        except WithoutName as error:
            named, why, pickled = None, str(error), dumps(objects)
            _check_classic(self.sparkSession)
        told = instance.copy()
        for name in OBJECTS:  # the class knows their defaults
            told._defaultParamMap.pop(told.getParam(name), None)
        session = for_metadata(self.sparkSession)
        DefaultParamsWriter.saveMetadata(told, path, session, {"objects": named}, plain)
        if why is None:
            return
        with tempfile.TemporaryDirectory(prefix="sparkdl-") as scratch:
            file = Path(scratch) / "objects.pkl"
            file.write_bytes(pickled)
            _folder(self.sparkSession, path).upload(file, file.name)
        logger.warning(
            "%s/objects.pkl: the estimator is saved with a pickle, which is opened inside "
            "sparkdl.ml.loading(trust=True) only: %s.",
            shown,
            why,
        )


class EstimatorReader(_Reader):
    """Reads a :class:`sparkdl.ml.TorchEstimator`."""

    def _read(self, place: str, path: str, metadata: dict[str, Any], allowed: _Allowed) -> Any:
        named, pickled, (model, trust) = metadata["objects"], b"", allowed
        if named is None:
            if not trust:
                raise TrustError(
                    f"{path} holds an estimator with a pickle, which can run any code when opened. If "
                    "you trust it, load it inside sparkdl.ml.loading(trust=True)."
                )
            with tempfile.TemporaryDirectory(prefix="sparkdl-") as scratch:
                file = Path(scratch) / "objects.pkl"
                _download(self.sparkSession, place, file.name, file)
                pickled = file.read_bytes()
        with _told_of("", path):
            objects = _objects_of(named, pickled, trust, path)
        if model is not None and "model" in objects:
            objects["model"] = model
        return self.cls()._set(**objects)


def _metadata(path: str, session: SparkSession, cls: type) -> dict[str, Any]:
    """Return the metadata of a folder. Raises ParameterError if it is of another class."""
    metadata: dict[str, Any] = DefaultParamsReader.loadMetadata(path, for_metadata(session))
    found, wanted = metadata["class"], f"{cls.__module__}.{cls.__name__}"
    if found != wanted:
        name = str(found).rpartition(".")[2]
        raise ParameterError(f"{path} holds a {found}, not a {cls.__name__}: use {name}.load.")
    return metadata


@contextlib.contextmanager
def _told_of(folder: str, path: str) -> Iterator[None]:
    """Let errors name the folder that the user knows, and say how to give a recipe in a pipeline."""
    try:
        yield
    except (TrustError, ModelError) as error:
        text = str(error).replace(folder, path) if folder else str(error)
        hint = (
            " Give model= or trust= around the load: with sparkdl.ml.loading(model=make_model): ..."
            if "model=make_model" in text or "trust=True" in text
            else ""
        )
        kind: type[UserError] = type(error)
        raise kind(text + hint) from None


def _check_classic(session: SparkSession) -> None:
    if is_connected(session):
        raise SessionError(
            "stages of sparkdl.ml are saved and loaded by Hadoop's file systems in the JVM, which a "
            "Spark Connect session does not have: save model.trained instead (TrainedModel.save, and "
            "sparkdl.load), or save the stage in a classic session."
        )


def _folder(session: SparkSession, path: str) -> HadoopFolder:
    """Return the folder of an estimator or a model, in a file system that Hadoop knows."""
    _check_classic(session)
    configuration = session._jsparkSession.sessionState().newHadoopConf()
    return HadoopFolder.at(path, session._jvm, configuration)


def _readable(session: SparkSession, path: str) -> str:
    """Return the path at which a stage can be read: another one where its replacing was killed."""
    if is_connected(session):
        return path
    try:
        return _folder(session, path).readable()
    except Py4JError:  # no such file system, as reading it will say
        return path


def _download(session: SparkSession, path: str, name: str, target: Path) -> None:
    """Copy a file or folder in ``path`` to a local place."""
    folder = _folder(session, path)
    if name not in folder.names():
        raise ModelError(f"{path}/{name} is missing: the folder is no whole model of sparkdl.ml.")
    folder.download(name, target)


def _by_name(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return objects as JSON, or raise :class:`WithoutName` for one that has no such form."""
    try:
        return {name: encode(value, name, leaf=_leaf) for name, value in objects.items()}
    except (TypeError, RecursionError) as error:
        raise WithoutName(str(error)) from None


def _objects_of(
    named: dict[str, Any] | None, pickled: bytes, trust: bool, path: str
) -> dict[str, Any]:
    """Return the objects of a saved estimator; ``named`` is None if they are in the pickle.

    With ``trust``, functions of any kind may be imported.
    """
    try:
        if named is None:
            return dict(pickle.loads(pickled))
        read = functools.partial(_of_leaf, trust=trust, path=path)
        return {name: decode(value, {}, read) for name, value in named.items()}
    except (TrustError, ModelError):
        raise
    except Exception as error:  # importing a module may raise anything
        raise ModelError(
            f"{path}: the objects of the estimator cannot be loaded ({type(error).__name__}: {error}). "
            "Put their modules on the Python path, or pass model=make_model."
        ) from None


def _leaf(value: Any, where: str) -> dict[str, Any]:
    """Return an object as JSON. Raises TypeError if it has no name."""
    if isinstance(value, nn.Module):
        kind = type(value)
        if not list(value.parameters()) and _is_plainly(kind, value):
            return {**recipe_by_name(kind), "kind": "instance"}
        raise TypeError(f"{where} is a {kind.__name__} object with options or weights of its own")
    if isinstance(value, Trigger) and dataclasses.is_dataclass(value):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        given = {key: encode(part, f"{where}.{key}", leaf=_leaf) for key, part in fields.items()}
        return {**recipe_by_name(type(value)), "kind": "trigger", "kwargs": given}
    if not callable(value):
        raise TypeError(f"{where} is a {type(value).__name__} object")
    try:
        return recipe_by_name(value)
    except WithoutName as error:
        raise TypeError(f"{where}: {error}") from None


def _is_plainly(kind: type[nn.Module], value: nn.Module) -> bool:
    """Return whether a module is what its class makes without arguments, as ``CrossEntropyLoss()``."""
    try:
        plain = kind()
        return bool(vars(plain) == vars(value))
    except Exception:  # the class needs arguments, or its attributes cannot be compared
        return False


def _of_leaf(content: dict[str, Any], trust: bool, path: str) -> Any:
    """Return the object that :func:`_leaf` wrote."""
    if content["kind"] not in ("instance", "trigger"):
        return by_name(path, content, trust, _HARMLESS)
    found = named_object(path, content["name"], trust, _HARMLESS)
    if content["kind"] == "instance":
        return found()
    read = functools.partial(_of_leaf, trust=trust, path=path)
    return found(**{key: decode(value, {}, read) for key, value in content["kwargs"].items()})
