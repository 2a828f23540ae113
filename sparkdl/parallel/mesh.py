"""The mesh of a gang's ranks: their number along each dimension of parallelism. Plain Python."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sparkdl.errors import ParameterError, nearest, shown

MODEL_DIMENSIONS = ("pipe", "tensor")
"""The dimensions whose ranks run their samples through one split model together."""


@dataclass(frozen=True)
class Mesh:
    """The sizes of a mesh, the outermost dimension first.

    Consecutive ranks differ in the last dimension with a size above 1.
    """

    data: int = 1  # copies of the model, which differ in their samples
    pipe: int = 1
    shard: int = 1  # of each unit; the ranks have samples of their own
    tensor: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return asdict(self)

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.sizes.values())

    def along(self, rank: int, *names: str) -> list[int]:
        """Return ``rank`` and the ranks that differ from it only in these dimensions, ascending."""
        place = self._place(rank)
        choices = [range(n) if d in names else [place[d]] for d, n in self.sizes.items()]
        return [self._rank(coordinates) for coordinates in itertools.product(*choices)]

    def place(self, rank: int, name: str) -> int:
        """Return the position of a rank in one dimension."""
        return self._place(rank)[name]

    def model_group(self, rank: int) -> list[int]:
        """Return the ranks whose samples go through one split model together."""
        return self.along(rank, *MODEL_DIMENSIONS)

    def most(self, counts: Sequence[int]) -> int:
        """Return the largest sum of the ranks' ``counts`` over a model-parallel group."""
        return max(sum(counts[rank] for rank in group) for group in self.model_groups)

    @functools.cached_property
    def model_groups(self) -> list[list[int]]:
        """Return all model-parallel groups, in the order of their first ranks."""
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
    """Return the mesh of the ranks.

    If ``asked`` is None, all ranks are along the dimension of the only strategy; else the ranks
    that remain are along "data".
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
    """Yield the problems of ``Trainer.mesh`` by itself."""
    if mesh is None:
        return
    if not isinstance(mesh, Mapping) or not mesh:
        yield f'mesh={shown(mesh)}: give sizes by name, such as {{"data": 2, "shard": 4}}.'
        return
    for name, size in mesh.items():
        if name not in DIMENSIONS:
            known = ", ".join(DIMENSIONS)
            yield f'mesh={dict(mesh)}: use {known}, not "{name}".{nearest(str(name), DIMENSIONS)}'
        elif isinstance(size, bool) or not isinstance(size, int) or size < 1:
            yield f"mesh={dict(mesh)}: {name} is a whole number of at least 1."
