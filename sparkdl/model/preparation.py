"""Preparation of a module: initial weights, frozen parameters, and the way its forward pass runs.

Initial weights and frozen parameters belong to the module that every process builds. Activation
checkpointing and compilation belong to the process that trains it and leave no trace in the result.

Pickling of values that hold modules, including modules with parametrizations.

torch gives a module with parametrizations (``torch.nn.utils.parametrizations``) a class made at run
time, and forbids pickling it. The pickle here names the original class, and torch makes the run-time
class again on unpickling.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import io
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyspark import cloudpickle
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from sparkdl.errors import ModelError, kind_of, nearest
from sparkdl.model.buffers import TrainingOptions
from sparkdl.process.determinism import seeded
from sparkdl.process.system import reports_silenced


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a parameter or submodule.

    A pattern is the name itself, the name of a parent, or a shell pattern such as ``"encoder.*.bias"``.
    """
    return name == pattern or name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)


def freeze(module: nn.Module, frozen: Iterable[str], unfrozen: Iterable[str]) -> None:
    """Set ``requires_grad`` of the parameters that match; ``unfrozen`` takes precedence."""
    parameters = dict(module.named_parameters(remove_duplicate=False))  # a tied one under each name
    for option, patterns, trains in (("freeze", frozen, False), ("unfreeze", unfrozen, True)):
        for pattern in patterns:
            for name in matching(f"{option}: no parameter", pattern, parameters, matches):
                parameters[name].requires_grad_(trains)


def modes_of(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return each module in ``module``, outer ones first, and whether it is in training mode."""
    return [(child, child.training) for child in module.modules()]


def set_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """Put modules, outer ones first, into training or evaluation mode.

    Their ``train`` is called where it changes something: a class may have one of its own.
    """
    for child, mode in modes:
        if child.training != mode:
            child.train(mode)
    for child, mode in modes:
        if child.training != mode:  # it is in several modules, of which a later one has changed it
            child.training = mode


@contextlib.contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Restore the mode of each submodule after the block."""
    modes = modes_of(module)
    try:
        yield
    finally:
        set_modes(modes)


def start_training(module: nn.Module) -> list[str]:
    """Put a new module into training mode, and return the names of batch norms for which that is news.

    If the module arrives in training mode, submodules in evaluation mode stay so where nothing in them
    trains, and so do batch norms that are so by themselves. What libraries load arrives in evaluation
    mode as a whole, so parts that train are put into training mode.
    """
    whole, arrived = not module.training, dict(modes_of(module))
    kept = set() if whole else set(_staying(module))
    module.train()
    set_modes([(child, child.training and child not in kept) for child in module.modules()])
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, nn.modules.batchnorm._BatchNorm)
        and child.training > arrived[child]
        and not (whole and _trains(child))
    ]


