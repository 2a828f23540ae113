"""The state of a slice <-> safetensors bytes, and cutting stored slices anew for another N.

A file holds tensors only: ``weights``, ``array.NAME`` (element-wise optimizer state), optional
vectors as long as the weights, and ``other.K`` (tensors among the rest of the optimizer's state).
Everything else is JSON in the safetensors metadata. Nothing is pickled, so that reading a file runs
no code of its own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import safetensors
import safetensors.torch
import torch

from sparkdl.errors import CheckpointError, DamagedCheckpoint
from sparkdl.sync.plan import SlicePlan
from sparkdl.sync.update import SliceState
from sparkdl.train.checkpoint.tree import STORABLE, decode, encode

FORMAT = "sparkdl-slice"
VERSION = "1"
OPTIONAL_VECTORS = ("ema",)
"""Members of a state, beside the weights and as long as they, that a run may have or not."""

_OTHERS = "others" if "others" in {f.name for f in fields(SliceState)} else "scalars"


@dataclass(frozen=True)
class Part:
    """A stored slice: elements [start, stop) of the flat vector; its arrays are
    ``trainable_length`` long."""

    start: int
    stop: int
    trainable_length: int
    state: SliceState


def others_of(state: SliceState) -> dict[int, dict[str, Any]]:
    """The optimizer state that is no element-wise array, by parameter number and key."""
    return getattr(state, _OTHERS)


def state_of(
    weights: torch.Tensor,
    arrays: dict[str, torch.Tensor],
    others: dict[int, dict[str, Any]],
    vectors: dict[str, torch.Tensor],
) -> SliceState:
    """A state of these members; ``vectors``: the optional ones that there are."""
    state = SliceState(weights, arrays, **{_OTHERS: others})
    for name, vector in vectors.items():
        setattr(state, name, vector)
    return state


def vectors_of(state: SliceState) -> dict[str, torch.Tensor]:
    """The optional members, as long as the weights, that the state has."""
    found = {name: getattr(state, name, None) for name in OPTIONAL_VECTORS}
    return {name: vector for name, vector in found.items() if vector is not None}


def pack(plan: SlicePlan, state: SliceState) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a slice's file; tensors are contiguous and on the CPU.

    Raises :class:`sparkdl.CheckpointError` for optimizer state that is no tensor, number, text,
    list, tuple or dict of these, naming the parameter and the key.
    """
    tensors: dict[str, torch.Tensor] = {}
    places: set[int] = set()

    def add(name: str, tensor: torch.Tensor, where: str) -> str:
        if tensor.layout != torch.strided or tensor.dtype not in STORABLE:
            kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
            raise TypeError(f"{where} is a {kind} tensor")
        plain = tensor.detach().cpu().contiguous()
        if plain.untyped_storage().data_ptr() in places:
            plain = plain.clone()  # safetensors refuses tensors that share memory
        places.add(plain.untyped_storage().data_ptr())
        tensors[name] = plain
        return name

    def entry(number: int, key: str, value: Any) -> list[Any]:
        if type(key) is not str:
            raise TypeError(f"parameter {number} has the key {key!r}, a {type(key).__name__}")
        return [key, encode(value, f'parameter {number}, "{key}"', keep)]

    def keep(tensor: torch.Tensor, where: str) -> str:
        return add(f"other.{len(tensors)}", tensor, where)

    try:
        add("weights", state.weights, "weights")
        for name, vector in vectors_of(state).items():
            add(name, vector, name)
        for name, array in state.arrays.items():
            add(f"array.{name}", array, f'"{name}"')
        others = [
            [number, [entry(number, key, value) for key, value in values.items()]]
            for number, values in others_of(state).items()
        ]
    except TypeError as error:
        raise CheckpointError(
            f"the optimizer's state cannot be stored: {error}. A checkpoint holds tensors, numbers, "
            "text, None, and lists, tuples and dicts of these."
        ) from None
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "start": str(plan.start),
        "stop": str(plan.stop),
        "trainable_length": str(plan.trainable_length),
        "others": json.dumps(others, allow_nan=False, separators=(",", ":")),
    }
    return tensors, metadata


def to_bytes(plan: SlicePlan, state: SliceState) -> bytes:
    """The slice as a safetensors file. Raises as :func:`pack` does."""
    tensors, metadata = pack(plan, state)
    return safetensors.torch.save(tensors, metadata)


