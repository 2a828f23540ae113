"""The strategies by their words, and combinations of them over one mesh of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sparkdl.errors import in_quotes, nearest
from sparkdl.model.buffers import TrainingOptions
from sparkdl.parallel.base import DIMENSIONS, Mesh, ParallelStrategy, mesh_of, problems_of_mesh
from sparkdl.parallel.ddp import DDP
from sparkdl.parallel.fsdp import FSDP
from sparkdl.parallel.pipeline import Pipeline, micro_batches
from sparkdl.parallel.tensor import Tensor

STRATEGIES: dict[str, ParallelStrategy] = {
    "ddp": DDP(),
    "zero1": DDP(shard_optimizer=True),
    "fsdp": FSDP(),
    "tensor": Tensor(),
    "pipeline": Pipeline(),
}
"""The strategy that each word for ``Trainer(strategy=...)`` stands for."""


@dataclass(frozen=True)
class ParallelPlan:
    """The strategies of a run, and the mesh of its ranks."""

    parts: Mapping[str, ParallelStrategy]  # by dimension, the outermost first
    mesh: Mesh

    @property
    def splits_model(self) -> bool:
        """Return whether a rank has only a part of the model."""
        return any(part.splits_model for part in self.parts.values())

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches that go through a forward and backward pass."""
        return max((part.micro_batches for part in self.parts.values()), default=1)

    def pass_sizes(self, rows: int, accumulate: int) -> set[int]:
        """Return the numbers of rows that the forward passes for a mini-batch have."""
        return {each for _, each, _ in micro_batches(rows, accumulate, self.micro_batches)}

    def planned(
        self, module: nn.Module, inputs: Sequence[torch.Tensor], options: TrainingOptions
    ) -> ParallelPlan:
        """Return this plan with all options that depend on the model.

        See :meth:`sparkdl.parallel.base.ParallelStrategy.planned`.
        """
        parts = {
            dimension: part.planned(module, inputs, self.mesh, options)
            for dimension, part in self.parts.items()
        }
        return replace(self, parts=parts)


def parts_of(
    strategy: str | ParallelStrategy | Sequence[str | ParallelStrategy],
    mesh: Mapping[str, int] | None,
) -> dict[str, ParallelStrategy]:
    """Return the strategies by dimension.

    Dimensions of ``mesh`` that split the model, and for which no strategy is named, get the first one
    in :data:`STRATEGIES`.
    """
    named = [strategy] if isinstance(strategy, str | ParallelStrategy) else strategy
    found = {made.dimension: made for made in map(_made, named)}
    for made in STRATEGIES.values():
        if made.splits_model and made.dimension in (mesh or ()):
            found.setdefault(made.dimension, made)
    if len(found) > 1 and found.get("data") == DDP():  # copies of a split model need no strategy
        del found["data"]
    return found


def strategy_of(words: Sequence[str], micro_batches: int) -> Any:
    """Return the ``Trainer.strategy`` of these words, with the micro-batches where one has them."""
    made = [
        replace(STRATEGIES[word], micro_batches=micro_batches)  # type: ignore[type-var, call-arg]
        if micro_batches and "micro_batches" in vars(STRATEGIES[word])
        else word
        for word in words
    ]
    return made if len(made) > 1 else made[0]


def _made(strategy: str | ParallelStrategy) -> ParallelStrategy:
    return STRATEGIES[strategy] if isinstance(strategy, str) else strategy


def parallel_of(
    parts: Mapping[str, ParallelStrategy], mesh: Mapping[str, int] | None, ranks: int
) -> ParallelPlan:
    """Return the plan for this number of ranks."""
    arranged = mesh_of(mesh, tuple(parts), ranks)
    return ParallelPlan({name: parts[name] for name in DIMENSIONS if name in parts}, arranged)


def problems_of(strategy: Any, mesh: Any) -> Iterator[str]:
    """Yield the problems of ``Trainer.strategy`` and ``Trainer.mesh``."""
    named = list(strategy) if isinstance(strategy, (list, tuple)) else [strategy]
    problems = [problem for one in named for problem in _of_one(one)]
    problems += problems_of_mesh(mesh)
    yield from problems
    if not problems:
        yield from _together(named, mesh)


def _of_one(strategy: Any) -> Iterator[str]:
    """Yield the problems of a strategy, or of the word for one."""
    if isinstance(strategy, type) and issubclass(strategy, ParallelStrategy):
        name = strategy.__name__
        yield f"strategy is the class {name}: give an instance, sparkdl.{name}()."
    elif isinstance(strategy, ParallelStrategy):
        name = type(strategy).__name__
        yield from (f"strategy={name}({problem}" for problem in strategy.problems())
    elif not isinstance(strategy, str) or strategy not in STRATEGIES:
        classes = dict.fromkeys(type(made).__name__ for made in STRATEGIES.values())
        *others, last = (f"sparkdl.{name}(...)" for name in classes)
        yield (
            f"strategy={in_quotes(strategy)}: use one of {', '.join([*STRATEGIES, *others])} or {last}."
            f"{nearest(str(strategy), STRATEGIES)}"
        )


def _together(
    named: Sequence[str | ParallelStrategy], mesh: Mapping[str, int] | None
) -> Iterator[str]:
    """Yield the problems of a combination of strategies, and of their sizes."""
    if not named:
        yield "strategy is an empty list: name one, or leave it out."
        return
    count = Counter(made.dimension for made in map(_made, named))
    parts = parts_of(tuple(named), mesh)
    words = " and ".join(f'"{part.word}"' for part in parts.values())
    beside = [problem for part in parts.values() for problem in part.problems_beside(words)]
    if max(count.values()) > 1:
        yield "strategy has two of a kind: name each once."
    elif len(parts) > 1 and beside:
        yield beside[0]
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
