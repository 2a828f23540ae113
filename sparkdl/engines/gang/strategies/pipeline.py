"""Pipeline parallelism, by torch's pipelining: a rank has some stages, the modules between two cuts.

[Note: a pipeline's mini-batch] As in every engine, each rank has samples, its part of a mini-batch.
The ranks of a pipeline bring theirs together: the inputs on the rank with the first pipeline stage,
the labels on the rank with the last one. There the loss of each micro-batch is weighted by the
samples' part of the global batch, so that the gradients of all micro-batches, and of all copies of
the pipeline, only need to be summed. In validation each rank sends its own batches through the
stages and gets the outputs back.

If layers are split too, the first and the last pipeline stage are on several ranks each. If units
are sharded, they are gathered for each run of equal micro-batches. Pipelines that share shards need
the same number of runs, and try micro-batches of a new size at the same time. A pipeline with fewer
rows continues with rows that have no weight.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from sparkdl.engines.gang.model_group import ModelGroup
from sparkdl.engines.gang.rank_messages import gathered_counts, receive, send
from sparkdl.engines.gang.rank_state import needs_all_losses
from sparkdl.engines.gang.strategies.base import (
    Build,
    GradientSum,
    GradientSync,
    RankPass,
    RankStrategy,
)
from sparkdl.engines.gang.strategies.fsdp import let_go, numbers_of, sum_whole
from sparkdl.engines.gang.strategies.tensor import settle
from sparkdl.model.recipe import LiveReplica
from sparkdl.parallel.base import Mesh
from sparkdl.parallel.pipeline import Pipeline, bounds_of, micro_batches
from sparkdl.parallel.trace import Items, chain_of
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import (
    MiniBatch,
    autocasting,
    buffers_kept,
    evaluating,
    loss_of_output,
    padding_pass,
    to_tensors,
)
from sparkdl.replica.step import Gradients, take_gradients


class StageModule(nn.Module):
    """A sequence of modules of the chain: one pipeline stage.

    ``_copies`` says whether the stage copies its inputs. That is necessary if its first module writes
    to them, as ``nn.ReLU(inplace=True)`` does: an input from another stage is a leaf to torch, and
    leaves must not be written to.
    """

    def __init__(self, items: Items) -> None:
        super().__init__()
        self.chain = nn.ModuleList(item for _, item in items)
        self._live: LiveReplica | None = None
        self._copies = False

    def compute_as(self, live: LiveReplica) -> None:
        """Compute with the precision of the replica ``live``, before the stage is called."""
        self._live = live

    def forward(self, *values: Any) -> Any:
        """Return the output. Several arguments are the tuple that the previous stage has returned."""
        assert self._live is not None
        if self._copies:
            values = tuple(tensor.clone() for tensor in values)
        value = values[0] if len(values) == 1 else values
        with autocasting(self._live):
            for item in self.chain:
                value = item(value)
        return value

    def try_inputs(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the output. If the stage fails, let it copy its inputs from now on and try again."""
        try:
            return self(*inputs)
        except RuntimeError:
            if self._copies:
                raise
        self._copies = True
        return self(*inputs)


@dataclass(frozen=True)
class StagePlacement:
    """The placement of pipeline stages and parameters on ranks."""

    count: int  # stage s is on the ranks with place s % mesh.pipe
    mesh: Mesh
    places: tuple[int, ...]  # of the stage of each segment of the layout

    def stages(self, rank: int) -> range:
        return range(self.mesh.place(rank, "pipe"), self.count, self.mesh.pipe)

    def numbers(self, rank: int) -> frozenset[int]:
        """Return the numbers of the segments in the stages of a rank."""
        place = self.mesh.place(rank, "pipe")
        return frozenset(n for n, p in enumerate(self.places) if p == place)


