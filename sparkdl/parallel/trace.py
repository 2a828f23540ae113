"""Models with a forward of their own as chains of the modules that it calls. Plain torch.

[Note: a forward that is followed] torch.fx records what forward does with proxies for its inputs,
down to the modules that it calls. These stay whole, so their own forward may do anything. The
recording is cut before these calls. Each piece takes all values that it or a later one needs, such
as a residual or a mask, and returns those that later ones need.

A proxy knows its value for a few rows, so forward may look at sizes. The recording must be the same for
twice as many rows, and in evaluation as in training. Otherwise forward does something that cannot be
recorded, and an error is raised.

Pieces of a recorded forward, as modules. See :mod:`sparkdl.parallel.trace`.

Models as chains of modules, each of which takes the output of the one before. Plain torch.
"""

from __future__ import annotations

import contextlib
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from sparkdl.errors import ModelError, nearest
from sparkdl.model.preparation import modes_kept, modes_of, set_modes
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import buffers_kept


class TracedStage(nn.Module):
    """Some steps of a recorded forward.

    Its argument and its result are one value, or a tuple of several.
    """

    def __init__(
        self,
        nodes: list[fx.Node],
        takes: list[fx.Node],
        gives: list[fx.Node],
        constants: dict[fx.Node, Any],
        on_device: list[fx.Node],  # constants that are the device of the inputs, which may change
        whole: nn.Module,
    ) -> None:
        super().__init__()
        self._nodes, self._takes, self._gives = nodes, takes, gives
        self._constants, self._on_device = constants, on_device
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._called: dict[str, nn.Module] = {}
        for node in nodes:
            target = str(node.target)
            if node.op == "call_module":
                self._called[target] = whole.get_submodule(target)
            elif node.op == "get_attr":
                path, _, name = target.rpartition(".")
                self._owners[target] = whole.get_submodule(path), name
        self.modules_called = nn.ModuleList(self._called.values())
        self._names = {target: f"tensor{n}" for n, target in enumerate(self._owners)}
        for target, (owner, name) in self._owners.items():
            tensor = getattr(owner, name)
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(self._names[target], tensor)
            elif isinstance(tensor, torch.Tensor):
                self.register_buffer(self._names[target], tensor, persistent=False)

    def forward(self, value: Any) -> Any:
        """Return the values that later stages need, or the output of the model."""
        known = dict(self._constants)
        tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
        if (first := next(tensors, None)) is not None:
            known.update(dict.fromkeys(self._on_device, first.device))
        if self._takes:
            several = value if len(self._takes) > 1 else (value,)
            known.update(zip(self._takes, several, strict=True))
        inputs = value if isinstance(value, tuple) else (value,)
        for node in self._nodes:
            known[node] = computed(node, known, inputs, self._called.__getitem__, self._tensor)
            if node.op == "output":
                return known[node]
        values = tuple(known[node] for node in self._gives)
        return values if len(values) > 1 else values[0]

    def hand_back(self) -> None:
        """Put parameters that were replaced in this module back into the modules that own them."""
        for target, (owner, name) in self._owners.items():
            own = self._parameters.get(self._names[target])
            if own is not None:
                owner._parameters[name] = own

    def _tensor(self, target: str) -> Any:
        owner, name = self._owners[target]
        own = self._parameters.get(self._names[target])
        return getattr(owner, name) if own is None else own  # a buffer may have been replaced


def computed(
    node: fx.Node,
    known: Mapping[fx.Node, Any],
    inputs: tuple[Any, ...],
    called: Callable[[str], nn.Module],
    tensor: Callable[[str], Any],
) -> Any:
    """Return the value of a node of a recording, of the values that are known."""
    if node.op == "placeholder":
        return inputs
    args: Any = map_arg(node.args, known.__getitem__)
    kwargs: Any = map_arg(node.kwargs, known.__getitem__)
    target: Any = node.target
    if node.op == "output":
        return args[0]
    if node.op == "get_attr":
        return tensor(target)
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return (called(target) if node.op == "call_module" else target)(*args, **kwargs)


Items = list[tuple[str, nn.Module]]
MODEL = "model"
_CONSTANTS = (int, float, str, torch.device, torch.dtype, type(None))
_MAKERS = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros")
"""Functions of torch that take sizes, and no tensor; they are recorded if one is a proxy."""


