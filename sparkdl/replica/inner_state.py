"""The optimizer state that a replica keeps for its own steps, as tensors by parameter."""

from __future__ import annotations

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.errors import ModelError
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState

_ARRAY, _OTHER = "array.", "other."


def keep_inner(plan: SliceSpec, state: SliceState) -> dict[int, dict[str, torch.Tensor]]:
    """Return the optimizer state over the whole flat vector, as a replica keeps it.

    Args:
        plan: The single slice that is the whole flat vector.
        state: Its state.

    Raises:
        ModelError: The state of the optimizer has a value that is not a tensor.
    """
    kept: dict[int, dict[str, torch.Tensor]] = {}
    for part in plan.parameters:
        if part.number not in state.held:
            continue
        named = kept[part.number] = {}
        for name in state.held[part.number]:
            named[_ARRAY + name] = state.arrays[name][part.start : part.stop].cpu()
        for name, value in state.others[part.number].items():
            if not isinstance(value, torch.Tensor):
                raise ModelError(
                    f'consistency=DiLoCo keeps the state of each replica\'s optimizer, and "{name}" in '
                    f"it is {type(value).__name__}, not a tensor: use another optimizer, such as "
                    "torch.optim.AdamW."
                )
            named[_OTHER + name] = value.detach().cpu()
    return kept


def open_inner(plan: SliceSpec, kept: ByParameter, device: torch.device) -> SliceState:
    """Return the state that :func:`keep_inner` kept, in memory of its own, with empty ``weights``.

    Args:
        plan: The single slice that is the whole flat vector.
        kept: The tensors; empty before the first step.
        device: The device of the element-wise state.
    """
    state = SliceState(torch.empty(0, device=device))
    for part in plan.parameters:
        named = kept.get(part.number)
        if not named:
            continue
        arrays = {k.removeprefix(_ARRAY): v for k, v in named.items() if k.startswith(_ARRAY)}
        state.held[part.number] = tuple(arrays)
        state.others[part.number] = {
            k.removeprefix(_OTHER): v.clone() for k, v in named.items() if k.startswith(_OTHER)
        }
        for name, values in arrays.items():
            if name not in state.arrays:
                length = plan.trainable_length
                state.arrays[name] = torch.zeros(length, dtype=values.dtype, device=device)
            state.arrays[name][part.start : part.stop].copy_(values)
    return state
