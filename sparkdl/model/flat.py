"""A module and its flat vector.

The flat vector is one contiguous tensor of everything that changes in training: trainable parameters
first (those with sparse gradients last among them), then buffers. Slices of it are owned, summed and
published. Its dtype is float64 if the model has float64 parameters, else float32; parameters of lower
precision have their master copy in it.

Floating buffers lie in it as values. Other buffers (counters, masks, floats wider than the vector's)
keep their exact bits. Frozen parameters are not in the vector: every process has them from the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from sparkdl.errors import ModelError
from sparkdl.model.buffers import SUM, Rule, owner_of, values_in
from sparkdl.model.layout import TensorRange, layout_of, local, one_place_each
from sparkdl.process.memory import forget_values

Form = tuple[tuple[int, ...], torch.dtype]


def form_of(buffer: torch.Tensor | None) -> Form | None:
    """Return shape and dtype of a buffer, or None if there is no buffer."""
    return None if buffer is None else (tuple(buffer.shape), buffer.dtype)


def changed_form(name: str, before: Form | None, after: Form | None) -> str:
    """Return the message for a buffer of the state_dict whose form forward changes.

    None: there is no such buffer.
    """
    was, now = (
        "None" if form is None else f"{list(form[0])} {str(form[1]).removeprefix('torch.')}"
        for form in (before, after)
    )
    return (
        f'forward makes the buffer "{name}" {now}, but __init__ made it {was}: replicas exchange '
        "buffers, so their shape and type must not change. Give it its final "
        "form in __init__ (for the longest input, say). If it is only a cache, register it with "
        "persistent=False."
    )


def _in_form(segment: TensorRange, owner: nn.Module, attribute: str) -> torch.Tensor | None:
    """Return the buffer of ``segment``, or None if it is a cache that forward has given another form.

    A buffer that no state_dict holds is taken to be a cache of this process. A buffer whose elements
    share memory gets memory of its own.
    """
    buffer = owner._buffers.get(attribute)
    if buffer is not None and buffer.dtype == segment.dtype and buffer.shape == segment.shape:
        if not one_place_each(buffer):  # it could not be written to
            buffer = buffer.clone(memory_format=torch.contiguous_format)
            owner._buffers[attribute] = buffer
        return buffer
    if attribute not in owner._non_persistent_buffers_set:
        built = segment.shape, segment.dtype
        raise ModelError(changed_form(segment.name, built, form_of(buffer)))
    return None


def filled(module: nn.Module, weights: torch.Tensor) -> nn.Module:
    """Return ``module`` with the flat vector ``weights`` in it, in evaluation mode.

    Each parameter then has its own memory.
    """
    flat = FlatModule(module)
    flat.flat.copy_(weights)
    flat.refresh()
    for _, parameter in flat.parameters:
        parameter.data = parameter.data.clone()
    return flat.module.eval()


class FlatModule:
    """A module whose trainable parameters are views of one flat tensor, ``flat``.

    If the module has sharded parameters (DTensors), the flat tensor and its layout cover only the
    shards of this process, and the parameters follow it through :meth:`refresh`.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str = "cpu",
        rules: Mapping[str, Rule] | None = None,
    ) -> None:
        self.layout = layout_of(module, rules)
        self.module = module.to(device)
        self.flat = torch.zeros(self.layout.size, dtype=self.layout.dtype, device=device)
        parameters = dict(module.named_parameters())
        self.parameters: list[tuple[TensorRange, nn.Parameter]] = []
        self._buffers: list[tuple[TensorRange, nn.Module, str]] = []
        self._borrowed: set[int] = set()
        for segment in self.layout.segments:
            if segment.kind == "parameter":
                parameter = parameters[segment.name]
                view = self._view(segment)
                view.copy_(local(parameter).detach())
                if not self._follows(parameter):
                    parameter.data = view
                self.parameters.append((segment, parameter))
            else:
                self._buffers.append((segment, *owner_of(module, segment.name)))
        self.save_buffers(self.flat)

    def _place(self, segment: TensorRange) -> torch.Tensor:
        return self.flat[segment.start : segment.stop]

    def _view(self, segment: TensorRange) -> torch.Tensor:
        return self._place(segment).view(segment.shape)

    def _follows(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is a copy, not a view."""
        return parameter.dtype != self.layout.dtype or hasattr(parameter, "to_local")

    def borrow(self, number: int, values: torch.Tensor) -> bool:
        """Make parameter ``number`` a view of ``values`` instead of ``flat``, until :meth:`give_back`.

        The parameter's values in ``flat`` are lost. Return False, and change nothing, if the
        parameter is a copy and needs its own memory.
        """
        segment, parameter = self.parameters[number]
        if self._follows(parameter):
            return False
        parameter.data = values.view(segment.shape)
        if number not in self._borrowed:
            self._borrowed.add(number)
            forget_values(self._view(segment))
        return True

    def give_back(self) -> None:
        """Make the borrowed parameters views of ``flat`` again."""
        for number in self._borrowed:
            segment, parameter = self.parameters[number]
            parameter.data = self._view(segment)
        self._borrowed.clear()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy ``flat`` into the parts of the module that are no views of it.

        These are buffers, parameters of other dtypes, and shards.
        """
        for segment, parameter in self.parameters:
            if self._follows(parameter):
                local(parameter).copy_(self._view(segment))
        for segment, owner, attribute in self._buffers:
            buffer = _in_form(segment, owner, attribute)
            if buffer is None:
                continue
            if segment.kind == "average":
                buffer.copy_(self._view(segment))
            else:
                raw = self.flat[segment.start : segment.stop].view(torch.uint8)
                nbytes = buffer.numel() * buffer.element_size()
                buffer.copy_(raw[:nbytes].view(segment.dtype).view(segment.shape))

    def buffers(self) -> torch.Tensor:
        """Return the present buffers as the end of a flat vector (from ``buffers_start`` on).

        Of a buffer whose rule is "sum" this is the difference to its value in ``flat``.
        """
        start = self.layout.buffers_start
        end = torch.zeros(
            self.layout.size - start, dtype=self.layout.dtype, device=self.flat.device
        )
        self._save_buffers(end, start)
        for segment, _, _ in self._buffers:
            if segment.rule == SUM:
                places = end[segment.start - start : segment.stop - start], self._place(segment)
                now, before = (values_in(p, segment.kind, segment.dtype) for p in places)
                before = before.to(segment.dtype).to(now.dtype)  # what the module began with
                now.copy_(torch.where(now == before, 0, now - before))  # infinities too
        return end

    @torch.no_grad()
    def save_buffers(self, out: torch.Tensor) -> None:
        """Write the present buffers into their places in ``out`` (a flat vector)."""
        self._save_buffers(out, 0)

    @torch.no_grad()
    def _save_buffers(self, out: torch.Tensor, first: int) -> None:
        """Write the present buffers into ``out``, which begins with element ``first`` of the vector."""
        for segment, owner, attribute in self._buffers:
            buffer = _in_form(segment, owner, attribute)
            place = out[segment.start - first : segment.stop - first]
            if buffer is None:
                place.copy_(self.flat[segment.start : segment.stop])
            elif segment.kind == "average":
                place.view(segment.shape).copy_(buffer)
            else:
                raw = buffer.contiguous().reshape(-1).view(torch.uint8)
                place.view(torch.uint8)[: raw.numel()].copy_(raw)
