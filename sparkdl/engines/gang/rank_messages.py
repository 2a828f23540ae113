"""Messages between ranks, and between ranks and the driver.

Ranks send each other nested values without pickle. The connections between ranks are torch's, which are
not authenticated: values that arrive as safetensors and JSON may be wrong, but cannot run code. torch's
own ``*_object_list`` functions would unpickle them.

The transfer of the pickled recipe to the ranks: in their configuration, or as a file on each node.

A recipe that contains a module or weights is as large as these. In the configuration, every rank would
receive all of it and hold it in memory before it may build its model
(:mod:`sparkdl.engines.gang.model_group`). So one rank of each node writes a large recipe to a disk, in
pieces.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist

from sparkdl.codec.files import parse_json, parse_tensors
from sparkdl.codec.safe import decode, encode, mapped
from sparkdl.data.batches import Batch
from sparkdl.data.fields import SampleHandle
from sparkdl.errors import SlabFullError
from sparkdl.gang.rank_group import RankGroup
from sparkdl.gang.rank_task import RankContext
from sparkdl.model.recipe import Recipe
from sparkdl.parallel.plan import ParallelPlan
from sparkdl.replica.compare import Compared, Description
from sparkdl.replica.iteration import ReplicaReport, SliceReport
from sparkdl.replica.run import RECIPE, RunSpec
from sparkdl.slab.root import SlabConfig, open_private, open_root

INLINE_BYTES = 1 << 20
"""The size up to which a recipe is sent inside the configuration of the ranks."""
PIECE_BYTES = 32 << 20
DOING = "sending the model to the ranks"


@dataclass(frozen=True)
class RecipeSource:
    """A place where a rank finds the recipe: ``inline`` or, if that is None, the file on its node."""

    slab: SlabConfig
    inline: bytes | None = field(repr=False)

    @staticmethod
    def of(slab: SlabConfig, recipe: bytes) -> RecipeSource:
        return RecipeSource(slab, recipe if len(recipe) <= INLINE_BYTES else None)

    def bring(self, gang: RankGroup, recipe: bytes) -> None:
        """Write ``recipe`` to a file on each node of the ranks, unless it is inline."""
        if self.inline is not None:
            return
        node_ids = gang.call(partial(node_id_of, self.slab), DOING)
        first = [node_ids.index(node_id) == rank for rank, node_id in enumerate(node_ids)]
        for start in range(0, len(recipe), PIECE_BYTES):
            piece = recipe[start : start + PIECE_BYTES]
            pieces = [piece if writes else b"" for writes in first]
            new = start == 0
            gang.call_each([partial(_write_piece, self.slab, each, new) for each in pieces], DOING)

    def remove(self, gang: RankGroup) -> None:
        """Delete the files. Call this after every rank has built its replica."""
        if self.inline is None:
            gang.call(partial(_remove, self.slab), DOING)

    def load(self) -> Recipe:
        """Unpickle the recipe, with everything that it contains."""
        if self.inline is not None:
            return _checked(pickle.loads(self.inline))
        with open(_path(self.slab), "rb", opener=open_private) as file:
            return _checked(pickle.load(file))


def node_id_of(slab: SlabConfig, member: RankContext | None = None) -> str:
    """Create the slab root, and return the id of this node."""
    root = open_root(slab, create=True)
    assert root is not None
    return root.node_id


def _write_piece(slab: SlabConfig, piece: bytes, new: bool, member: RankContext) -> None:
    """Append a piece to the file, or start a ``new`` one; do nothing if the piece is empty."""
    if not piece:
        return
    path = _path(slab)
    if new:
        path.unlink(missing_ok=True)
    try:
        with open(path, "xb" if new else "ab", opener=open_private) as file:
            file.write(piece)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise SlabFullError(
            f"no room for the model in {path.parent}. Free space there, or point "
            "spark.sparkdl.slab.dir at a larger directory."
        ) from None


def _remove(slab: SlabConfig, member: RankContext) -> None:
    """Delete the file."""
    with contextlib.suppress(OSError):
        _path(slab).unlink(missing_ok=True)


def _path(slab: SlabConfig) -> Path:
    """Return the file's path, on a disk if there is one.

    One rank at a time reads it, and it is soon deleted, so it should not take up memory.
    """
    root = open_root(slab)
    assert root is not None
    return root.directories[-1] / RECIPE


def _checked(recipe: Any) -> Recipe:
    assert isinstance(recipe, Recipe)
    return recipe


def send(value: Any, to: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Send tensors, numbers, text and None in tuples, lists and dicts to rank ``to``.

    ``device`` is that of the tensors which the group's backend sends, here and below.
    """
    content = _written(value).to(device)
    dist.send(torch.tensor([len(content)], device=device), to, group)
    dist.send(content, to, group)


