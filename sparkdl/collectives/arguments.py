"""Checks of the arguments of collectives. Each check returns the problems that it finds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from sparkdl.collectives.algorithms import ALGORITHMS
from sparkdl.collectives.link import TAG
from sparkdl.errors import ParameterError, nearest, shown

LIBRARY = "library"
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
)
"""The dtypes that the collectives of Gloo support."""
OPS: Mapping[str, tuple[Callable[..., torch.Tensor], dist.ReduceOp.RedOpType]] = {
    "sum": (torch.add, dist.ReduceOp.SUM),
    "mean": (torch.add, dist.ReduceOp.SUM),
    "max": (torch.maximum, dist.ReduceOp.MAX),
    "min": (torch.minimum, dist.ReduceOp.MIN),
}
"""The function that combines two tensors, and the library's op. A mean is a sum, divided at the end."""


def algorithm(operation: str, name: str) -> list[str]:
    """Return the problem of an algorithm that does not exist, or not for this operation."""
    written = ALGORITHMS["all_reduce" if operation == "barrier" else operation]
    known = [LIBRARY, *written]
    if name in known:
        return []
    return [
        f"{operation} has no algorithm {shown(name)}, only {', '.join(known)}.{nearest(name, known)}"
    ]


def reduction(op: str, dtype: torch.dtype) -> list[str]:
    """Return the problem of an op that does not exist, or not for this dtype."""
    if op not in OPS:
        return [f"There is no op {shown(op)}, only {', '.join(OPS)}.{nearest(op, OPS)}"]
    if op == "mean" and not dtype.is_floating_point:
        return [f"A mean needs floating-point numbers, not {name_of(dtype)}: convert the tensor."]
    if op == "sum" and dtype == torch.bool:
        return ['Sums of bool are not defined: take op="max" for "any" or "min" for "all".']
    return []


def collective_tensor(tensor: torch.Tensor, by_rows: bool) -> list[str]:
    """Return the problems of a dtype that Gloo does not support, or of missing rows.

    ``by_rows`` tells whether the collective splits or joins rows.
    """
    problems = []
    if tensor.dtype not in DTYPES:
        known = ", ".join(map(name_of, DTYPES))
        problems.append(f"Collectives carry {known}, but not {name_of(tensor.dtype)}.")
    if by_rows and tensor.dim() == 0:
        problems.append("A tensor without dimensions has no rows: give it one, with reshape(1).")
    return problems


def device(tensor: torch.Tensor, expected: torch.device) -> list[str]:
    """Return the problem of a tensor that is not dense, or not on the backend's device."""
    if tensor.layout != torch.strided:
        return [f"The tensor is {tensor.layout}: make it dense first."]
    if tensor.device.type != expected.type:
        return [f"This group carries {expected.type} tensors: move it from {tensor.device}."]
    return []


def priority(value: object) -> list[str]:
    """Return the problem of a priority that cannot be compared with others."""
    if isinstance(value, (int, float)) and value == value:
        return []
    return [f"priority={shown(value)}: give a number."]


def rank(value: int, size: int) -> list[str]:
    """Return the problem of a number that is no rank of the group."""
    if 0 <= operator.index(value) < size:
        return []
    return [f"There is no rank {value}: this group has ranks 0 to {size - 1}."]


def peer(value: int, size: int, own: int, tag: int) -> list[str]:
    """Return the problems of a number that is no other rank, or of a tag out of range."""
    problems = rank(value, size)
    if value == own:
        problems.append(f"Rank {own} is this one: push and pull join two ranks.")
    if not 0 <= tag < TAG:
        problems.append(f"A tag is a number from 0 to {TAG - 1}, not {tag}.")
    return problems


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


LENGTH = 512
"""The bytes of every note. The size is fixed so that a note arrives whatever the ranks disagree on."""


def write(text: str, device: torch.device) -> torch.Tensor:
    """Return a note as bytes."""
    data = text.encode()
    if len(data) > LENGTH:
        raise ParameterError(f"This has too many dimensions to be described: {text[:80]} ...")
    return torch.frombuffer(bytearray(data.ljust(LENGTH)), dtype=torch.uint8).to(device)


def read(note: torch.Tensor) -> str:
    """Return the text of a note."""
    return bytes(note.tolist()).decode().rstrip()


def compare(group: dist.ProcessGroup, call: str, rows: int, device: torch.device) -> list[int]:
    """Return the ``rows`` of each rank, or raise the same error on all of them if calls differ."""
    mine = write(f"{rows} {call}", device)
    notes = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(notes, mine, group=group)
    found = [read(note).partition(" ") for note in notes]
    calls: dict[str, list[int]] = {}
    for rank, (_, _, its) in enumerate(found):
        calls.setdefault(its, []).append(rank)
    if len(calls) > 1:
        lines = (f"  {_named(ranks)}: {its}" for its, ranks in calls.items())
        raise ParameterError("\n".join(["The ranks do not call the same collective:", *lines]))
    return [int(its) for its, _, _ in found]


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
