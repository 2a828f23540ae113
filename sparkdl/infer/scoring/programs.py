"""TorchScript and exported programs as modules that pickle, so that they travel like any other."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class ScriptedModule(nn.Module):
    """A TorchScript module; its pickle holds what ``torch.jit.save`` writes."""

    def __init__(self, scripted: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.scripted = scripted

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the TorchScript module."""
        return self.scripted(*inputs, **named)

    def __reduce__(self) -> Any:
        with io.BytesIO() as file:
            torch.jit.save(self.scripted, file)
            return _scripted, (file.getvalue(),)


def _scripted(data: bytes) -> ScriptedModule:
    with io.BytesIO(data) as file:
        return ScriptedModule(torch.jit.load(file, map_location="cpu"))


class ExportedModule(nn.Module):
    """An exported program; its pickle holds what ``torch.export.save`` writes.

    The module that torch makes of a program refuses ``eval()``, so it is no submodule of this one.
    ``fixed_rows`` is the number of rows that it was exported for; None: any.
    """

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        self._program = program
        self._made: list[nn.Module] = []
        self.register_buffer("_place", torch.zeros(0), persistent=False)  # tells the device
        self.fixed_rows = _fixed_rows(program)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the program."""
        if not self._made:
            self._made.append(self._program.module())
        return self._made[0](*inputs, **named)

    def to(self, device: Any) -> ExportedModule:  # type: ignore[override]
        """Move the program, with the constants in it, to a device."""
        if torch.device(device).type != "cpu":
            from torch.export.passes import move_to_device_pass

            self._program = move_to_device_pass(self._program, device)
            self._made.clear()
        super().to(device)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tensors of the program."""
        return dict(self._program.state_dict)

    def __reduce__(self) -> Any:
        with io.BytesIO() as file:
            torch.export.save(self._program, file)
            return _exported, (file.getvalue(),)


def _exported(data: bytes) -> ExportedModule:
    with io.BytesIO(data) as file:
        return ExportedModule(torch.export.load(file))


def _fixed_rows(program: torch.export.ExportedProgram) -> int | None:
    """Return the first dimension of the first input, if it is a number."""
    inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in inputs:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.ndim and isinstance(value.shape[0], int):
                return int(value.shape[0])
            return None
    return None


def as_module(model: Any) -> nn.Module | None:
    """Return a module that pickles, if ``model`` is a module or an exported program, else None."""
    if isinstance(model, torch.jit.ScriptModule):
        return ScriptedModule(model)
    if isinstance(model, torch.export.ExportedProgram):
        return ExportedModule(model)
    return model if isinstance(model, nn.Module) else None


def tensors_of(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return all parameters and buffers by name; packed weights of quantized layers are no tensors."""
    found = {**module.state_dict(), **dict(module.named_buffers())}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