def trace_stages(module: nn.Module, split: Sequence[str], inputs: Sequence[torch.Tensor]) -> Items:
    """Return the pieces of a model, each named after the module with which it begins.

    Submodules that call a list of modules one after another, or that contain a module of ``split``,
    are taken apart.
    """
    needed = {""} | {name[:end] for name in split for end in _dots(name)}
    lists = _with_lists(module)
    if not lists <= needed:
        with contextlib.suppress(ModelError):
            return _pieces(module, needed | lists, inputs)
    return _pieces(module, needed, inputs)


def _dots(name: str) -> Iterator[int]:
    return (place for place, letter in enumerate(name) if letter == ".")


def _with_lists(module: nn.Module, path: str = "") -> set[str]:
    """Return the names of submodules that call others in turn, apart from blocks in lists."""
    found = set()
    for name, child in module.named_children():
        lists = any(isinstance(each, nn.ModuleList) for each in child.children())
        if type(child) is nn.Sequential or lists:
            found |= {f"{path}{name}"} | _with_lists(child, f"{path}{name}.")
    return found


def _pieces(module: nn.Module, opened: set[str], inputs: Sequence[torch.Tensor]) -> Items:
    modes = modes_of(module)
    twice = [torch.cat([tensor, tensor]) for tensor in inputs]
    tracers = []
    try:
        with buffers_kept(module), seeded(0), torch.no_grad():
            for mode, rows in ((False, inputs), (True, twice)):
                set_modes([(child, own and mode) for child, own in modes])
                tracers.append(_Tracer(opened, tuple(rows)))
                tracers[-1].graph = tracers[-1].trace(_Whole(module, len(inputs)))
    except Exception as error:
        raise ModelError(
            f'strategy="pipeline" cuts a model between the modules that its forward calls, and cannot '
            f"follow that of {type(module).__name__} ({_place(error)}{error}). Leave what "
            "depends on values to a module of its own, return nn.Sequential(...) of its layers from "
            'model(), or use strategy="fsdp".'
        ) from error
    finally:
        set_modes(modes)
    one, other = tracers
    if _text(one.graph) != _text(other.graph):
        raise ModelError(
            f'strategy="pipeline" follows the forward of {type(module).__name__}, which does something '
            "else in training than in evaluation, or with another number of rows: leave that to "
            "modules of their own, such as nn.Dropout instead of functional.dropout."
        )
    items = _cut(one.graph, _constants(one, other), one.root, inputs[0].device)
    _check_same(module, items, twice)
    return items