class StageRelay:
    """The transfer of values through the pipeline stages in turn, for validation and to find shapes.

    If layers are split too, every stage is on several ranks, and values move between ranks with the
    same parts.
    """

    def __init__(
        self,
        placement: StagePlacement,
        stages: Mapping[int, StageModule],
        rank: int,
        group: dist.ProcessGroup | None,
        live: LiveReplica,
    ) -> None:
        mesh = placement.mesh
        self.placement, self.stages, self.rank, self.live = placement, stages, rank, live
        self._group, self._ranks = group, mesh.model_group(rank)
        self.members = mesh.along(rank, "pipe")
        live.flat.module.forward = self._there_and_back

    def scored(
        self,
        counts: Sequence[int],
        score: Callable[[], Any],
        most: int,
        spare: tuple[torch.Tensor, ...],
    ) -> Any:
        result = None
        for member in self._ranks:
            if member == self.rank:
                result = score()
            else:
                with evaluating(self.live.flat.module):
                    for _ in range(counts[member]):
                        self._passed(member, None)
        for _ in range(most - sum(counts[r] for r in self._ranks)):
            with evaluating(self.live.flat.module):
                self._passed(self._ranks[0], spare)
        return result

    def _there_and_back(self, *inputs: Any) -> Any:
        """Return the model's output for this rank's inputs."""
        return self._passed(self.rank, inputs)

    def _passed(self, source: int, value: Any) -> Any:
        """Send a value of rank ``source`` through all stages, and return the output on that rank."""
        mesh, column = self.placement.mesh, self.members
        for head in mesh.along(self._ranks[0], "tensor"):
            value = self.moved(value, source, head)
        before = column[0]
        for number in range(self.placement.count):
            here = column[number % len(column)]
            value = self.moved(value, before, here)
            if self.rank == here:
                value = (self.stages[number](*value),)
            before = here
        value = self.moved(value, mesh.along(source, "pipe")[-1], source)
        return value[0] if self.rank == source else None

    def moved(self, value: Any, source: int, to: int) -> Any:
        """Return the ``value`` of rank ``source`` on rank ``to``; other ranks return their argument."""
        if source == to or self.rank not in (source, to):
            return value
        device = self.live.device
        if self.rank == source:
            send(value, to, self._group, device)
            return value
        return receive(source, self._group, device)


MAX_SCHEDULES = 8
"""The number of schedules, each for a number of rows and of micro-batches, that a rank caches."""
MAX_SHAPES = 64
Shapes: TypeAlias = list[tuple[int, tuple[Any, ...], tuple[Any, ...]]]
"""The number, the inputs and the outputs of each pipeline stage of a rank."""


