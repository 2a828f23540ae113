"""The state of a slice as a safetensors file, and the conversion of stored slices to another N.

A file contains only tensors: ``weights``, ``array.NAME`` (element-wise optimizer state, the moving
average of the weights), and ``other.K`` (tensors in the rest of the optimizer state). Everything
else is JSON in the safetensors metadata. Nothing is pickled, so reading a file runs no code from
it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import safetensors.torch
import torch

from sparkdl.codec.files import MAX_HEADER_BYTES, parse_json, parse_tensors
from sparkdl.codec.safe import STORABLE, decode, encode
from sparkdl.errors import CheckpointError, DamagedCheckpoint, kind_of
from sparkdl.slices.spec import SliceSpec, SliceState
from sparkdl.slices.update import EMA, EVALUATED

FORMAT = "sparkdl-slice"
VERSION = "1"


@dataclass(frozen=True)
class StoredSlice:
    """A stored slice: elements [start, stop) of the flat vector. Its arrays have
    ``trainable_length`` elements."""

    start: int
    stop: int
    trainable_length: int
    state: SliceState


def pack(plan: SliceSpec, state: SliceState) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a slice's file. The tensors are contiguous and on the
    CPU.
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
            raise TypeError(f"parameter {number} has the key {key!r}, {kind_of(key)}")
        return [key, encode(value, f'parameter {number}, "{key}"', keep)]

    def keep(tensor: torch.Tensor, where: str) -> str:
        return add(f"other.{len(tensors)}", tensor, where)

    try:
        add("weights", state.weights, "weights")
        for name, array in state.arrays.items():
            add(f"array.{name}", array, f'"{name}"')
        others = [
            [number, [entry(number, key, value) for key, value in values.items()]]
            for number, values in state.others.items()
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
        "held": json.dumps([[n, list(names)] for n, names in state.held.items()]),
    }
    return tensors, metadata


def to_bytes(plan: SliceSpec, state: SliceState) -> bytes:
    """Return the slice as the bytes of a safetensors file."""
    tensors, metadata = pack(plan, state)
    data = safetensors.torch.save(tensors, metadata)
    header = int.from_bytes(data[:8], "little")
    if header > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the file of slice {plan.index} would begin with {header:,} bytes that describe it, "
            f"and {MAX_HEADER_BYTES:,} at most can be read: train with more slices."
        )
    return data


def unpack(data: bytes) -> StoredSlice:
    """Read the bytes that :func:`to_bytes` wrote. The tensors own their memory.

    Raise DamagedCheckpoint for other bytes.
    """
    try:
        tensors, metadata = parse_tensors(data)
        if (metadata["format"], metadata["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is a {metadata['format']} of version {metadata['version']}")
        others = {
            int(number): {str(key): decode(v, tensors) for key, v in items}
            for number, items in parse_json(metadata["others"].encode(), finite=True)
        }
        held = {
            int(n): tuple(str(name) for name in names)
            for n, names in parse_json(metadata["held"].encode(), finite=True)
        }
        arrays = {n.removeprefix("array."): t for n, t in tensors.items() if n.startswith("array.")}
        state = SliceState(tensors["weights"], arrays, held, others)
        start, stop, trainable = (int(metadata[k]) for k in ("start", "stop", "trainable_length"))
        if not 0 <= start <= start + trainable <= stop:
            raise ValueError("its bounds make no sense")
        if state.weights.shape != (stop - start,):
            raise ValueError("its weights are not as long as its bounds say")
        if held.keys() != others.keys() or not arrays.keys() >= {
            n for h in held.values() for n in h
        }:
            raise ValueError("it names arrays that it does not hold")
        if any(t.shape != (trainable,) for t in arrays.values()):
            raise ValueError("an array of it is not as long as its bounds say")
        if not {t.dtype for t in tensors.values()} <= STORABLE:
            raise ValueError("it holds a tensor of a dtype that is never stored")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DamagedCheckpoint(f"it is not a slice of a checkpoint ({text})") from error
    return StoredSlice(start, stop, trainable, state)


def reslice(parts: Iterable[StoredSlice], plan: SliceSpec, dtype: torch.dtype) -> SliceState:
    """Assemble the state of a slice from stored slices of another cut, bit for bit.

    An array is zero where no part has it, because the parameter had no such state there. Arrays of
    weights, such as their moving average, are in every part or in none. State of a whole parameter
    comes from the part where the parameter starts, otherwise from the next part that has it.
    ``parts`` are at least those that overlap with the slice, in any order; each is released before
    the next is taken. Raise DamagedCheckpoint if they do not cover it exactly once.
    """
    weights = torch.empty(plan.length, dtype=dtype)
    arrays: dict[str, torch.Tensor] = {}
    others: dict[int, tuple[int, dict[str, Any], tuple[str, ...]]] = {}
    numbers = {fragment.number for fragment in plan.parameters}
    covered: list[tuple[int, int]] = []
    complete: dict[str, list[tuple[int, int]]] = {}
    for part in parts:
        for name in (EMA, EVALUATED):
            if name in part.state.arrays:  # an empty slice has it too
                arrays.setdefault(name, torch.zeros(plan.trainable_length, dtype=dtype))
                complete.setdefault(name, [])
        low, high = max(part.start, plan.start), min(part.stop, plan.stop)
        if low >= high:
            continue
        _check_dtype("weights", part.state.weights, dtype)
        weights[low - plan.start : high - plan.start] = part.state.weights[
            low - part.start : high - part.start
        ]
        covered.append((low, high))
        for name, source in part.state.arrays.items():
            if name in complete:
                complete[name].append((low, high))
            if name not in arrays:
                arrays[name] = torch.zeros(plan.trainable_length, dtype=source.dtype)
            _check_dtype(name, source, arrays[name].dtype)
            end = min(part.start + part.trainable_length, plan.start + plan.trainable_length)
            if low < end:
                target = arrays[name]
                target[low - plan.start : end - plan.start] = source[
                    low - part.start : end - part.start
                ]
        for number, values in part.state.others.items():
            if number in numbers and (number not in others or part.start < others[number][0]):
                others[number] = part.start, values, part.state.held[number]
    _check_cover("weights", covered, plan)
    for name, ranges in complete.items():
        _check_cover(name, ranges, plan)
    # Copies: an optimizer counts its steps in place, and two slices may come from one part.
    return SliceState(
        weights,
        arrays,
        {number: others[number][2] for number in sorted(others)},
        {number: copy.deepcopy(others[number][1]) for number in sorted(others)},
    )


def _check_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise DamagedCheckpoint(f'"{name}" is {tensor.dtype} in one place and {dtype} in another')


def _check_cover(name: str, spans: list[tuple[int, int]], plan: SliceSpec) -> None:
    position = plan.start
    for low, high in sorted(spans):
        if low != position:
            break
        position = high
    if position != plan.stop:
        raise DamagedCheckpoint(
            f'the files do not hold elements {position} to {plan.stop} of "{name}" exactly once'
        )


@dataclass(frozen=True)
class PackSlice:
    """Callable that runs on a slice's owner: return the slice as bytes, in the format of a
    checkpoint's file."""

    def __call__(self, index: int, plan: SliceSpec, state: SliceState) -> bytes:
        return to_bytes(plan, state)


class InTasks(Protocol):
    """Byte strings that are available in tasks, such as
    :class:`sparkdl.spark.broadcasts.BroadcastBytes`."""

    def parts(self) -> Iterator[bytes]:
        """Yield the byte strings one after another, without keeping them."""


@dataclass(frozen=True)
class ReadCarried:
    """Callable that runs on a slice's owner: read the slice from all slices of an earlier run,
    whatever their number.

    ``packed`` is the byte strings, or an object that yields them in a task.
    """

    packed: Sequence[bytes] | InTasks

    def __call__(self, plan: SliceSpec, dtype: torch.dtype) -> SliceState:
        packed = self.packed
        slices = packed if isinstance(packed, Sequence) else packed.parts()
        return reslice(map(unpack, slices), plan, dtype)


@dataclass(frozen=True)
class WithoutAverage:
    """Callable that removes the moving average from what ``read`` returns.

    It is for a run that keeps no moving average: a stale one would be continued by the next run
    that keeps one.
    """

    read: Callable[[SliceSpec, torch.dtype], SliceState]

    def __call__(self, plan: SliceSpec, dtype: torch.dtype) -> SliceState:
        state = self.read(plan, dtype)
        state.arrays.pop(EMA, None)
        return state
