"""Strategies of a gang, on the driver: their options, and checks of a model against them.

[Note: the two halves of a strategy] A strategy has one class on the driver, which extends
:class:`ParallelStrategy`, and one on the ranks, which extends
:class:`sparkdl.engines.gang.strategies.base.RankStrategy`. The first names the second by text, so that
the driver need not import ``torch.distributed``. The first is pickled and sent to the ranks, as the
options of the second. Outside of these two rooms no code asks which strategy runs: it asks the
strategies what it needs to know.

The mesh of a gang's ranks: their number along each dimension of parallelism. Plain Python.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import nn

from sparkdl.data.fields import Field
from sparkdl.errors import ModelError, ParameterError, nearest, shown
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.flat import Layout
from sparkdl.plain import is_whole
from sparkdl.slices.optimizer import OptimizerSpec

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
        places = zip(DIMENSIONS, self._place(rank), strict=True)
        found = self._grid[tuple(slice(None) if d in names else n for d, n in places)]
        ranks: list[int] = np.ravel(found).tolist()
        return ranks

    def place(self, rank: int, name: str) -> int:
        """Return the position of a rank in one dimension."""
        return int(self._place(rank)[DIMENSIONS.index(name)])

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

    @functools.cached_property
    def _grid(self) -> np.ndarray:
        return np.arange(self.size).reshape(tuple(self.sizes.values()))

    def _place(self, rank: int) -> tuple[Any, ...]:
        return np.unravel_index(rank, self._grid.shape)


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
        elif not is_whole(size, 1):
            yield f"mesh={dict(mesh)}: {name} is a whole number of at least 1."


class ParallelStrategy:
    """A way to divide the work over the ranks of a gang. See the note above.

    Subclasses are frozen dataclasses of options, with a default for each.

    Attributes:
        word: The word for the strategy.
        dimension: The dimension of the mesh along which it divides the work.
        rank_half: The class of its other half, as "module:class".
        micro_batches: The number of micro-batches that go one after another through a forward and
            backward pass.
    """

    word: ClassVar[str]
    dimension: ClassVar[str]
    rank_half: ClassVar[str]
    micro_batches: int = 1

    @property
    def splits_model(self) -> bool:
        """Return whether a rank has only a part of the model."""
        return self.dimension != "data"

    @property
    def shares_samples(self) -> bool:
        """Return whether the samples of several ranks go through one split model together."""
        return self.dimension in MODEL_DIMENSIONS

    @property
    def shards_update(self) -> bool:
        """Return whether each rank updates only a part of the weights."""
        return True

    def problems(self) -> Iterator[str]:
        """Yield the problems of the options, such as ``"units=3): give a list of names."``."""
        yield from ()

    def problems_beside(self, words: str) -> Iterator[str]:
        """Yield why this strategy cannot be one of several, which ``words`` lists."""
        if not self.splits_model:
            yield (
                f'strategy: {words} do not go together. "fsdp", "tensor" and "pipeline" do, copies of '
                'what they cut are mesh={"data": ...}, and "zero1" shares the update among these.'
            )

    def problems_with(self, trainer: Any) -> Iterator[str]:
        """Yield the problems of this strategy with other fields of the user's ``trainer``."""
        if self.splits_model and trainer.compression is not None:
            yield (
                f'compression with strategy="{self.word}": torch sums the gradients itself. Use '
                'strategy="zero1", or leave compression out.'
            )
        model = trainer.consistency
        topology = getattr(model, "topology", None)
        if self.splits_model and (topology or getattr(model, "outer_optimizer", None)):
            yield (
                f'consistency={type(model).__name__} with strategy="{self.word}": a replica takes '
                'steps by itself, so each rank needs the whole model. Use strategy="ddp".'
            )
        if self.shares_samples and trainer.step is not None:
            yield (
                f'step= with strategy="{self.word}": no rank has the whole model to call as it likes. '
                'Use strategy="ddp", "zero1" or "fsdp", or a loss of the model\'s output.'
            )
        for name in ("sync_batchnorm", "compile"):
            if self.shares_samples and getattr(trainer, name):
                yield f'{name} does not go with strategy="{self.word}": leave it out.'

    def check_model(
        self, module: nn.Module, layout: Layout, optimizer: OptimizerSpec, options: TrainingOptions
    ) -> None:
        """Check that a model and its optimizer can be trained in this way.

        Args:
            module: The model.
            layout: The layout of its flat vector.
            optimizer: The plan of the optimizers.
            options: The options of training.

        Raises:
            sparkdl.ModelError: If they cannot.
        """

    def check_mesh(self, module: nn.Module, mesh: Mesh) -> None:
        """Check that this many ranks can divide the model.

        Args:
            module: The model.
            mesh: The arrangement of the ranks.

        Raises:
            sparkdl.ParameterError: If there are too many or too few ranks.
            sparkdl.ModelError: If an option does not fit the model.
        """

    def check_rows(self, module: nn.Module, fields: Sequence[Field]) -> None:
        """Check what the first rows have shown.

        Args:
            module: The model after a forward and backward pass.
            fields: The columns of the samples.

        Raises:
            sparkdl.ModelError: If the strategy does not support the pass.
            sparkdl.ParameterError: If it does not support the columns.
        """
        for name, parameter in module.named_parameters() if self.splits_model else ():
            if parameter.requires_grad and parameter.grad is None:  # ranks would wait for it
                raise ModelError(
                    f'strategy="{self.word}" needs a gradient of every parameter, and "{name}" gets '
                    f'none: freeze it (freeze=["{name}"]), or use strategy="zero1".'
                )
        for field in fields if self.shares_samples else ():
            # micro-batches, and the rows that ranks bring together, must have one shape
            if field.padding is not None and field.padding.length is None:
                raise ParameterError(
                    f'strategy="{self.word}" needs inputs of one shape, and column "{field.name}" is '
                    "padded to the longest row of each mini-batch: pad it to one length, "
                    "sparkdl.Sequence(max_length=..., pad_to_max=True)."
                )

    def planned(
        self,
        module: nn.Module,
        inputs: Sequence[torch.Tensor],
        mesh: Mesh,
        options: TrainingOptions,
    ) -> Self:
        """Return this strategy with the options filled in that depend on the model.

        Args:
            module: The model.
            inputs: A few rows of each input.
            mesh: The arrangement of the ranks.
            options: The options of training.

        Raises:
            sparkdl.ModelError: If the model cannot be divided.
            sparkdl.ParameterError: If an option does not fit the model.
        """
        return self