def unpack(data: bytes) -> Part:
    """What :func:`to_bytes` wrote; the tensors own their memory.

    Raises :class:`sparkdl.DamagedCheckpoint` where the bytes are no such file.
    """
    try:
        tensors = safetensors.torch.load(data)
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        if (metadata["format"], metadata["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is a {metadata['format']} of version {metadata['version']}")
        others = {
            int(number): {str(key): decode(v, tensors) for key, v in items}
            for number, items in json.loads(metadata["others"])
        }
        arrays = {n.removeprefix("array."): t for n, t in tensors.items() if n.startswith("array.")}
        vectors = {name: tensors[name] for name in OPTIONAL_VECTORS if name in tensors}
        state = state_of(tensors["weights"], arrays, others, vectors)
        start, stop, trainable = (int(metadata[k]) for k in ("start", "stop", "trainable_length"))
        if not 0 <= start <= start + trainable <= stop:
            raise ValueError("its bounds make no sense")
        long = {"weights": state.weights, **vectors}
        if any(t.shape != (stop - start,) for t in long.values()):
            raise ValueError("its weights are not as long as its bounds say")
        if any(t.shape != (trainable,) for t in arrays.values()):
            raise ValueError("an array of it is not as long as its bounds say")
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DamagedCheckpoint(f"it holds no slice of a checkpoint ({text})") from error
    return Part(start, stop, trainable, state)


def recut(parts: Iterable[Part], plan: SlicePlan, dtype: torch.dtype) -> SliceState:
    """The state of slice ``plan`` out of stored slices of another cut, bit for bit.

    ``parts``: at least those that overlap with the slice, in any order; each is let go before the
    next is taken. ``dtype``: of the flat vector. An array is zero where no part has it: there the
    parameter had no such state. What belongs to a whole parameter comes from the part where the
    parameter starts, else from the next one that has it. Raises
    :class:`sparkdl.DamagedCheckpoint` where the parts do not cover the slice exactly.
    """
    weights = torch.empty(plan.length, dtype=dtype)
    vectors: dict[str, torch.Tensor] = {}
    arrays: dict[str, torch.Tensor] = {}
    others: dict[int, tuple[int, dict[str, Any]]] = {}
    numbers = {piece.number for piece in plan.parameters}
    covered: dict[str, list[tuple[int, int]]] = {"weights": []}
    for part in parts:
        for name in vectors_of(part.state):  # an empty slice has them too
            if name not in vectors:
                vectors[name] = torch.empty(plan.length, dtype=dtype)
        low, high = max(part.start, plan.start), min(part.stop, plan.stop)
        if low >= high:
            continue
        for name, source in {"weights": part.state.weights, **vectors_of(part.state)}.items():
            _check_dtype(name, source, dtype)
            target = weights if name == "weights" else vectors[name]
            target[low - plan.start : high - plan.start] = source[
                low - part.start : high - part.start
            ]
            covered.setdefault(name, []).append((low, high))
        for name, source in part.state.arrays.items():
            if name not in arrays:
                arrays[name] = torch.zeros(plan.trainable_length, dtype=source.dtype)
            _check_dtype(name, source, arrays[name].dtype)
            end = min(part.start + part.trainable_length, plan.start + plan.trainable_length)
            if low < end:
                target = arrays[name]
                target[low - plan.start : end - plan.start] = source[
                    low - part.start : end - part.start
                ]
        for number, values in others_of(part.state).items():
            if number in numbers and (number not in others or part.start < others[number][0]):
                others[number] = part.start, values
    for name in ("weights", *vectors):
        _check_cover(name, covered.get(name, []), plan)
    # Copies: an optimizer counts its steps in place, and two slices may come from one part.
    own = {number: copy.deepcopy(others[number][1]) for number in sorted(others)}
    return state_of(weights, arrays, own, vectors)


def _check_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise DamagedCheckpoint(f'"{name}" is {tensor.dtype} in one place and {dtype} in another')


def _check_cover(name: str, spans: list[tuple[int, int]], plan: SlicePlan) -> None:
    position = plan.start
    for low, high in sorted(spans):
        if low != position:
            break
        position = high
    if position != plan.stop:
        raise DamagedCheckpoint(
            f'the files do not hold elements {position} to {plan.stop} of "{name}" exactly once'
        )
