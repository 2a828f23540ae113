"""What ranks tell each other beside tensors of known shapes: nested values, without pickle.

The connections between ranks are torch's, without authentication: what comes there as safetensors and
JSON can be wrong, but runs no code. torch's own ``*_object_list`` would unpickle it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist

from sparkdl.codec.files import parse_json, parse_tensors
from sparkdl.codec.safe import decode, encode, mapped
from sparkdl.data.batches import Batch
from sparkdl.data.fields import SampleHandle
from sparkdl.engines.gang.recipe_files import RecipeSource
from sparkdl.parallel.plan import ParallelPlan
from sparkdl.replica.compare import Compared, Description
from sparkdl.replica.iteration import ReplicaReport, SliceReport
from sparkdl.replica.run import RunSpec


def send(value: Any, to: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Send ``value``, of tensors, numbers, text and None in tuples, lists and dicts, to rank ``to``.
    ``device``: what the group's connections take. Raises TypeError for anything else."""
    content = _written(value).to(device)
    dist.send(torch.tensor([len(content)], device=device), to, group)
    dist.send(content, to, group)


def receive(source: int, group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """What rank ``source`` sends; tensors are on ``device``."""
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, source, group)
    content = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.recv(content, source, group)
    return _read(content, device)


def broadcast(
    value: Any, source: int, group: dist.ProcessGroup | None, device: torch.device
) -> Any:
    """The ``value`` of rank ``source``, on every rank of the group; elsewhere it is not looked at."""
    mine = dist.get_rank() == source
    content = _written(value).to(device) if mine else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(content)], device=device)
    dist.broadcast(size, source, group)
    if not mine:
        content = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(content, source, group)
    return value if mine else _read(content, device)


def gathered_values(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """The values of all ranks of the group, in their order."""
    ranks = dist.get_process_group_ranks(group)
    return [broadcast(value, rank, group, device) for rank in ranks]


def _written(value: Any) -> torch.Tensor:
    """As bytes (uint8, on the CPU)."""
    tensors: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor, where: str) -> str:
        name = str(len(tensors))
        tensors[name] = tensor.detach().cpu().contiguous().clone()  # they may share memory
        return name

    tree = json.dumps(encode(value, "what a rank sends", keep))
    data = safetensors.torch.save(tensors, {"tree": tree})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _read(content: torch.Tensor, device: torch.device) -> Any:
    tensors, told = parse_tensors(content.cpu().numpy().tobytes())
    value = decode(parse_json(told["tree"].encode()), tensors)
    return mapped(value, torch.Tensor, lambda tensor: tensor.to(device))


def exchange_bytes(parcel: bytearray, to: int, source: int, rank: int) -> memoryview:
    """Send ``parcel`` to rank ``to``; what rank ``source`` sends here at the same time."""
    if to == rank:
        return memoryview(parcel)
    length = torch.zeros(1, dtype=torch.int64)
    _both(torch.tensor([len(parcel)]), to, length, source)
    arrived = torch.empty(int(length), dtype=torch.uint8)
    _both(torch.from_numpy(np.frombuffer(parcel, np.uint8)), to, arrived, source)
    return arrived.numpy().data


def _both(sent: torch.Tensor, to: int, arrived: torch.Tensor, source: int) -> None:
    """Send and receive; nothing travels that is empty."""
    under_way = []
    if len(sent):
        under_way.append(dist.isend(sent, to))
    if len(arrived):
        under_way.append(dist.irecv(arrived, source))
    for work in under_way:
        assert work is not None
        work.wait()


@dataclass(frozen=True)
class RankConfig:
    """What a rank begins with. ``recipe``: where it is. ``built``: what the driver has made of it.
    ``spare``: a few rows of the data, for a rank that has none in an iteration. ``checksums``: of the
    partitions of training samples. ``weighted_batches``: whether a mini-batch may count for
    something else than its rows, so that ranks have to tell. ``sums``: whether the loss returns
    ``(sum, count)``."""

    run: RunSpec
    recipe: RecipeSource
    built: Description
    spare: Batch
    checksums: tuple[int, ...]
    parallel: ParallelPlan
    weighted_batches: bool
    sums: bool


@dataclass(frozen=True)
class SampleLocation:
    """Where a rank's training samples are: the token of its node, and what is known of them."""

    token: str
    handle: SampleHandle


@dataclass(frozen=True)
class RankStatus:
    """What a rank finds where it is: its samples, how its model compares with the driver's, which
    of its partitions are on the node, and whether the training rows are those of before."""

    samples: SampleLocation
    compared: Compared
    here: tuple[bool, ...]
    unchanged: bool


@dataclass(frozen=True)
class RankReport:
    """What a rank did in an iteration; ``slices``: of those it answers for, where they have more to
    tell than that they were updated. ``writing``: whether something is still done in the background.
    ``loss_rank``: the rank whose report has the loss."""

    report: ReplicaReport
    slices: list[SliceReport]
    writing: bool
    loss_rank: int