def names_problems(strategy: ParallelStrategy, name: str, remedy: str) -> Iterator[str]:
    """Yield the problems of an option that is a list of names."""
    names = getattr(strategy, name)
    if not isinstance(names, (list, tuple)) or not all(isinstance(one, str) for one in names):
        yield f"{name}={shown(names)}): give a list of {remedy}."


def check_torch(word: str, is_new: bool) -> None:
    """Check that torch has what the strategy ``word`` uses."""
    if not is_new:
        raise ModelError(
            f'strategy="{word}" needs a newer torch than {torch.__version__}: install torch 2.13, or '
            'use strategy="zero1".'
        )


def check_elementwise(word: str, optimizer: OptimizerSpec) -> None:
    """Check that an optimizer treats every element by itself.

    ``word`` is the word for the strategy, also in the checks below.
    """
    if not (optimizer.elementwise and optimizer.separate):
        raise ModelError(
            f'strategy="{word}" cuts tensors, and optimizer {optimizer.name} needs whole ones: use '
            'strategy="zero1", or an optimizer that treats every element by itself, such as AdamW.'
        )


def check_dense(word: str, layout: Layout, instead: str = "zero1") -> None:
    """Check that no embedding is sparse."""
    for segment in layout.segments:
        if segment.sparse:
            raise ModelError(
                f'strategy="{word}" does not go with the embedding '
                f'"{segment.name.rpartition(".")[0]}", which has sparse=True: use '
                f'strategy="{instead}", or sparse=False.'
            )