def receive(source: int, group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """Return the value that another rank sends, with its tensors on ``device``."""
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, source, group)
    content = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.recv(content, source, group)
    return _read(content, device)


def broadcast(
    value: Any, source: int, group: dist.ProcessGroup | None, device: torch.device
) -> Any:
    """Return the value of rank ``source`` on every rank of a group; None: on all ranks."""
    mine = dist.get_rank() == source
    content = _written(value).to(device) if mine else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(content)], device=device)
    dist.broadcast(size, source, group)
    if not mine:
        content = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(content, source, group)
    return value if mine else _read(content, device)


def gathered_values(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Return the values of all ranks of the group, in rank order."""
    ranks = dist.get_process_group_ranks(group)
    return [broadcast(value, rank, group, device) for rank in ranks]


def gathered(numbers: Sequence[float]) -> list[list[float]]:
    """Return some numbers of every rank."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [row.tolist() for row in found]


def gathered_counts(count: int) -> list[int]:
    """Return the count of every rank."""
    return [int(found) for (found,) in gathered([count])]


def _written(value: Any) -> torch.Tensor:
    """Return a value as bytes (uint8, on the CPU)."""
    tensors: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor, where: str) -> str:
        name = str(len(tensors))
        # cloned, because tensors may share memory
        tensors[name] = tensor.detach().cpu().contiguous().clone()
        return name

    tree = json.dumps(encode(value, "what a rank sends", keep))
    data = safetensors.torch.save(tensors, {"tree": tree})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _read(content: torch.Tensor, device: torch.device) -> Any:
    tensors, told = parse_tensors(content.cpu().numpy().tobytes())
    value = decode(parse_json(told["tree"].encode()), tensors)
    return mapped(value, torch.Tensor, lambda tensor: tensor.to(device))


def exchange_bytes(parcel: bytearray, to: int, source: int, rank: int) -> memoryview:
    """Send bytes to rank ``to``, and return those that ``source`` sends at the same time."""
    if to == rank:
        return memoryview(parcel)
    length = torch.zeros(1, dtype=torch.int64)
    _both(torch.tensor([len(parcel)]), to, length, source)
    arrived = torch.empty(int(length), dtype=torch.uint8)
    _both(torch.from_numpy(np.frombuffer(parcel, np.uint8)), to, arrived, source)
    return arrived.numpy().data


def _both(sent: torch.Tensor, to: int, arrived: torch.Tensor, source: int) -> None:
    """Send and receive at the same time, without sending anything empty."""
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
    """The configuration with which a rank begins."""

    run: RunSpec
    recipe: RecipeSource
    built: Description
    spare: Batch  # a few rows, for a rank that has none in an iteration
    checksums: tuple[int, ...]
    parallel: ParallelPlan
    weighted_batches: bool  # weights may differ from numbers of rows, so ranks exchange them
    sums: bool


@dataclass(frozen=True)
class SampleLocation:
    """The location of a rank's training samples: the id of its node, and their handle."""

    node_id: str
    handle: SampleHandle


@dataclass(frozen=True)
class RankStatus:
    """The status of a rank after it has built its model."""

    samples: SampleLocation
    compared: Compared
    here: tuple[bool, ...]
    unchanged: bool


@dataclass(frozen=True)
class RankReport:
    """The report of a rank about an iteration."""

    report: ReplicaReport
    slices: list[SliceReport]  # only if there is more to say than that they were updated
    writing: bool
    loss_rank: int

    def with_loss(self, done: Sequence[RankReport]) -> ReplicaReport:
        """Return the report on the rows, with the loss as the rank that knows it reports it.

        ``done`` are the reports of all ranks.
        """
        report = self.report
        if self.loss_rank == report.replica or not report.count:
            return report
        loss, problem = done[self.loss_rank].report.loss, report.not_finite
        if not math.isfinite(loss):
            problem = f"the loss ({loss})"
        return replace(report, loss=loss, not_finite=problem)
