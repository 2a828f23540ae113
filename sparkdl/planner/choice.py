"""The ways to run a fit that leave its mathematics as it is, and how ties between them are broken."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import counted
from sparkdl.parallel.base import MODEL_DIMENSIONS, Mesh
from sparkdl.parallel.plan import STRATEGIES, strategy_of

SHUFFLE, GANG = "shuffle", "gang"
MICRO_BATCHES = (2, 4, 8, 16)
PLAINNESS = ("ddp", "zero1", "fsdp", "pipeline", "tensor")
"""The strategies, the plainest first: a tie goes to the plainer one."""
_WORD_OF = {made.dimension: word for word, made in STRATEGIES.items() if made.dimension != "data"}
"""The strategy of each dimension of a mesh that splits the model."""


@dataclass(frozen=True)
class Facts:
    """The facts of a fit that the planner is told."""

    batch_size: int
    rows: int | None = None  # None: not counted
    iterations: int | None = None  # of the whole fit; None: no end is known
    local_steps: int = 1

    def describe(self) -> str:
        """Return the rows and batches in words."""
        rows = "" if self.rows is None else f"{counted(self.rows, 'row')}, "
        length = "" if self.iterations is None else f", {counted(self.iterations, 'iteration')}"
        return f"{rows}batches of {self.batch_size:,}{length}"


@dataclass(frozen=True)
class Choice:
    """A way to run a fit; ``more`` are fields of a trainer that make it another algorithm."""

    engine: str = SHUFFLE
    replicas: int = 1
    strategy: str = "ddp"  # words with a "+" between them
    mesh: tuple[tuple[str, int], ...] = ()  # dimensions above 1; (): one dimension
    micro_batches: int = 0  # of a pipeline
    more: tuple[tuple[str, Any], ...] = ()
    own: bool = False  # strategy and mesh are those of the trainer, with their options

    @property
    def sizes(self) -> Mesh:
        """The mesh of the ranks."""
        if self.mesh:
            return Mesh(**dict(self.mesh))
        dimension = STRATEGIES[self.strategy].dimension if self.engine == GANG else "data"
        return Mesh(**{dimension: self.replicas})

    @property
    def split(self) -> int:
        """The ranks among which a copy of the model is divided."""
        return self.replicas // self.sizes.data

    @property
    def passes(self) -> int:
        """The mini-batches that are computed side by side: ranks of a pipeline share one."""
        sizes = self.sizes
        return self.replicas // math.prod(sizes.sizes[name] for name in MODEL_DIMENSIONS)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a trainer that make this choice."""
        found: dict[str, Any] = {
            "engine": self.engine,
            "replicas": self.replicas,
            **dict(self.more),
        }
        if self.engine == GANG and not self.own:
            made = strategy_of(self.strategy.split("+"), self.micro_batches)
            found |= {"strategy": made, "mesh": dict(self.mesh) or None}
        return found

    @property
    def name(self) -> str:
        """The strategy with its sizes, as tables show it."""
        if self.engine != GANG:
            return ""
        name = self.strategy.replace("+", " + ")
        if self.mesh:
            name += f" ({', '.join(f'{dimension} {size}' for dimension, size in self.mesh)})"
        return f"{name}, {self.micro_batches} micro-batches" if self.micro_batches else name

    def __str__(self) -> str:
        more = [f"{name}={value}" for name, value in self.more]
        return ", ".join(filter(None, [self.engine, str(self.replicas), self.name, *more]))

    @property
    def plainness(self) -> tuple[int, int, int, int]:
        """The order in a tie: the default engine, the plainer strategy, the fewer ranks."""
        words = self.strategy.split("+")
        strategy = max(map(PLAINNESS.index, words)) + 10 * (len(words) - 1)
        return (self.engine != SHUFFLE, strategy, self.replicas, self.micro_batches)

    def to_plain(self) -> dict[str, Any]:
        """Return the fields of a trainer as plain values, for a record."""
        found: dict[str, Any] = {"engine": self.engine, "replicas": self.replicas}
        if self.engine == GANG and not self.own:
            mesh = dict(self.mesh) or None
            found |= {"strategy": self.strategy.split("+"), "mesh": mesh}
            found |= {"micro_batches": self.micro_batches} if self.micro_batches else {}
        return found

    @staticmethod
    def from_plain(record: Mapping[str, Any]) -> Choice:
        """Return the choice of a record; raises ValueError, KeyError or TypeError if it is damaged."""
        words = [str(word) for word in record.get("strategy", ["ddp"])]
        mesh = tuple((str(name), int(size)) for name, size in (record.get("mesh") or {}).items())
        made = Choice(
            str(record["engine"]),
            int(record["replicas"]),
            "+".join(words),
            mesh,
            int(record.get("micro_batches", 0)),
            own=record["engine"] == GANG and "strategy" not in record,
        )
        if made.engine not in (SHUFFLE, GANG) or not {*words} <= {*PLAINNESS}:
            raise ValueError(f"unknown choice {made}")
        return made


@dataclass(frozen=True)
class Search:
    """The values to choose among."""

    engines: Sequence[str]
    replicas: Sequence[int]
    strategies: Sequence[str]  # words of single strategies

    def choices(self) -> Iterator[Choice]:
        """Yield every choice: engine, replicas, strategy, factors of a mesh, micro-batches."""
        for engine, replicas in itertools.product(self.engines, self.replicas):
            if engine == SHUFFLE:
                yield Choice(engine, replicas)
                continue
            for word in (word for word in self.strategies if word not in _WORD_OF.values()):
                if word == "ddp" or replicas > 1:
                    yield Choice(engine, replicas, word)
            splits = {d: word for d, word in _WORD_OF.items() if word in self.strategies}
            yield from _meshes(replicas, splits)


def _meshes(replicas: int, splits: Mapping[str, str]) -> Iterator[Choice]:
    """Yield the choices of a gang whose ranks divide the model, over all factors of the ranks."""
    names = ["data", *splits]
    factors = [each for each in range(1, replicas + 1) if replicas % each == 0]
    for sizes in itertools.product(factors, repeat=len(names)):
        mesh = {name: size for name, size in zip(names, sizes, strict=True) if size > 1}
        if math.prod(sizes) != replicas or not any(name in splits for name in mesh):
            continue
        words = "+".join(splits[name] for name in mesh if name in splits)
        ordered = tuple((name, size) for name, size in mesh.items()) if len(mesh) > 1 else ()
        for parts in MICRO_BATCHES if "pipe" in mesh else (0,):
            yield Choice(GANG, replicas, words, ordered, parts)


def replicas_up_to(slots: int) -> list[int]:
    """Return 1, 2, 4 and so on below the task slots, and the slots."""
    powers = itertools.takewhile(lambda n: n < slots, (1 << i for i in itertools.count()))
    return [*powers, max(1, slots)]
