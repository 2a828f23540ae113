"""Pipeline parallelism: the cuts between a model's stages, and checks of whether it can be cut.

The work of a model's modules, its division into pipeline stages, and that of rows. Plain torch.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sparkdl.errors import ModelError, ParameterError, in_quotes, known_arguments, shown
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.flat import Layout
from sparkdl.model.loss import is_own_loss
from sparkdl.model.preparation import matches_module, modes_kept
from sparkdl.parallel.base import Mesh, ParallelStrategy, check_dense, check_torch, names_problems
from sparkdl.parallel.tensor import without_fused_layers
from sparkdl.parallel.trace import Items, chain_of, first_of, is_chain
from sparkdl.plain import is_whole, make_plain
from sparkdl.slices.optimizer import OptimizerSpec

OPERATION = 1.0
"""The cost of a module besides its multiplications, in floating-point operations. It is very small, and
only makes modules without multiplications spread evenly."""


def costs_of(
    module: nn.Module, items: Items, inputs: Sequence[torch.Tensor]
) -> tuple[list[float], list[object]]:
    """Return the floating-point operations and the output of each module of the chain."""
    costs, outputs = [], []
    value: object = inputs[0] if len(inputs) == 1 else tuple(inputs)
    with modes_kept(module), torch.no_grad(), _plain_operations():
        module.eval()
        for _, item in items:
            with FlopCounterMode(display=False) as counter:
                value = item(value)
            costs.append(counter.get_total_flops() + OPERATION)
            outputs.append(value)
    return costs, outputs


@contextlib.contextmanager
def _plain_operations() -> Iterator[None]:
    """Replace attention and recurrent layers in the block by plain multiplications.

    These can be counted: torch's counter counts fused ones (a transformer layer in evaluation, an
    LSTM) as nothing.
    """
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        with without_fused_layers(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mkldnn.enabled = before


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Divide a sequence into contiguous parts so that the most costly part is as cheap as possible.

    Return the beginning of each part, none of which is empty. Of several such divisions, return one
    whose earlier parts are shorter.
    """
    count, sums = len(costs), [0.0, *itertools.accumulate(costs)]
    best = [[sums[stop] if stop else float("inf") for stop in range(count + 1)]]
    cuts: list[list[int]] = [[0] * (count + 1)]
    for part in range(1, parts):
        row, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for stop in range(part + 1, count + 1):
            for start in range(part, stop):
                cost = max(best[-1][start], sums[stop] - sums[start])
                if cost < row[stop]:
                    row[stop], cut[stop] = cost, start
        best.append(row)
        cuts.append(cut)
    starts, stop = [], count
    for part in reversed(range(parts)):
        stop = cuts[part][stop]
        starts.append(stop)
    return starts[::-1]


def micro_batches(rows: int, accumulate: int, count: int) -> list[tuple[int, int, int]]:
    """Divide the rows of a mini-batch into runs of equal micro-batches.

    Each of the ``accumulate`` parts of a mini-batch becomes ``count`` micro-batches, or fewer if it
    has fewer rows. They are two runs if the rows do not divide evenly. A run is (first row, rows of
    each micro-batch, number of micro-batches).
    """
    parts, found = min(accumulate, rows), list[tuple[int, int, int]]()
    for i in range(parts):
        start, stop = rows * i // parts, rows * (i + 1) // parts
        many = min(count, stop - start)
        each, larger = divmod(stop - start, many)
        if larger:
            found.append((start, each + 1, larger))
        found.append((start + larger * (each + 1), each, many - larger))
    return found


SCHEDULES = ("1f1b", "gpipe")


@known_arguments
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
        yield from names_problems(self, "split", 'names of modules, such as ["3", "6"]')
        for name in ("micro_batches", "stages_per_rank"):
            if not is_whole(value := getattr(self, name), 1):
                yield f"{name}={shown(value)}): give a whole number of at least 1."
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
        from torch.distributed.pipelining.schedules import PipelineScheduleSingle

        known = inspect.signature(PipelineScheduleSingle.step).parameters
        check_torch(self.word, "return_outputs" in known)
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
        """Return this strategy with every cut named: the user's cuts, or those for equal work.

        Work is counted in floating-point operations of the multiplications in a forward pass.
        """
        items, count = chain_of(module, self.split, inputs), mesh.pipe * self.stages_per_rank
        starts = [first_of(items, name) for name in self.split]
        _check_count(self, items, count)
        check_called(module, items, options)
        costs, outputs = costs_of(module, items, inputs)
        if not starts:
            starts = _chosen(costs, outputs, count)
        check_shared(module, items, [0, *starts, len(items)])
        for start in starts:
            for kind in _not_sent(outputs[start - 1]):
                raise ModelError(
                    f'strategy="pipeline" sends tensors from stage to stage, and '
                    f'"{items[start - 1][0]}" puts out a {kind}: cut elsewhere, '
                    "strategy=sparkdl.Pipeline(split=[...]), or let it put out a tensor or a tuple of "
                    "tensors."
                )
        for kind in _not_sent(outputs[-1]):
            raise ModelError(
                f'strategy="pipeline" needs a model that puts out a tensor or a plain tuple of '
                f"tensors, and {type(module).__name__} puts out a {kind}: change that, or use "
                'strategy="fsdp".'
            )
        return replace(self, split=tuple(items[start][0] for start in starts))


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


def bounds_of(strategy: Pipeline, items: Items) -> list[int]:
    """Return the beginnings of the stages, and the end, for the result of :meth:`Pipeline.planned`."""
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
