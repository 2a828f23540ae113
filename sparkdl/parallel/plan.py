"""Combinations of strategies over one mesh of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.parallel.base import (
    DDP,
    FSDP,
    Pipeline,
    Strategy,
    Tensor,
    problems_of_strategy,
    strategy_of,
)
from sparkdl.parallel.mesh import Mesh, mesh_of, problems_of_mesh


@dataclass(frozen=True)
class ParallelPlan:
    """The strategies of a run, by dimension, and the mesh of its ranks."""

    parts: Mapping[str, Any]
    mesh: Mesh

    @property
    def cuts(self) -> bool:
        """Return whether a strategy gives a rank only a part of the model."""
        return not self.parts.keys() <= {"data"}

    @property
    def ddp(self) -> DDP:
        return self.parts.get("data", DDP())

    @property
    def fsdp(self) -> FSDP | None:
        return self.parts.get("shard")

    @property
    def tensor(self) -> Tensor | None:
        return self.parts.get("tensor")

    @property
    def pipeline(self) -> Pipeline | None:
        return self.parts.get("pipe")


def parts_of(
    strategy: str | Strategy | Sequence[str | Strategy], mesh: Mapping[str, int] | None
) -> dict[str, Any]:
    """Return the strategies by dimension.

    Dimensions of ``mesh`` for which no strategy is named get the one with default options.
    """
    named = [strategy] if isinstance(strategy, str | Strategy) else strategy
    found: dict[str, Any] = {}
    for one in named:
        made = strategy_of(one) if isinstance(one, str) else one
        found[made.dimension] = made
    for made in (FSDP(), Tensor(), Pipeline()):
        if made.dimension in (mesh or ()):
            found.setdefault(made.dimension, made)
    if len(found) > 1 and found.get("data") == DDP():
        del found["data"]
    return found


def parallel_of(
    parts: Mapping[str, Any], mesh: Mapping[str, int] | None, ranks: int
) -> ParallelPlan:
    """Return the plan for this number of ranks.

    Args:
        parts: The strategies by dimension.
        mesh: The sizes that the user has set.
        ranks: The number of ranks.

    Raises:
        sparkdl.ParameterError: If it does not fit ``mesh``.
    """
    return ParallelPlan(parts, mesh_of(mesh, tuple(parts), ranks))


def problems_of(strategy: Any, mesh: Any) -> Iterator[str]:
    """Yield the problems of ``Trainer.strategy`` and ``Trainer.mesh``."""
    named = list(strategy) if isinstance(strategy, (list, tuple)) else [strategy]
    problems = [problem for one in named for problem in problems_of_strategy(one)]
    problems += problems_of_mesh(mesh)
    yield from problems
    if not problems:
        yield from _together(named, mesh)


def _together(named: Sequence[Any], mesh: Mapping[str, int] | None) -> Iterator[str]:
    """Yield the problems of a combination of strategies, and of their sizes."""
    if not named:
        yield "strategy is an empty list: name one, or leave it out."
        return
    count = Counter((strategy_of(one) if isinstance(one, str) else one).dimension for one in named)
    parts = parts_of(tuple(named), mesh)
    words = " and ".join(f'"{part.word}"' for part in parts.values())
    if max(count.values()) > 1:
        yield "strategy has two of a kind: name each once."
    elif len(parts) > 1 and parts.get("data") not in (None, DDP(shard_optimizer=True)):
        yield (
            f'strategy: {words} do not go together. "fsdp", "tensor" and "pipeline" do, copies of what '
            'they cut are mesh={"data": ...}, and "zero1" shares the update among these.'
        )
    elif len(parts) > 1 and "shard" in parts and parts["shard"].cpu_offload:
        yield (
            f"strategy: {words} together keep their weights where they compute: leave out "
            "cpu_offload=True."
        )
    elif len(parts) > 1 and mesh is None:
        yield (
            f"strategy: {words} together need sizes: give them, such as "
            f"mesh={{{', '.join(f'{name!r}: 2' for name in parts)}}}.".replace("'", '"')
        )
    elif mesh is not None:
        for name, part in parts.items():
            if name != "data" and name not in mesh:
                yield (
                    f'mesh={dict(mesh)} has no size of strategy="{part.word}": name "{name}" too.'
                )
