"""A digest of values and of the code behind them, which another process computes alike.

It tells whether two processes mean the same model. Code and objects of the user count in full:
functions with what they close over and the globals that they name, classes with their methods, modules
with all attributes. Of what libraries define, the name counts, and for modules also their tensors,
numbers and text, but no paths.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import io
import re
import sys
import types
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.usercode.travel import digest_of_code, functions_of, globals_of, is_library

NO_STATE = "sparkdl_no_state"
"""The attribute, of a module or its class, that names other attributes that no result depends on."""
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_HELD = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class _Empty: ...


_ANNOTATIONS = {"__annotations__", "__annotate_func__", "__annotations_cache__"}  # the latter: 3.14
_OF_ALL_CLASSES = frozenset(vars(_Empty)) | _ANNOTATIONS | {"_abc_impl"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_SHOWN = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_SIMPLE = (bool, int, float, str, torch.dtype)
_CLOSED = {"torch", "pyspark", "py4j", "pandas", "pyarrow"}
"""Libraries whose objects count by their type: they hold places in memory, or data."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MANGLED = re.compile(rb"___torch_mangle_\d+\.?")
_MOST = 1_000_000


def content_digest(values: Iterable[Any]) -> str:
    """Return a digest of ``values`` in hexadecimal digits."""
    return _Contents().digest(list(values)).hex()


class _Contents:
    """The digests of values that were seen, by their ids."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, bytes]] = {}

    def digest(self, value: Any) -> bytes:
        if type(value) in _PLAIN:
            return _hash([type(value).__name__, repr(value)])
        known = self._found.get(id(value))
        if known is not None:
            return known[1]
        self._found[id(value)] = value, b"inside itself"
        found = _hash(self._parts(value) if len(self._found) < _MOST else [_name(type(value))])
        self._found[id(value)] = value, found
        return found

    def _parts(self, value: Any) -> Iterable[str | bytes]:
        """Return what the digest of ``value`` is made of."""
        if isinstance(value, torch.Tensor):
            return _of_tensor(value)
        if isinstance(value, (np.ndarray, np.generic)):
            content = value.tolist() if value.dtype.hasobject else value.tobytes()
            return [value.dtype.str, str(value.shape), self.digest(content)]
        if isinstance(value, functools.partial):
            return map(self.digest, (value.func, value.args, value.keywords))
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, type):
            return self._of_class(value)
        if isinstance(value, nn.Module):
            return self._of_module(value)
        if isinstance(value, (list, tuple, deque)):
            return [type(value).__name__, *map(self.digest, value)]
        if isinstance(value, Set):
            return ["set", *sorted(map(self.digest, value))]
        if isinstance(value, Mapping):
            return ["mapping", *(self.digest(pair) for pair in value.items())]
        return self._of_object(value)

    def _of_function(self, value: types.FunctionType) -> list[str | bytes]:
        inside = getattr(value, "__wrapped__", None)
        if is_library(value.__module__):
            return [_name(value), self.digest(inside)]
        used = [*globals_of(value), value.__kwdefaults__, inside]
        return [value.__qualname__, digest_of_code(value.__code__), *map(self.digest, used)]

    def _of_class(self, value: type) -> list[str | bytes]:
        if is_library(value.__module__):
            return [_name(value)]
        own = sorted((n, v) for n, v in vars(value).items() if n not in _OF_ALL_CLASSES)
        return [value.__qualname__, *map(self.digest, value.__bases__), *self._named(own)]

    def _of_module(self, value: nn.Module) -> list[str | bytes]:
        if isinstance(value, torch.jit.ScriptModule):
            return [b"script", *_of_script(value), self.digest(dict(value.state_dict()))]
        ignored = getattr(value, NO_STATE, ())
        ignored = {*_OF_ALL_MODULES, *([ignored] if isinstance(ignored, str) else ignored)}
        own = [(n, v) for n, v in vars(value).items() if n not in ignored]
        shown = ""
        if is_library(type(value).__module__):
            program = [(n, v) for n, v in own if n == "_program"]
            own = program + [(n, v) for n, v in own if isinstance(v, _SIMPLE) and "path" not in n]
            shown = _plain(value.extra_repr())
        held = [pair for kind in _HELD for pair in vars(value)[kind].items()]
        hooks = [one for kind in _HOOKS for one in vars(value)[kind].values()]
        parts = self._named([*sorted(own, key=lambda pair: pair[0]), *held])
        return [self.digest(type(value)), shown, *parts, *map(self.digest, hooks)]

    def _of_object(self, value: Any) -> list[str | bytes]:
        kind = type(value)
        if isinstance(value, (staticmethod, classmethod)):
            return [kind.__name__, self.digest(value.__func__)]
        if isinstance(value, property):
            return ["property", *map(self.digest, (value.fget, value.fset))]
        if isinstance(value, types.MethodType):
            return ["method", *map(self.digest, (value.__func__, value.__self__))]
        if isinstance(value, types.ModuleType):
            own = {} if is_library(value.__name__) else functions_of(value)
            return [value.__name__, self.digest(own)]
        if isinstance(value, enum.Enum):
            return [self.digest(kind), value.name]
        if isinstance(value, torch.export.ExportedProgram):
            code = value.graph_module.code
            return [code, *map(self.digest, (dict(value.state_dict), dict(value.constants)))]
        top = kind.__module__.partition(".")[0]
        if isinstance(value, (*_PLAIN, *_SHOWN)) or top in sys.stdlib_module_names:
            return [_name(kind), _plain(repr(value))]
        if top in _CLOSED:
            return [_name(kind)]
        slots = {n for k in kind.__mro__ for n in getattr(k, "__slots__", ()) if hasattr(value, n)}
        own = {**{n: getattr(value, n) for n in slots}, **getattr(value, "__dict__", {})}
        return [self.digest(kind), *self._named(sorted(own.items()))]

    def _named(self, pairs: Iterable[tuple[str, Any]]) -> Iterator[str | bytes]:
        for name, value in pairs:
            yield name
            yield self.digest(value)


def _hash(parts: Iterable[str | bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(b"%d " % len(data))
        digest.update(data)
    return digest.digest()


def _of_tensor(tensor: torch.Tensor) -> list[str | bytes]:
    form = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"
    digest = digest_of_tensor(tensor)
    return [form, _plain(repr(tensor)) if digest is None else digest]


def digest_of_tensor(tensor: torch.Tensor) -> bytes | None:
    """Return the digest of a tensor's values; None if they are not plain memory, as of sparse ones."""
    try:
        whole = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return hashlib.blake2b(whole.data, digest_size=16).digest()


def _of_script(module: torch.jit.ScriptModule) -> Iterator[bytes]:
    """Yield code and attributes of a TorchScript module, without its tensors and places in files."""
    with io.BytesIO() as file:
        torch.jit.save(module, file)
        with zipfile.ZipFile(file) as archive:
            for name in sorted(archive.namelist()):
                inner = name.partition("/")[2]
                if inner.endswith(".py") or inner in ("data.pkl", "constants.pkl"):
                    yield _MANGLED.sub(b"", archive.read(name))


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _plain(text: str) -> str:
    """Return text without the addresses of objects."""
    return _ADDRESS.sub("", text)
