"""The optimizer state that a replica keeps for its own steps, as tensors by parameter."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.errors import ModelError
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState

_ARRAY, _OTHER, _WEIGHTS = "array.", "other.", "weights"
_NUMBERS = {int: "int.", float: "float."}
"""The prefixes of the names of tensors that stand for numbers, by the types of these."""


def keep_inner(plan: SliceSpec, state: SliceState) -> dict[int, dict[str, torch.Tensor]]:
    """Return the optimizer state of ``plan``, the single slice that is the whole flat vector."""
    kept: dict[int, dict[str, torch.Tensor]] = {}
    for part in plan.parameters:
        if part.number not in state.held:
            continue
        named = kept[part.number] = {}
        for name in state.held[part.number]:
            named[_ARRAY + name] = state.arrays[name][part.start : part.stop].cpu()
        for name, value in state.others[part.number].items():
            if type(value) in _NUMBERS:
                kind = torch.int64 if type(value) is int else torch.float64
                named[_NUMBERS[type(value)] + name] = torch.tensor(value, dtype=kind)
                continue
            if not isinstance(value, torch.Tensor):
                raise ModelError(
                    "the consistency model keeps the state of each replica's optimizer, and "
                    f'"{name}" in it is {type(value).__name__}, no tensor or number: use another '
                    "optimizer, such as torch.optim.AdamW."
                )
            named[_OTHER + name] = value.detach().cpu()
    return kept


def open_inner(plan: SliceSpec, kept: ByParameter, device: torch.device) -> SliceState:
    """Return the state that :func:`keep_inner` kept, in its own memory, with empty ``weights``."""
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
        for kind, begin in _NUMBERS.items():
            numbers = {k.removeprefix(begin): v for k, v in named.items() if k.startswith(begin)}
            state.others[part.number] |= {name: kind(v) for name, v in numbers.items()}
        for name, values in arrays.items():
            if name not in state.arrays:
                length = plan.trainable_length
                state.arrays[name] = torch.zeros(length, dtype=values.dtype, device=device)
            state.arrays[name][part.start : part.stop].copy_(values)
    return state


def keep_replica(plan: SliceSpec, state: SliceState) -> dict[int, dict[str, torch.Tensor]]:
    """Return the result of :func:`keep_inner` with the weights, for a replica with its own."""
    return {**keep_inner(plan, state), len(plan.parameters): {_WEIGHTS: state.weights.cpu()}}


def open_replica_state(plan: SliceSpec, kept: ByParameter, weights: torch.Tensor) -> SliceState:
    """Return the state that :func:`keep_replica` kept, with ``weights`` as its memory.

    Weights that it kept are copied there.
    """
    state = open_inner(plan, kept, weights.device)
    own = kept.get(len(plan.parameters), {})
    if _WEIGHTS in own:
        weights.copy_(own[_WEIGHTS])
    return replace(state, weights=weights)
