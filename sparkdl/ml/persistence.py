"""Writers and readers of estimators and models: a folder of any Hadoop file system.

``metadata`` is that of pyspark.ml: the class, the uid, and the Params that JSON can hold. A model's
folder ``model`` is what :meth:`sparkdl.TrainedModel.save` writes: weights as safetensors, and the
recipe of the module by name. An estimator's model, loss and optimizer are stored by name, too.
Whatever has no name is pickled, and a pickle is opened only if the user trusts it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter
from pyspark.sql import SparkSession
from torch import nn

from sparkdl.compat import for_metadata
from sparkdl.errors import ModelError, ParameterError, SessionError, TrustError, UserError
from sparkdl.infer.model import load
from sparkdl.infer.recipe import WithoutName
from sparkdl.infer.remote import HadoopFolder
from sparkdl.infer.saved import save
from sparkdl.ml.objects import OBJECTS, objects_by_name, objects_of, pickled_objects
from sparkdl.session import is_connected

logger = logging.getLogger("sparkdl")
FOLDER = "model"
"""The folder of a model's weights and recipe, beside its metadata."""


@dataclass(frozen=True)
class _Permission:
    """The permissions that the user gives inside :func:`loading`."""

    model: Callable[[], nn.Module] | nn.Module | None = None
    trust: bool = False


_permission: ContextVar[_Permission] = ContextVar("sparkdl-ml-loading")
_NOTHING = _Permission()


@contextlib.contextmanager
def loading(
    model: Callable[[], nn.Module] | nn.Module | None = None, trust: bool = False
) -> Iterator[None]:
    """Say how saved models are built while the block loads some, in a pipeline too.

    It is needed if the recipe of a module cannot be imported by name, as that of a function of a
    notebook::

        with sparkdl.ml.loading(model=make_model):
            pipeline = PipelineModel.load(path)

    Args:
        model: A module, or a function that builds it, instead of the saved recipe.
        trust: Allow the folder to run code of its own choice, as in :func:`sparkdl.load`.
    """
    token = _permission.set(_Permission(model, trust))
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


class ModelReader(MLReader[Any]):
    """Reads a :class:`sparkdl.ml.TorchModel`."""

    def __init__(self, cls: type[Any]) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> Any:
        """Read the model, as far as :func:`loading` trusts its folder."""
        place = _readable(self.sparkSession, path)
        metadata = _metadata(place, self.sparkSession, self.cls)
        allowed = _permission.get(_NOTHING)
        with tempfile.TemporaryDirectory(prefix="sparkdl-") as scratch:
            folder = Path(scratch) / FOLDER
            _download(self.sparkSession, place, FOLDER, folder)
            with _told_of(str(folder), f"{path}/{FOLDER}"):
                trained = load(folder, allowed.model, trust=allowed.trust)
        model = self.cls(trained, metadata["labels"])
        model._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(model, metadata)
        return model


class EstimatorWriter(_Writer):
    """Writes a :class:`sparkdl.ml.TorchEstimator`."""

    def _write(self, path: str, shown: str) -> None:
        """Write the Params: JSON and names, and a pickle of whatever has neither form."""
        instance = self.instance
        plain = {param.name: value for param, value in instance._paramMap.items()}
        objects = {name: plain.pop(name) for name in OBJECTS if name in plain}
        why, pickled = None, b""
        try:
            named = objects_by_name(objects)
            json.dumps(named)
        except WithoutName as error:
            named, why, pickled = None, str(error), pickled_objects(objects)
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


class EstimatorReader(MLReader[Any]):
    """Reads a :class:`sparkdl.ml.TorchEstimator`."""

    def __init__(self, cls: type[Any]) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> Any:
        """Read the estimator, as far as :func:`loading` trusts its folder."""
        place = _readable(self.sparkSession, path)
        metadata = _metadata(place, self.sparkSession, self.cls)
        allowed, named = _permission.get(_NOTHING), metadata["objects"]
        pickled = b""
        if named is None:
            if not allowed.trust:
                raise TrustError(
                    f"{path} holds an estimator with a pickle, which can run any code when opened. If "
                    "you trust it, load it inside sparkdl.ml.loading(trust=True)."
                )
            with tempfile.TemporaryDirectory(prefix="sparkdl-") as scratch:
                file = Path(scratch) / "objects.pkl"
                _download(self.sparkSession, place, file.name, file)
                pickled = file.read_bytes()
        with _told_of("", path):
            objects = objects_of(named, pickled, allowed.trust, path)
        if allowed.model is not None and "model" in objects:
            objects["model"] = allowed.model
        estimator = self.cls()
        estimator._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(estimator, metadata)
        estimator._set(**objects)
        return estimator


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
