"""Pickling of values that hold modules, including modules with parametrizations.

torch gives a module with parametrizations (``torch.nn.utils.parametrizations``) a class made at run
time, and forbids pickling it. The pickle here names the original class, and torch makes the run-time
class again on unpickling.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyspark import cloudpickle
from torch import nn
from torch.nn.utils import parametrize

from sparkdl.model.preparation import plain
from sparkdl.process.determinism import seeded
from sparkdl.process.output import reports_silenced

_CONNECT = "pyspark.sql.connect"


def dumps(value: Any) -> bytes:
    """Return ``value`` as bytes for ``pickle.loads``.

    Session-defined code goes by value, as in Spark.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            kind = parametrize.type_before_parametrizations(obj)
            state = kind.__getstate__(obj)  # type: ignore[call-arg]
            return _parametrized, (kind, tuple(obj.parametrizations)), state  # type: ignore[arg-type]
        kind = type(obj)
        if kind.__name__ == "SparkSession" and kind.__module__.startswith(_CONNECT):
            # it would pickle, and fail where it is unpickled
            raise pickle.PicklingError("it holds a session of Spark Connect, or data of one")
        return super().reducer_override(obj)


def _parametrized(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """Return a module of ``kind`` whose tensors ``names`` are parametrized.

    Its state is set afterwards.
    """
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.empty(0)))
        parametrize.register_parametrization(module, name, nn.Identity())
    return module


@dataclass(frozen=True)
class Rebuilt:
    """A stand-in for a module; its pickle loads as the module."""

    make: Callable[[], nn.Module]
    seed: int
    tensors: Mapping[str, torch.Tensor]

    @staticmethod
    def of(module: nn.Module, make: Callable[[], nn.Module], seed: int) -> Rebuilt:
        return Rebuilt(make, seed, {name: tensor.detach() for name, tensor in _tensors(module)})

    def __reduce__(self) -> Any:
        return _rebuild, (self.make, self.seed, dict(self.tensors))


def _rebuild(
    make: Callable[[], nn.Module], seed: int, tensors: Mapping[str, torch.Tensor]
) -> nn.Module:
    with seeded(seed), reports_silenced():
        module = plain(make())
    for name, tensor in _tensors(module):
        if name in tensors:
            tensor.data = tensors[name]
    return module


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and buffers, including non-persistent ones.

    A tied tensor appears under each of its names.
    """
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