def _staying(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the submodules that stay in evaluation mode."""
    for child in module.children():
        if child.training:
            yield from _staying(child)
        elif isinstance(child, nn.modules.batchnorm._BatchNorm) or not _trains(child):
            yield from (inner for inner in child.modules() if not inner.training)


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def with_shared(weights: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return ``weights`` with all names of tensors that have several in ``module``.

    A safetensors file has one of them.
    """
    own = module.state_dict(keep_vars=True)
    given = {id(own[name]): value for name, value in weights.items() if name in own}
    return {**{name: given[id(t)] for name, t in own.items() if id(t) in given}, **weights}


def start_from(module: nn.Module, weights: Mapping[str, torch.Tensor], strict: bool) -> None:
    """Load ``weights`` into ``module``.

    Unless ``strict``, names that only one of the two has are ignored, such as those of a new head.
    """
    own = module.state_dict()
    weights = {name if name in own else name.replace(WRAPPED, ""): w for name, w in weights.items()}
    weights = with_shared(weights, module)
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(
                f"weights[{name!r}] is {kind_of(value)}: give a state_dict, which maps the "
                "names of the model to tensors."
            )
    problems = [
        f'"{name}" is {list(value.shape)} in the weights and {list(own[name].shape)} in the model'
        for name, value in weights.items()
        if name in own and value.shape != own[name].shape
    ]
    if strict:
        unknown = [(name, nearest(name, own)) for name in weights if name not in own]
        problems += [f'the model has no "{name}"{hint and f".{hint}"}' for name, hint in unknown]
        problems += [f'the weights have no "{name}"' for name in own if name not in weights]
    if not problems and not set(own) & set(weights):
        problems = [f"no name of the weights ({_some(weights)}) is one of the model ({_some(own)})"]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        hint = "" if not strict else " To load what fits by name, pass strict_weights=False."
        raise ModelError(f"weights do not fit the model: {'; '.join(problems[:5])}{more}.{hint}")
    module.load_state_dict({k: v for k, v in weights.items() if k in own}, strict=False)


def passing_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are not in the state_dict (``persistent=False``), by name.

    The model's output depends on them as on other buffers: random features, masks, statistics.
    """
    return {
        f"{path}.{name}".removeprefix("."): buffer
        for path, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name in part._non_persistent_buffers_set
    }


def take_buffers(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Copy into ``module`` those of ``buffers`` that it has in the same shape."""
    for name, own in passing_buffers(module).items():
        if name in buffers and buffers[name].shape == own.shape:
            own.copy_(buffers[name])


WRAPPED = "_orig_mod."
"""The prefix that ``torch.compile`` adds to a module's parameter names."""
_compilers: weakref.WeakKeyDictionary[nn.Module, Callable[..., Any]] = weakref.WeakKeyDictionary()
"""The compiler that the user applied to each of these modules."""


def plain(module: nn.Module) -> nn.Module:
    """Return ``module`` with ``torch.compile`` undone, also inside it, so that its names are plain.

    :func:`prepared_forward` compiles the modules again.
    """
    if (wraps := _wrapped(module)) is not None:
        _compilers[wraps] = module.dynamo_ctx  # type: ignore[assignment]
        return plain(wraps)
    for owner in list(module.modules()):
        for name, child in owner._modules.items():
            if child is not None and _wrapped(child) is not None:
                owner._modules[name] = plain(child)
    return module


def _wrapped(module: nn.Module) -> nn.Module | None:
    compiler = sys.modules.get("torch._dynamo")  # if it is not imported, nothing is compiled
    # another thread may be importing it, without having come to this class
    kind = getattr(compiler, "OptimizedModule", None)
    if kind is None or not isinstance(module, kind):
        return None
    wraps = module._orig_mod
    return wraps if isinstance(wraps, nn.Module) else None


def prepared_forward(module: nn.Module, options: TrainingOptions) -> Callable[..., Any]:
    """Return the callable for a forward pass in training: the module, checkpointed or compiled.

    Activation checkpointing follows Chen et al., 2016, as ``torch.utils.checkpoint`` implements it.
    """
    for child in _outermost(module, options.activation_checkpointing):
        counts = any(True for _ in child.buffers())
        child.forward = _Checkpointed(child, counts)  # type: ignore[method-assign]
    if not options.compile:
        for child in module.children():
            for inner in child.modules():
                if (compiler := _compilers.get(inner)) is not None:
                    # as inner.compile() does
                    inner._compiled_call_impl = compiler(inner._call_impl)
        compiler = _compilers.get(module)
        return module if compiler is None else compiler(module)
    compile_options = dict(options.compile) if isinstance(options.compile, Mapping) else {}
    return torch.compile(module, **compile_options)  # type: ignore[call-overload]


def _outermost(module: nn.Module, patterns: Iterable[str]) -> list[nn.Module]:
    """Return the submodules that patterns match, without those inside another one.

    A pattern such as ``"layers.*"`` also matches what is inside a layer, which would be computed once
    more for each level. Lists of modules, which are never called, do not count.
    """
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or not name:
            continue
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and any(matches_module(pattern, name) for pattern in patterns):
            found[name] = child
    return list(found.values())


def matches_module(pattern: str, name: str) -> bool:
    """Return whether a pattern names this very submodule (not its children, which it contains)."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def matching(
    no_match: str,
    pattern: str,
    names: Iterable[str],
    match: Callable[[str, str], bool] = matches_module,
) -> list[str]:
    """Return the names that a pattern matches; a ModelError begins with ``no_match``."""
    known = list(names)
    found = [name for name in known if match(pattern, name)]
    if not found:
        raise ModelError(
            f'{no_match} matches "{pattern}".{nearest(pattern, known)} The model has {_some(known)}.'
        )
    return found


def check_modules(module: nn.Module, patterns: Iterable[str]) -> None:
    """Raise :class:`sparkdl.ModelError` for an activation checkpointing pattern without a match."""
    names = [name for name, _ in module.named_modules() if name]
    for pattern in patterns:
        matching("activation_checkpointing: no submodule", pattern, names)


class _Checkpointed:
    """A replacement of a module's forward with activation checkpointing.

    It holds its module only weakly, because the module holds it: frozen objects are skipped by the
    garbage collector, so a cycle of the two might never be freed. ``counts`` says that the
    recomputation for backward must leave buffers alone.
    """

    def __init__(self, module: nn.Module, counts: bool) -> None:
        self._module, self._counts = weakref.ref(module), counts
        self._forward = vars(module).get("forward")  # its own, if it has one besides its class's

    def __deepcopy__(self, memo: dict[int, Any]) -> _Checkpointed:
        """Return a replacement for the copy of the module."""
        module = self._module()
        assert module is not None
        return _Checkpointed(memo.get(id(module), module), self._counts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        forward = self._forward or functools.partial(type(module).forward, module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self._counts and not torch.compiler.is_compiling():  # compiled, it has no such pass
            kwargs["context_fn"] = lambda: (contextlib.nullcontext(), _BuffersAsBefore(module))
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


_Held = list[tuple[nn.Module, dict[str, torch.Tensor | None]]]
"""Modules, and for each its own buffers by name."""


class _BuffersAsBefore:
    """A block in which a module has copies of the buffers that it had when this object was made.

    So the recomputation of a forward pass reads what the pass has read, and changes nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before = _copied([(part, part._buffers) for part in module.modules()])

    def __enter__(self) -> None:
        self._after: _Held = [(part, part._buffers) for part, _ in self._before]
        for part, buffers in _copied(self._before):  # a second backward needs them once more
            part._buffers = buffers

    def __exit__(self, *_: object) -> None:
        for part, buffers in self._after:
            part._buffers = buffers


def _copied(held: _Held) -> _Held:
    """Return the modules with a copy of each buffer, one for a buffer that several share."""
    copies = {id(b): b.clone() for _, own in held for b in own.values() if b is not None}
    return [(part, {name: copies.get(id(b)) for name, b in own.items()}) for part, own in held]


def _some(names: Iterable[str]) -> str:
    known = list(names)
    return ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")


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
