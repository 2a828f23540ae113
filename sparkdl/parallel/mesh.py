"""The mesh of a gang's ranks: how many there are along each way of sharing the work. Plain Python."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sparkdl.errors import ParameterError, nearest


@dataclass(frozen=True)
class Mesh:
    """Sizes, outermost first: ranks that follow each other differ in the last dimension above 1.

    ``data``: copies of the model, which differ in their samples; ``pipe``: stages of a pipeline;
    ``shard``: parts of each unit, with samples of their own; ``tensor``: parts of each layer.
    """

    data: int = 1
    pipe: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return asdict(self)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return math.prod(self.sizes.values())

    def along(self, rank: int, *names: str) -> list[int]:
        """The ranks that differ from ``rank`` in these dimensions only, and it, ascending."""
        place = self._place(rank)
        choices = [range(n) if d in names else [place[d]] for d, n in self.sizes.items()]
        return [self._rank(coordinates) for coordinates in itertools.product(*choices)]

    def place(self, rank: int, name: str) -> int:
        """Where a rank is in one dimension."""
        return self._place(rank)[name]

    def model_group(self, rank: int) -> list[int]:
        """The ranks whose samples go through one model together, which is cut over them."""
        return self.along(rank, "pipe", "tensor")

    def most(self, counts: Sequence[int]) -> int:
        """Of something of which the ranks have ``counts``, what a model-parallel group has at most."""
        return max(sum(counts[rank] for rank in group) for group in self.model_groups)

    @functools.cached_property
    def model_groups(self) -> list[list[int]]:
        """All of them, in the order of their first ranks."""
        found = [self.model_group(rank) for rank in range(self.size)]
        return [group for rank, group in enumerate(found) if group[0] == rank]

    def _place(self, rank: int) -> dict[str, int]:
        found = {}
        for name, size in reversed(self.sizes.items()):
            rank, found[name] = divmod(rank, size)
        return found

    def _rank(self, coordinates: tuple[int, ...]) -> int:
        rank = 0
        for place, size in zip(coordinates, self.sizes.values(), strict=True):
            rank = rank * size + place
        return rank


DIMENSIONS = tuple(field.name for field in fields(Mesh))


def mesh_of(asked: Mapping[str, int] | None, needed: tuple[str, ...], ranks: int) -> Mesh:
    """The mesh of so many ranks. ``needed``: the dimensions that the strategies are of; without
    ``asked`` there is one at most, and all ranks are along it; the rest is "data".

    Raises :class:`sparkdl.ParameterError` where sizes and ranks do not fit.
    """
    sizes = dict(asked) if asked is not None else dict.fromkeys(needed[:1], ranks)
    rest, left = divmod(ranks, math.prod(n for d, n in sizes.items() if d != "data"))
    if left or sizes.setdefault("data", rest) != rest:
        raise ParameterError(
            f"mesh={dict(asked or sizes)} has {math.prod(sizes.values())} ranks, and there are {ranks} "
            "replicas: give sizes whose product is replicas."
        )
    return Mesh(**sizes)


def problems_of_mesh(mesh: Any) -> Iterator[str]:
    """What is wrong with ``Trainer.mesh`` by itself."""
    if mesh is None:
        return
    if not isinstance(mesh, Mapping) or not mesh:
        yield f'mesh={mesh!r}: give sizes by name, such as {{"data": 2, "shard": 4}}.'
        return
    for name, size in mesh.items():
        if name not in DIMENSIONS:
            known = ", ".join(DIMENSIONS)
            yield f'mesh={dict(mesh)}: use {known}, not "{name}".{nearest(str(name), DIMENSIONS)}'
        elif isinstance(size, bool) or not isinstance(size, int) or size < 1:
            yield f"mesh={dict(mesh)}: {name} is a whole number of at least 1."
