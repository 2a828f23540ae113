"""Pieces of a recorded forward, as modules. See :mod:`sparkdl.parallel.trace`."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves


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
        for node in self._nodes:
            if node.op == "placeholder":
                known[node] = value if isinstance(value, tuple) else (value,)
                continue
            args: Any = map_arg(node.args, known.__getitem__)
            kwargs: Any = map_arg(node.kwargs, known.__getitem__)
            if node.op == "output":
                return args[0]
            known[node] = self._done(node, args, kwargs)
        values = tuple(known[node] for node in self._gives)
        return values if len(values) > 1 else values[0]

    def hand_back(self) -> None:
        """Put parameters that were replaced in this module back into the modules that own them."""
        for target, (owner, name) in self._owners.items():
            own = self._parameters.get(self._names[target])
            if own is not None:
                owner._parameters[name] = own

    def _done(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_module":
            return self._called[str(node.target)](*args, **kwargs)
        if node.op == "get_attr":
            owner, name = self._owners[str(node.target)]
            own = self._parameters.get(self._names[str(node.target)])
            return getattr(owner, name) if own is None else own  # a buffer may have been replaced
        return call_node(node, args, kwargs)


def call_node(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Call the function or method that a node of a recording stands for."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