class Schedules:
    """The schedules for the pipeline stages of this rank."""

    def __init__(
        self,
        relay: StageRelay,
        strategy: Pipeline,
        pipe: dist.ProcessGroup | None,
        like: Sequence[torch.Tensor],
        loss: Callable[[Any, torch.Tensor], torch.Tensor],
    ) -> None:
        self._relay, self._strategy, self._pipe, self._like = relay, strategy, pipe, like
        self._loss = loss
        self._made: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._known: OrderedDict[int, Shapes] = OrderedDict()

    def of(self, each: int, many: int) -> Any:
        """Return torch's schedule for ``many`` micro-batches of ``each`` rows."""
        key = each, many
        if key in self._made:
            self._made.move_to_end(key)
            return self._made[key]
        placement, device = self._relay.placement, self._relay.live.device
        stages = [
            PipelineStage(
                self._relay.stages[number],
                number,
                placement.count,
                device,
                input_args=inputs,
                output_args=outputs,
                group=self._pipe,
            )
            for number, inputs, outputs in self._shapes_of(each)
        ]
        how: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        early = self._strategy.schedule == "1f1b"
        if len(stages) == 1:
            single = Schedule1F1B if early and many >= placement.count else ScheduleGPipe
            made: Any = single(stages[0], many, **how)
        else:
            even = many % max(1, many // placement.mesh.pipe) == 0
            several = ScheduleInterleaved1F1B if early and even else ScheduleLoopedBFS
            made = several(stages, many, **how)  # type: ignore[arg-type]
        self._made[key] = made
        while len(self._made) > MAX_SCHEDULES:
            self._made.popitem(last=False)
        return made

    def prepare(self, sizes: set[int]) -> None:
        """Try micro-batches of these sizes, unless that was done before."""
        for size in sorted(sizes):
            self._shapes_of(size)

    def _shapes_of(self, rows: int) -> Shapes:
        """Return the cached result of :meth:`_shapes`."""
        if rows not in self._known:
            self._known[rows] = self._shapes(rows)
            while len(self._known) > MAX_SHAPES:
                self._known.popitem(last=False)
        return self._known[rows]

    def _shapes(self, rows: int) -> Shapes:
        """Return the number, the inputs and the outputs of each stage of this rank, for this many rows.

        Inputs and outputs are tensors without values. They are found by running the stage, which
        leaves no traces.
        """
        found, relay = [], self._relay
        members = relay.members
        # contiguous, as mini-batches are: some versions of torch compare the strides
        value: Any = tuple(t[:1].expand(rows, *t.shape[1:]).contiguous() for t in self._like)
        with buffers_kept(relay.live.flat.module), seeded(0), torch.enable_grad():
            for number in range(relay.placement.count):
                here = members[number % len(members)]
                if number:
                    value = relay.moved(value, members[(number - 1) % len(members)], here)
                if relay.rank == here:
                    inputs = tuple(map(self._made_up, value)) if number else value
                    outputs = as_tuple(relay.stages[number].try_inputs(inputs))
                    value = tuple((tuple(t.shape), str(t.dtype), t.requires_grad) for t in outputs)
                    found.append((number, _bare(inputs), _bare(outputs)))
        for stage in relay.stages.values():
            let_go(stage)
        return found

    def _made_up(self, known: tuple[tuple[int, ...], str, bool]) -> torch.Tensor:
        shape, dtype, requires_grad = known
        kind = getattr(torch, dtype.removeprefix("torch."))
        tensor = torch.zeros(shape, dtype=kind, device=self._relay.live.device)
        return tensor.requires_grad_(requires_grad)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the output of a stage, one value or a tuple, as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def _bare(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return tensors with the same shapes and dtypes, but without values."""
    return tuple(
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta").requires_grad_(
            t.requires_grad
        )
        for t in tensors
    )


class PipelineSync(GradientSum):
    """Gradients of the stages of a pipeline. See the note above."""

    _model_group: ModelGroup

    def __init__(
        self,
        build: Build,
        stages: Sequence[StageModule],
        placement: StagePlacement,
        strategy: Pipeline,
    ) -> None:
        super().__init__(build, copies=True)
        rank, groups, mesh = build.rank, build.groups, build.mesh
        self._needs_all_losses = needs_all_losses(build.state, build.setup.sums)
        self._strategy, self._placement = strategy, placement
        self._stages = dict(zip(placement.stages(rank), stages, strict=True))
        self._pipe, self._shard = groups.along("pipe"), groups.along("shard")
        self._gathers = self._shard is not None
        together = self._pipe if groups.along("tensor") is None else None  # None: all ranks
        near = build.near_rows()
        self._model_group = ModelGroup(mesh, rank, together, self._live, self._spare, near)
        self._in_turn = StageRelay(placement, self._stages, rank, together, self._live)
        members = self._in_turn.members
        self._heads, self._tails = (mesh.along(members[place], "tensor") for place in (0, -1))
        self._tail = members[-1]
        self._drawing = mesh.along(rank, "tensor")[0]
        self._parts: list[tuple[MiniBatch, float]] = []
        self._scale = 1.0
        self._losses: list[tuple[torch.Tensor, float]] = []
        self._found: float | None = None
        self._schedules = Schedules(
            self._in_turn, strategy, self._pipe, self._spare.inputs, self._loss
        )
        if self._gathers:  # torch sets a unit up at its first call, see ShardedSync
            self._schedules.prepare({len(self._spare)})
            self._keep_pace(1)
            self._live.clear_gradients()

    def compute(self, rank_pass: RankPass) -> tuple[float, str]:
        work, batches, weights, clock = rank_pass
        counts = self._model_group.counts(work, weights)
        # shards are summed over all pipelines, of which others may have rows
        own, self._factor = self._rank in counts, float(bool(counts) or self._gathers)
        self._counted(0.0, weights, 0.0)
        live, scale = self._live, work.step.loss_scale
        live.train()
        live.clear_gradients()
        loss, runs = 0.0, self._runs(sum(counts.values()))
        idle = 0
        if self._gathers:
            mesh = self._placement.mesh
            rows = [b - a if w else 0 for (a, b), w in zip(work.step.rows, weights, strict=True)]
            others = [self._runs(sum(rows[r] for r in group)) for group in mesh.model_groups]
            self._schedules.prepare({each for some in others for _, each, _ in some})
            idle = max(map(len, others)) - len(runs)
        if counts:
            bring, ends = self._model_group, [*self._heads, *self._tails]
            here = bring.here(work, counts, batches[0] if batches else None, ends)
            inputs = bring.inputs(counts, here, self._heads)
            whole = MiniBatch(inputs, *bring.targets(counts, here, self._tails))
            clock.lap("data")
            self._scale, self._losses, self._found = scale / sum(weights), [], None
            with seeded(replace(work, replica=self._drawing).seed()):
                self._flow(whole, runs)
            total = self._model_group.weight(weights)
            of = total if self._found is None else self._found
            loss = sum(float(value) * weight for value, weight in self._losses) / (of or 1.0)
            if self._needs_all_losses:
                loss, of = self._told(loss, of)
            self._counted(of, weights, total)
        self._keep_pace(idle)
        clock.lap("pipeline")
        self._gradients = self._taken(scale)
        if own and not math.isfinite(loss):
            return loss, f"the loss ({loss})"
        name = self.not_finite()
        return loss, f'the gradient of "{name}"' if name else ""

    def _runs(self, rows: int) -> list[tuple[int, int, int]]:
        """See :func:`sparkdl.parallel.pipeline.micro_batches`."""
        accumulate = self._live.recipe.options.accumulate
        return micro_batches(rows, accumulate, self._strategy.micro_batches)

    def _keep_pace(self, times: int) -> None:
        """Run passes without effect: gradients are zero, and buffers stay as they are."""
        if not times:
            return
        rows = len(self._spare)
        nothing = replace(self._spare, weights=torch.zeros(rows, dtype=torch.float64))
        kept = [(p, p.grad) for p in numbers_of(self._live)]
        with seeded(0), buffers_kept(self._live.flat.module), padding_pass():
            self._flow(nothing, [(0, rows, 1)] * times)
        for parameter, gradient in kept:  # what no unit sums: zero times NaN is NaN
            parameter.grad = gradient

    def _flow(self, whole: MiniBatch, runs: Sequence[tuple[int, int, int]]) -> None:
        """Run forward and backward through the pipeline stages."""
        for start, each, many in runs:
            stop = start + each * many
            schedule, arguments = self._schedules.of(each, many), {}
            if self._rank in self._tails:
                self._parts = _parts(whole, start, each, many)
                arguments = {"target": torch.arange(many)}
            first = whole.inputs if self._rank in self._heads else []
            inputs = [tensor[start:stop] for tensor in first]
            with self._adding_up():
                schedule.step(*inputs, return_outputs=False, **arguments)
            self._parts = []

    @contextlib.contextmanager
    def _adding_up(self) -> Iterator[None]:
        """Add up the gradients of several schedules.

        With shards, the first step of a torch schedule drops the gradients that already exist.
        """
        before = [p.grad for _, p in self._live.flat.parameters] if self._gathers else []
        if self._gathers:
            self._live.clear_gradients()
        yield
        for (_, parameter), gradient in zip(self._live.flat.parameters, before, strict=False):
            if gradient is not None:
                more = parameter.grad
                parameter.grad = gradient if more is None else gradient + more

    def _loss(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        """Return the loss of micro-batch ``number``: its mean times its weight in the global batch."""
        part, weight = self._parts[int(number)]
        if not weight:
            return _nothing(output)
        value, count = loss_of_output(self._live, output, part)
        if count is not None:  # see [Note: sums are divided twice]
            self._losses.append((value.detach(), 1.0))
            self._found = count + (self._found or 0.0)
            return value * self._scale
        self._losses.append((value.detach(), weight))
        return value * (weight * self._scale)

    @property
    def loss_rank(self) -> int:
        """Return the rank that reports the loss.

        If the ranks need not agree, no rank waits for the last pipeline stage only to learn the loss.
        """
        return self._rank if self._needs_all_losses else self._tail

    def _told(self, loss: float, count: float) -> tuple[float, float]:
        """Return the loss and its count from the rank with the last pipeline stage."""
        values = torch.tensor([loss, count], dtype=torch.float64)
        dist.broadcast(values, self._tail, self._pipe)
        return float(values[0]), float(values[1])

    def _taken(self, scale: float) -> Gradients:
        """Return the gradients of this rank's pipeline stages."""
        settle(self._live)
        if self._gathers:
            sum_whole(self._live, [self._shard])
        found = take_gradients(self._live).dense
        if scale != 1.0:
            for gradient in found:
                if gradient is not None:
                    gradient.div_(scale)
        return Gradients(found, {})

    def _buffers(self, size: int) -> list[torch.Tensor]:
        """Return the buffers of each rank, those of every pipeline stage from the rank that has it."""
        found, layout = super()._buffers(size), self._live.flat.layout
        if not len(found[0]):
            return found
        columns = {tuple(self._placement.mesh.along(rank, "pipe")) for rank in range(size)}
        for members in sorted(columns):
            whole = torch.empty_like(found[0])
            for number, (segment, end) in enumerate(zip(layout.segments, layout.ends, strict=True)):
                if segment.kind != "parameter":
                    place = slice(segment.start - layout.buffers_start, end - layout.buffers_start)
                    whole[place] = found[members[self._placement.places[number]]][place]
            for member in members:
                found[member] = whole
        return found

    def scored(self, batches: int, score: Callable[[], Any], outputs: bool = False) -> Any:
        """Score on each rank in turn, while that rank's batches pass through the pipeline stages."""
        counts = gathered_counts(batches)
        most = self._placement.mesh.most(counts) if self._gathers else 0
        result = self._in_turn.scored(counts, score, most, tuple(self._spare.inputs))
        for stage in self._stages.values():
            let_go(stage)
        return result


def _parts(whole: MiniBatch, start: int, each: int, many: int) -> list[tuple[MiniBatch, float]]:
    """Split what the last pipeline stage has of a mini-batch into ``many`` parts of ``each`` rows.

    Return the parts, without inputs, and the weight of each.
    """
    stop = start + each * many
    counts = None if whole.masses is None else whole.masses[start:stop]
    if whole.weights is not None:
        weights = whole.weights[start:stop].double().cpu()
        counts = weights if counts is None else counts * weights
    each_weight = [float(each)] * many
    if counts is not None:
        each_weight = counts.view(many, each).sum(1).tolist()
    parts = []
    for weight in each_weight:
        rows = slice(start, start + each)
        own = None if whole.weights is None else whole.weights[rows]
        masses = None if whole.masses is None else whole.masses[rows]
        targets = [target[rows] for target in whole.targets]
        parts.append((MiniBatch([], targets, own, masses), weight))
        start += each
    return parts


def _nothing(output: Any) -> torch.Tensor:
    """Return zero, with a gradient of zero."""
    return sum(tensor.float().sum() for tensor in as_tuple(output)) * 0.0


class PipelineRank(RankStrategy[Pipeline]):
    """A rank with some of the stages of a pipeline, all cuts of which are named."""

    order = 1

    def __init__(self, strategy: Pipeline, build: Build) -> None:
        super().__init__(strategy, build)
        rows = to_tensors(build.spare.inputs)
        self._items = chain_of(build.module, strategy.split, rows)

    def split(self, build: Build) -> None:
        """Make modules of the stages of this rank, and free what other ranks hold."""
        module, items = build.module, self._items
        cuts = list(itertools.pairwise(bounds_of(self._strategy, items)))
        stage_of = {
            id(tensor): stage
            for stage, (start, stop) in enumerate(cuts)
            for _, item in items[start:stop]
            for tensor in itertools.chain(item.parameters(), item.buffers())
        }
        tensors = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
        stages_of = [stage_of.get(id(tensors[each.name]), 0) for each in build.whole.segments]
        places = tuple(stage % build.mesh.pipe for stage in stages_of)
        self._placement = StagePlacement(len(cuts), build.mesh, places)
        mine = self._placement.stages(build.rank)
        for owner, name, parameter in _parameters(module):
            if stage_of.get(id(parameter), 0) not in mine:  # the first has what is never called
                _empty(owner, name, parameter)
        self._stages = [StageModule(items[slice(*cuts[stage])]) for stage in mine]
        build.outermost, build.numbers = [*self._stages], self._placement.numbers

    def finish(self, build: Build) -> None:
        for stage in self._stages:
            stage.compute_as(build.live)

    def gradients(self, build: Build) -> GradientSync:
        return PipelineSync(build, self._stages, self._placement, self._strategy)


def _parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield every parameter with each module and name that it has."""
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            yield child, name, parameter


def _empty(owner: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Remove the values of a parameter, but keep its name and kind."""
    nothing = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype)
    if hasattr(parameter, "to_local"):  # a DTensor, whose data cannot become a plain tensor
        setattr(owner, name, nn.Parameter(nothing, parameter.requires_grad))
    else:
        parameter.data = nothing
