"""Pipeline parallelism: the cuts between a model's stages, and checks of whether it can be cut."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from sparkdl.errors import ModelError, ParameterError, in_quotes, shown
from sparkdl.model.layout import Layout
from sparkdl.model.model_loss import is_own_loss
from sparkdl.model.options import TrainingOptions
from sparkdl.model.preparation import matches_module
from sparkdl.parallel.base import ParallelStrategy, check_dense, count_problems
from sparkdl.parallel.chain import chain_of, first_of, is_chain
from sparkdl.parallel.mesh import Mesh
from sparkdl.parallel.stages import balanced, costs_of
from sparkdl.parallel.trace import Items
from sparkdl.plain import make_plain
from sparkdl.slices.optimizer import OptimizerSpec

SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True, kw_only=True)
class Pipeline(ParallelStrategy):
    """Pipeline parallelism: the model is split into stages, and micro-batches flow through them.

    Torch's pipelining does it (GPipe: Huang et al., 2019; 1F1B: Narayanan et al., 2019). A rank has
    only the weights, gradients and optimizer state of its stages, and the ranks work at the same
    time. An ``nn.Sequential`` is split between its members. Another model is split between the
    modules that its forward calls, which is traced with torch.fx.

    With ``Trainer(mesh={"data": 2, "pipe": 2})`` ranks 0 and 1 are one pipeline and ranks 2 and 3
    another, each of which takes half of every mini-batch (hybrid parallelism).

    Attributes:
        split: The names of the modules with which the second and later stages begin. By default the
            stages have equal work.
        micro_batches: The number of micro-batches in a mini-batch. With S stages a rank is idle for
            (S - 1) / (micro_batches + S - 1) of the time.
        schedule: "1f1b", in which a stage runs backward as soon as it can and holds the activations
            of at most S micro-batches, or "gpipe", which first runs all forward and then all
            backward passes.
        stages_per_rank: The number of stages on each rank. With 2, two ranks have stages 0 and 2,
            and 1 and 3, respectively: ranks are idle for less time, but there are more messages
            (interleaved: Narayanan et al., 2021).
    """

    word: ClassVar[str] = "pipeline"
    dimension: ClassVar[str] = "pipe"
    rank_half: ClassVar[str] = "sparkdl.engines.gang.strategies.pipeline:PipelineRank"
    split: Sequence[str] = ()
    micro_batches: int = 4
    schedule: str = "1f1b"
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        make_plain(self)

    def problems(self) -> Iterator[str]:
        """See :class:`sparkdl.parallel.base.ParallelStrategy`, also for the methods below."""
        split = self.split
        if not isinstance(split, (list, tuple)) or not all(isinstance(n, str) for n in split):
            yield f'split={shown(split)}): give a list of names of modules, such as ["3", "6"].'
        yield from count_problems(self, "micro_batches", "stages_per_rank")
        if self.schedule not in SCHEDULES:
            yield f"schedule={in_quotes(self.schedule)}): use one of {', '.join(SCHEDULES)}."

    def problems_with(self, trainer: Any) -> Iterator[str]:
        yield from super().problems_with(trainer)
        if isinstance(trainer.features, Mapping) or trainer.output is not None:
            name = "output" if trainer.output is not None else "features by keyword"
            yield (
                f'{name} with strategy="{self.word}": pipeline stages take tensors by position and '
                "pass tensors on. Give a list of columns, and a model that returns only its output."
            )
        if is_own_loss(trainer.loss):
            yield (
                f'loss=ModelLoss() with strategy="{self.word}": only the last stage has the '
                "labels. Give a loss that is computed from the model's output."
            )

    def check_model(
        self, module: nn.Module, layout: Layout, optimizer: OptimizerSpec, options: TrainingOptions
    ) -> None:
        _check_torch()
        if not optimizer.separate:
            raise ModelError(
                f'strategy="pipeline" updates each stage where it is, and optimizer {optimizer.name} '
                'needs all parameters together: use strategy="ddp", or an optimizer that treats every '
                "parameter by itself."
            )
        check_dense(self.word, layout, instead="ddp")
        if is_chain(module):
            items = chain_of(module)
            for name in self.split:
                first_of(items, name)
            check_called(module, items, options)

    def check_mesh(self, module: nn.Module, mesh: Mesh) -> None:
        if is_chain(module):  # for another model there is data to call it with only later
            _check_count(self, chain_of(module), mesh.pipe * self.stages_per_rank)

    def planned(
        self,
        module: nn.Module,
        inputs: Sequence[torch.Tensor],
        mesh: Mesh,
        options: TrainingOptions,
    ) -> Pipeline:
        return with_split(self, module, inputs, mesh.pipe, options)


def _check_torch() -> None:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    if "return_outputs" not in inspect.signature(PipelineScheduleSingle.step).parameters:
        raise ModelError(
            f'strategy="pipeline" needs a newer torch than {torch.__version__}: install torch 2.13, or '
            'use strategy="zero1".'
        )


def check_called(module: nn.Module, items: Items, options: TrainingOptions) -> None:
    """Check that the modules for activation checkpointing are called as a whole."""
    whole = {id(child) for _, item in items for child in item.modules()}
    for pattern in options.activation_checkpointing:
        for name, child in module.named_modules():
            if name and matches_module(pattern, name) and id(child) not in whole:
                raise ModelError(
                    f'strategy="pipeline" calls the members of "{name}" one by one: name these in '
                    f'activation_checkpointing, "{name}.*".'
                )


def _check_count(strategy: Pipeline, items: Items, count: int) -> None:
    if len(items) < count:
        raise ParameterError(
            f'strategy="pipeline" with {count} stages: the model is a chain of {len(items)} modules. '
            'Use fewer replicas, or copies of the pipeline, mesh={"data": ..., "pipe": ...}.'
        )
    if not strategy.split:
        return
    if len(strategy.split) != count - 1:
        raise ParameterError(
            f"strategy=Pipeline(split=...) names {len(strategy.split)} modules with which a stage "
            f"begins, after the first: {count} stages need {count - 1}."
        )
    places = [first_of(items, name) for name in strategy.split]
    if places[0] == 0 or any(a >= b for a, b in itertools.pairwise(places)):
        raise ParameterError(
            f"strategy=Pipeline(split={list(strategy.split)}): name them in the order of the model, "
            "and not the first module, with which the first stage begins."
        )


def check_shared(module: nn.Module, items: Items, bounds: Sequence[int]) -> None:
    """Check that no parameter or buffer is in two pipeline stages.

    ``bounds`` are the positions in the chain where stages begin, and the end.
    """
    seen: dict[int, int] = {}
    for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for _, item in items[start:stop]:
            for tensor in (*item.parameters(), *item.buffers()):
                if seen.setdefault(id(tensor), stage) != stage:
                    raise ModelError(
                        f'strategy="pipeline": {_names_of(tensor, module)} in two stages. Name a cut '
                        "that leaves it in one, strategy=sparkdl.Pipeline(split=[...]), or use "
                        'strategy="fsdp".'
                    )


def _names_of(tensor: torch.Tensor, module: nn.Module) -> str:
    """Return the model's names of a tensor, for a message.

    The parts of a traced forward have others.
    """
    of_module = itertools.chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    names = [f'"{name}"' for name, other in of_module if other is tensor]
    return f"{' and '.join(names)} are one tensor," if len(names) > 1 else f"{names[0]} is"


def with_split(
    strategy: Pipeline,
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    ranks: int,
    options: TrainingOptions,
) -> Pipeline:
    """Return ``strategy`` with every cut named: the user's cuts, or those for equal work.

    Work is counted in floating-point operations of the multiplications in a forward pass.
    """
    items, count = chain_of(module, strategy.split, inputs), ranks * strategy.stages_per_rank
    starts = [first_of(items, name) for name in strategy.split]
    _check_count(strategy, items, count)
    check_called(module, items, options)
    costs, outputs = costs_of(module, items, inputs)
    if not starts:
        starts = _chosen(costs, outputs, count)
    check_shared(module, items, [0, *starts, len(items)])
    for start in starts:
        _check_output(items[start - 1][0], outputs[start - 1])
    for kind in _not_sent(outputs[-1]):
        raise ModelError(
            f'strategy="pipeline" needs a model that puts out a tensor or a plain tuple of tensors, '
            f'and {type(module).__name__} puts out a {kind}: change that, or use strategy="fsdp".'
        )
    return replace(strategy, split=tuple(items[start][0] for start in starts))


def bounds_of(strategy: Pipeline, items: Items) -> list[int]:
    """Return the beginnings of the stages, and the end, for the result of :func:`with_split`."""
    return [0, *(first_of(items, name) for name in strategy.split), len(items)]


def _chosen(costs: Sequence[float], outputs: Sequence[object], count: int) -> list[int]:
    """Return the beginnings of the second and later stages, where only tensors pass."""
    places = [0, *(p for p in range(1, len(costs)) if not _not_sent(outputs[p - 1]))]
    if len(places) < count:
        raise ParameterError(
            f'strategy="pipeline" with {count} stages: the model is a chain of {len(places)} parts '
            "between which only tensors go. Use fewer replicas, or copies of the pipeline, "
            'mesh={"data": ..., "pipe": ...}.'
        )
    parts = [sum(costs[a:b]) for a, b in itertools.pairwise([*places, len(costs)])]
    return [places[part] for part in balanced(parts, count)[1:]]


def _not_sent(output: object) -> list[str]:
    """Return the types of values that cannot be sent from one pipeline stage to the next."""
    values = output if type(output) is tuple else (output,)  # a named tuple would lose its names
    return [type(value).__name__ for value in values if not isinstance(value, torch.Tensor)]


def _check_output(name: str, output: object) -> None:
    """Raise :class:`sparkdl.ModelError` if an output cannot be sent to the next pipeline stage."""
    for kind in _not_sent(output):
        raise ModelError(
            f'strategy="pipeline" sends tensors from stage to stage, and "{name}" puts out a '
            f"{kind}: cut elsewhere, strategy=sparkdl.Pipeline(split=[...]), or let it put out a "
            "tensor or a tuple of tensors."
        )