def _place(error: Exception) -> str:
    """Return the line of user code in which an error was raised."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename != __file__ and "/torch/" not in frame.filename:
            return f"{Path(frame.filename).name}, line {frame.lineno}: "
    return ""


def _check_same(module: nn.Module, items: Items, inputs: Sequence[torch.Tensor]) -> None:
    value: Any = inputs[0] if len(inputs) == 1 else tuple(inputs)
    with modes_kept(module), torch.no_grad():
        module.eval()
        with seeded(0):
            expected = module(*inputs)
        try:
            with seeded(0):
                for _, item in items:
                    value = item(value)
            pairs = zip(tree_leaves(value), tree_leaves(expected), strict=True)
            same = all(
                torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs
            )
        except Exception:  # the pieces keep the sizes of the rows with which they were made
            same = False
    if not same:
        raise ModelError(
            f'strategy="pipeline" cuts {type(module).__name__} between the modules that its forward '
            "calls, and one after another they compute something else: leave what is not a module, or "
            "changes from call to call, to modules of their own."
        )


class _Whole(nn.Module):
    """A module that calls the model with exactly the inputs that it will get.

    It may have more, with defaults.
    """

    def __init__(self, model: nn.Module, inputs: int) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, *inputs: Any) -> Any:
        return self.model(*(inputs[i] for i in range(self.inputs)))


class _StandIn(fx.Proxy):
    """A proxy that knows its value for a few rows."""

    tracer: _Tracer

    def __len__(self) -> int:
        return len(self.tracer.values[self.node])

    def __index__(self) -> int:
        return self.tracer.values[self.node].__index__()


class _Tracer(fx.Tracer):
    """A tracer that also computes the value of every node for ``inputs``."""

    proxy_buffer_attributes = True

    def __init__(self, opened: set[str], inputs: tuple[torch.Tensor, ...]) -> None:
        super().__init__(autowrap_functions=tuple(getattr(torch, name) for name in _MAKERS))
        self._autowrap_search.append(torch)
        self._opened, self._inputs = opened, inputs
        self.values: dict[fx.Node, Any] = {}
        self._busy = False

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name.partition(".")[2] not in self._opened

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _StandIn(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self._busy = True
        try:
            called = self.root.get_submodule
            self.values[node] = computed(node, self.values, self._inputs, called, self._tensor)
        finally:
            self._busy = False
        return node

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return (
            forward(*args, **kwargs)
            if self._busy
            else super().call_module(m, forward, args, kwargs)
        )

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self._busy else super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = self.values[obj.node]
        return super().to_bool(obj) if isinstance(value, torch.Tensor) else bool(value)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        value = self.values[obj.node]
        if isinstance(value, torch.Tensor):
            return super().iter(obj)
        return (operator.getitem(obj, i) for i in range(len(value)))

    def _tensor(self, target: str) -> Any:
        path, _, name = target.rpartition(".")
        return getattr(self.root.get_submodule(path), name)


def _text(graph: fx.Graph) -> str:
    return graph.python_code("self").src


def _constants(one: _Tracer, other: _Tracer) -> dict[fx.Node, Any]:
    """Return values that are no tensors and do not depend on the row count: other sizes, a device."""
    twins = dict(zip(one.graph.nodes, other.graph.nodes, strict=True))
    return {
        node: value
        for node, value in one.values.items()
        if isinstance(value, _CONSTANTS) and value == other.values[twins[node]]
    }


def _cut(
    graph: fx.Graph, constants: dict[fx.Node, Any], whole: nn.Module, device: torch.device
) -> Items:
    """Cut before the first call of each module, where values from before are still needed.

    ``device`` is that of the recording.
    """
    on_device = [node for node, value in constants.items() if value == device]
    nodes = [node for node in graph.nodes if node not in constants]
    place_of = {node: place for place, node in enumerate(nodes)}
    ends = {n: max((place_of.get(u, -1) for u in n.users), default=-1) for n in nodes}

    def live(place: int) -> list[fx.Node]:
        return [node for node in nodes[:place] if ends[node] >= place]

    known, starts = set[Any](), [0]
    for place, node in enumerate(nodes):
        if node.op == "call_module" and node.target not in known:
            if known and live(place):
                starts.append(place)
            known.add(node.target)
    found: Items = []
    for start, stop in zip(starts, [*starts[1:], len(nodes)], strict=True):
        here = nodes[start:stop]
        called = next((str(node.target) for node in here if node.op == "call_module"), MODEL)
        piece = TracedStage(here, live(start), live(stop), constants, on_device, whole)
        found.append((called.partition(".")[2], piece))
    return found


def chain_of(
    module: nn.Module, split: Sequence[str] = (), inputs: Sequence[torch.Tensor] = ()
) -> Items:
    """Return the modules that a model calls one after another, with their names.

    For an ``nn.Sequential`` they are its members. For another model they are found by tracing its
    forward, see :func:`sparkdl.parallel.trace.trace_stages`.
    """
    if not is_chain(module):
        return trace_stages(module, split, inputs)
    found: Items = []
    for name, child in module.named_children():
        if is_chain(child) and len(list(child.children())):
            found += [(f"{name}.{inner}", item) for inner, item in chain_of(child)]
        else:
            found.append((name, child))
    return found


def is_chain(module: nn.Module) -> bool:
    """Return whether calling the module means no more than calling its members in turn."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    plain = type(module).forward is nn.Sequential.forward and not any(hooks)
    return isinstance(module, nn.Sequential) and plain


def first_of(items: Items, name: str) -> int:
    """Return the position of the item with this name, or of the first one inside it."""
    for place, (known, _) in enumerate(items):
        if known == name or known.startswith(f"{name}."):
            return place
    names = [known for known, _ in items]
    raise ModelError(
        f'strategy=Pipeline: no module of the chain is called "{name}".{nearest(name, names)} It has '
        f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
    )
