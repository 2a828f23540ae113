"""Strategies of a gang, on the ranks: what each does to the model and to the sum of gradients.

See [Note: the two halves of a strategy] in :mod:`sparkdl.parallel.base`.

:func:`build_rank` makes a rank's state and its gradient exchange from the strategies of the run.

The common part of all strategies in which torch sums the gradients of the ranks.
"""

from __future__ import annotations

import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from sparkdl.codec.packed import ByParameter
from sparkdl.collectives import direct
from sparkdl.data.batches import Batch
from sparkdl.engines.gang.model_group import (
    BuildLock,
    MeshGroups,
    ModelGroup,
    NodeLocalRows,
    synchronise,
)
from sparkdl.engines.gang.rank_messages import RankConfig, SampleLocation, gathered_counts
from sparkdl.engines.gang.rank_state import RankState
from sparkdl.engines.gang.shards import RowsOf, ShardedState, ShardSpec, nested_shards, spans_of
from sparkdl.gang.rank_task import RankContext
from sparkdl.model.flat import FlatModule, Layout, layout_of
from sparkdl.model.loss import is_step
from sparkdl.model.recipe import LiveReplica, Recipe
from sparkdl.parallel.base import Mesh, ParallelStrategy
from sparkdl.parallel.plan import ParallelPlan
from sparkdl.process.memory import keep_heap, memory_given_back
from sparkdl.replica.compute import (
    Losses,
    MiniBatch,
    Passed,
    Spare,
    forward_backward,
    idle,
    padding_pass,
    passes_together,
)
from sparkdl.replica.iteration import Clock
from sparkdl.replica.step import Gradients, ReplicaIteration, take_gradients, to_mini_batch
from sparkdl.slab.root import open_root
from sparkdl.slices.section import NOTHING, SPARE, Section, sums_up
from sparkdl.slices.spec import SliceSpec


class RankPass(NamedTuple):
    """The part of a rank in an iteration."""

    work: ReplicaIteration
    batches: Sequence[MiniBatch]  # at most one for each step that the rank takes; none without rows
    weights: Sequence[float]  # of each rank's rows
    clock: Clock


class GradientSync(ABC):
    """The work of rank ``rank`` on the gradients of an iteration.

    Attributes:
        kept: The tensors that the rank keeps for the next iteration, by parameter number: what
            compression has left out of the gradients so far, or the state of its own optimizer.
            None if there are none.
        count: The weight of the rank's rows in the last pass. For a loss that returns ``(sum,
            count)`` it is known only after the pass.
        losses: Sum and count of each named loss of a step, in the rank's rows of the last pass.
        steps: The number of mini-batches into which the rows of an iteration are divided, one for
            each step that the rank takes by itself.
        ends_before_report: Whether the report of the rank needs the end of the update. If not, the
            driver prepares the next iteration meanwhile.
    """

    steps: int = 1
    ends_before_report: bool = False

    def __init__(self, rank: int) -> None:
        self._rank, self.count = rank, 0.0
        self._kept: ByParameter | None = None
        self.losses: Losses = {}

    @property
    def kept(self) -> ByParameter | None:
        return self._kept

    def place_kept(self, kept: ByParameter | None) -> None:
        """Continue with what a rank had kept."""
        self._kept = kept

    @abstractmethod
    def compute(self, rank_pass: RankPass) -> tuple[float, str]:
        """Run forward and backward on the rows of ``rank_pass``.

        Returns:
            The loss, and a description of what is not finite, or "".
        """

    @abstractmethod
    def sections(
        self, rows: Sequence[tuple[int, int]], weights: Sequence[float]
    ) -> dict[int, list[Section]]:
        """Return the sections from which each of this rank's slices is updated, by slice index.

        A slice that is not among them stays as it is.

        Args:
            rows: The rows of each rank.
            weights: The final weight of each rank's rows.
        """

    def committed(self) -> None:
        """Note that the iteration was committed, for what is kept for the next one."""
        return

    def settle(self) -> None:
        """Prepare the state for being read. All ranks call this at the same time."""
        return

    @property
    def loss_rank(self) -> int:
        """Return the rank that knows the loss of this rank's samples."""
        return self._rank

    def scored(self, batches: int, score: Callable[[], Any], outputs: bool = False) -> Any:
        """Return the result of ``score`` for this rank's ``batches`` of the validation samples.

        ``outputs`` says that after a step ``score`` also runs the model itself, for metrics.
        """
        return score()


@dataclass(kw_only=True)
class Build:
    """The parts of a rank, from the recipe to its state, which the strategies assemble in turn.

    What comes after ``state`` is there only if the model is split.
    """

    setup: RankConfig
    samples: Sequence[SampleLocation]  # of all ranks; empty if the model is not split
    member: RankContext
    rank: int = field(init=False)
    device: torch.device = field(init=False)
    parallel: ParallelPlan = field(init=False)
    mesh: Mesh = field(init=False)
    spare: Batch = field(init=False)
    live: LiveReplica = field(init=False)
    state: RankState = field(init=False)
    groups: MeshGroups = field(init=False)
    lock: BuildLock = field(init=False)  # nothing may be sent before it is released
    recipe: Recipe = field(init=False)  # without weights
    module: nn.Module = field(init=False)  # split in place
    whole: Layout = field(init=False)
    outermost: list[nn.Module] = field(init=False)
    home: torch.device = field(init=False)
    numbers: Callable[[int], frozenset[int]] = field(init=False)
    row_dimensions: tuple[str, ...] = field(init=False)  # of the mesh, the outermost first
    shards: ShardSpec = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.device = self.member.rank, self.member.device
        self.parallel, self.spare = self.setup.parallel, self.setup.spare
        self.mesh = self.parallel.mesh

    @property
    def plans(self) -> list[SliceSpec]:
        """Return the slices that this rank updates."""
        return [owner.plan for owner in self.state.owners.values()]

    def rows(self, rank: int) -> RowsOf:
        """Return the rows that a rank has of the parameters in ``numbers``."""
        sizes, place = self.mesh.sizes, self.mesh.place
        return nested_shards([(sizes[name], place(rank, name)) for name in self.row_dimensions])

    def near_rows(self) -> NodeLocalRows:
        """Return the rows of other ranks of the model-parallel group that this rank can read."""
        group, run = self.mesh.model_group(self.rank), self.setup.run
        return NodeLocalRows(self.samples, self.rank, group, run, self.live)

    def model_group(self) -> ModelGroup:
        """Return the model-parallel group of a rank without pipeline stages."""
        like, near = to_mini_batch(self.spare, self.live, training=False), self.near_rows()
        group = self.groups.along("tensor")
        return ModelGroup(self.mesh, self.rank, group, self.live, like, near)


S = TypeVar("S", bound=ParallelStrategy)


class RankStrategy(Generic[S]):
    """The half of a strategy that works on a rank.

    It is made when the module is built, and whole if it is to be split. Only if it is split, then
    follow :meth:`split` and :meth:`finish`, of all strategies in their ``order``. At last the
    outermost strategy that sums gradients says how.

    Attributes:
        order: The position of the strategy among those that split a model.
        splits_rows: Whether it leaves a rank some rows of each parameter.
    """

    order: ClassVar[int] = 0
    splits_rows: ClassVar[bool] = False

    def __init__(self, strategy: S, build: Build) -> None:
        self._strategy = strategy

    def split(self, build: Build) -> None:
        """Split ``build.module``, or what earlier strategies have left of it, in place."""

    def finish(self, build: Build) -> None:
        """Go on with the replica ``build.live``, and complete ``build.shards``."""

    def gradients(self, build: Build) -> GradientSync | None:
        """Return how the ranks sum their gradients, or None to leave that to an inner strategy."""
        return None


def rank_half(strategy: ParallelStrategy) -> type[RankStrategy[Any]]:
    """Return the class that a strategy names as its half on the ranks."""
    found: type[RankStrategy[Any]] = pkgutil.resolve_name(strategy.rank_half)
    return found


def build_rank(
    load: Callable[[], Recipe],
    setup: RankConfig,
    samples: Sequence[SampleLocation],
    member: RankContext,
) -> tuple[RankState, GradientSync]:
    """Build the replica; return the state that this rank holds and the exchange of its gradients.

    Raises ModelError if the layers cannot be split as the plan says, and SessionError if a model
    that is split so cannot run on these devices.
    """
    keep_heap()
    build = Build(setup=setup, samples=samples, member=member)
    halves = _split(build, load) if setup.parallel.splits_model else _replicate(build, load)
    found = (halves[dimension].gradients(build) for dimension in setup.parallel.parts)
    return build.state, next(sync for sync in found if sync is not None)


def _halves(build: Build) -> dict[str, RankStrategy[Any]]:
    """Return this half of each strategy, by dimension, in the order in which they split the model."""
    pairs = [(rank_half(part), part) for part in build.parallel.parts.values()]
    pairs.sort(key=lambda pair: pair[0].order)
    return {part.dimension: half(part, build) for half, part in pairs}


def _replicate(build: Build, load: Callable[[], Recipe]) -> dict[str, RankStrategy[Any]]:
    """Build the whole model on this rank."""
    recipe = load()
    build.live = LiveReplica.of(recipe, build.device)
    if recipe.options.sync_batchnorm:
        synchronise(build.live.flat.module)
    build.state = RankState(build.live, build.setup.run, build.rank)
    return _halves(build)


def _split(build: Build, load: Callable[[], Recipe]) -> dict[str, RankStrategy[Any]]:
    """Build the model, one rank of a node at a time, and keep what the strategies leave this rank."""
    run, device = build.setup.run, build.device
    build.groups = MeshGroups(build.parallel, device)
    root = open_root(run.slab)
    assert root is not None
    with memory_given_back(), BuildLock(root.directories[-1]) as build.lock:
        recipe = load()
        build.module = recipe.build()
        build.recipe = recipe = recipe.without_weights()  # the module has them
        whole = build.whole = layout_of(build.module, recipe.options.buffers)
        every = frozenset(range(len(whole.segments)))
        build.outermost, build.home, build.numbers = [build.module], device, lambda rank: every
        halves = _halves(build)
        for half in halves.values():
            half.split(build)
        flat = FlatModule(build.module, build.home, recipe.options.buffers)
        if build.home != device:  # of the parameters alone
            for owner in build.module.modules():
                for name, buffer in owner._buffers.items():
                    owner._buffers[name] = None if buffer is None else buffer.to(device)
        build.live = LiveReplica.around(recipe, flat, device)
    build.row_dimensions = tuple(d for d in build.parallel.parts if halves[d].splits_rows)
    build.shards = ShardSpec(
        build.live,
        whole,
        build.mesh,
        lambda rank: spans_of(whole, build.rows(rank), build.numbers(rank)),
    )
    for half in halves.values():
        half.finish(build)
    build.state = ShardedState(build.shards, run, build.rank)
    return halves


class GradientVector:
    """A vector of the dense gradients, each at the position of its parameter in the flat vector.

    Its memory is allocated once, and the gaps between gradients are zero. Behind the gradients
    there is a count for each parameter: the number of ranks that had a gradient for it, if
    :meth:`count` is used.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        count, size = sum(s.kind == "parameter" for s in layout.segments), layout.buffers_start
        self._memory = torch.zeros(size + count, dtype=layout.dtype, device=device)
        self.vector, self._counts = self._memory[:size], self._memory[size:]
        self._places = [
            self.vector[s.start : s.stop].view(s.shape)
            for s in layout.segments
            if s.kind == "parameter"
        ]

    def filled(self, dense: Sequence[torch.Tensor | None], factor: float = 1.0) -> torch.Tensor:
        """Fill the vector with gradients, by parameter number, times ``factor``.

        Where there is no gradient, the vector is zero.
        """
        for place, gradient in zip(self._places, dense, strict=True):
            if gradient is None or not factor:  # ignore the gradients of spare rows
                place.zero_()
            elif factor == 1.0:
                place.copy_(gradient)
            else:
                torch.mul(gradient.to(place.dtype), factor, out=place)
        return self.vector

    def count(self, dense: Sequence[torch.Tensor | None]) -> None:
        """Record which gradients exist, for the next sum."""
        self._counts.copy_(torch.tensor([float(gradient is not None) for gradient in dense]))

    def sum(self, wire: torch.dtype | None, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Sum over the ranks of ``group``, in the dtype ``wire``."""
        memory = self._memory
        sent = memory if wire in (None, memory.dtype) else memory.to(wire)
        direct.all_reduce(sent, group)
        if sent is not memory:
            memory.copy_(sent)
        return self.vector

    @property
    def absent(self) -> frozenset[int]:
        """Return the parameters for which no rank had a gradient."""
        return frozenset(n for n, count in enumerate(self._counts.tolist()) if not count)


class GradientSum(GradientSync):
    """The work of a rank on the gradients of an iteration, if torch sums them."""

    _model_group: ModelGroup | None = None
    """The model-parallel group of this rank, if it has one."""
    _group: dist.ProcessGroup | None = None
    """The ranks over which gradients are summed after the pass; None: all."""
    _sums = True
    """False if the pass leaves gradients that are sums already."""
    _factor = 1.0
    """The factor for the gradients after the pass. 0: ignore them, they are those of spare rows."""

    def __init__(self, build: Build, copies: bool = False) -> None:
        """Create the gradient vector and prepare the spare rows.

        A rank without rows takes part in the sums with these, with a weight of 0. ``copies`` says
        that gradients are summed over the copies of a split model.
        """
        if copies:
            self._group = build.groups.along("data")
            self._sums = self._group is not None
        super().__init__(build.rank)
        live = self._live = build.live
        self._plans = build.plans
        rows = to_mini_batch(build.spare, live, training=False)
        self._spare = Spare(rows.inputs, rows.targets)
        self._vector = GradientVector(live.flat.layout, live.flat.flat.device)
        self._gradients, self._total = Gradients([], {}), 0.0

    def _counted(self, count: float, weights: Sequence[float], own: float) -> None:
        """Set the count of this rank from ``count``, which the pass found for all rows of its group.

        ``own`` is the weight of these rows, of which each rank gets its share.
        """
        self._total = sum(weights)
        self.count = count * (weights[self._rank] / own) if own else 0.0

    def sections(
        self, rows: Sequence[tuple[int, int]], weights: Sequence[float]
    ) -> dict[int, list[Section]]:
        """Return the sections from which each of this rank's slices is updated, by slice index.

        The first replica's section has the sum of all gradients. Each section has the buffers of
        its replica.
        """
        layout = self._live.flat.layout
        flat, absent = self.summed()
        found, known = sum(weights), self._total
        if found and found != known:  # see [Note: sums are divided twice]
            flat.mul_(known / found)
        if any(weights):
            buffers = self._buffers(len(weights))
        else:  # no rows have weight, so the effect of spare rows on the buffers is dropped
            buffers = [self._live.flat.flat[layout.buffers_start :]] * len(weights)
            absent = frozenset(range(len(self._live.flat.parameters)))
        self._gradients = Gradients([], {})
        taking_part = [r for r, (start, stop) in enumerate(rows) if stop > start]
        groups = [] if self._model_group is None else self._model_group.all
        repeats = {r for group in groups for r in [r for r in group if weights[r]][1:]}
        sections: dict[int, list[Section]] = {}
        for plan in self._plans:
            low = plan.start + plan.buffers_start - layout.buffers_start
            high = plan.stop - layout.buffers_start
            whole = flat[plan.start : plan.start + plan.dense_length]
            sections[plan.index] = [
                Section(
                    r,
                    weights[r],
                    whole if r == taking_part[0] else whole[:0],
                    buffers[r][low : max(low, high)],
                    absent,
                    kind=SPARE if r == taking_part[0] else NOTHING,
                    repeats=r in repeats,
                )
                for r in taking_part
            ]
        return sections

    def not_finite(self) -> str:
        """Return the name of a parameter whose gradient on this rank cannot be summed, or "".

        This puts the gradients into the vector.
        """
        if not self._factor:
            self._gradients = Gradients([None] * len(self._live.flat.parameters), {})
        dense, wire, ranks = self._gradients.dense, None, 1
        flat = self._vector.filled(dense, self._factor)
        if self._sums:
            self._vector.count(dense)
            wire, ranks = self._live.recipe.options.wire_dtype, dist.get_world_size(self._group)
        if can_be_summed(flat if wire is None else flat.to(wire), ranks):
            return ""
        return first_not_finite(self._live, self._gradients, self._factor, wire, ranks)

    def summed(self) -> tuple[torch.Tensor, frozenset[int]]:
        """Return the summed gradients in one vector, and the parameters without one.

        The gradients that are kept separately may be freed by this.
        """
        if not self._sums:
            return self._vector.vector, self._gradients.absent
        flat = self._vector.sum(self._live.recipe.options.wire_dtype, self._group)
        return flat, self._vector.absent

    def _buffers(self, size: int) -> list[torch.Tensor]:
        """Return the buffers of every rank, as they lie at the end of a flat vector."""
        layout = self._live.flat.layout
        if layout.buffers_start == layout.size:
            return [self._vector.vector[:0]] * size
        own = self._live.flat.buffers()
        found = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(found, own)
        return found


class SummedGradients(GradientSum):
    """The sum of the gradients of one pass."""

    _gathers = False
    """True if all ranks must call the model equally often."""

    def compute(self, rank_pass: RankPass) -> tuple[float, str]:
        work, batches, weights, clock = rank_pass
        own, total, tells = weights[self._rank], sum(weights), bool(weights[self._rank])
        batch = batches[0] if batches else None
        if self._model_group is not None and len(self._model_group.ranks) > 1:
            batch = self._model_group.together(work, weights, batch)
            work, own = self._model_group.as_one(work), self._model_group.weight(weights)
            clock.lap("data")
        self._factor = float(bool(own))
        rows = batch if own else self._in_statistics(batch, total)
        batch = rows or self._spare
        steps = is_step(self._live.loss)
        with (
            padding_pass(rows is None),
            passes_together(steps and self._live.recipe.options.accumulate == 1),
        ):
            loss, count, losses = self.run_pass(work, batch, own / total if total else 0.0, clock)
        self._counted(count, weights, own)
        part = weights[self._rank] / own if own else 0.0
        self.losses = {name: (s * part, c * part) for name, (s, c) in losses.items() if tells}
        self._gradients = take_gradients(self._live)
        if tells and not math.isfinite(loss):
            return loss, f"the loss ({loss})"
        name = self.not_finite()
        return loss if tells else 0.0, f'the gradient of "{name}"' if name else ""

    def _in_statistics(self, batch: MiniBatch | None, total: float) -> MiniBatch | None:
        """Return rows that have no weight, and count in a batch norm over all ranks like any others."""
        if batch is None or not total or not self._live.recipe.options.sync_batchnorm:
            return None
        return Spare(batch.inputs, batch.targets)

    def run_pass(
        self, work: ReplicaIteration, batch: MiniBatch, share: float, clock: Clock, parts: int = 0
    ) -> Passed:
        """Run forward and backward, with the loss multiplied by ``share``."""
        seed, scale, live = work.seed(), work.step.loss_scale, self._live
        return forward_backward(live, batch, seed, scale, clock, None, share, parts, by_rows=True)

    def scored(self, batches: int, score: Callable[[], Any], outputs: bool = False) -> Any:
        if self._model_group is None:
            return score()
        counts = gathered_counts(batches)
        most = self._model_group.most(counts) if self._gathers else 0
        return self._model_group.scored(counts, score, most, outputs)


def factors(live: LiveReplica, share: float) -> tuple[float, float]:
    """Return the factors for the loss before backward and for the gradients after it.

    Together they give the gradients a rank's ``share``. The loss gets it if gradients are exchanged
    within the pass, as in batch norm over the ranks, or where a step has the rows of all ranks. Then
    rows without weight have gradients too, through the statistics.
    """
    if live.recipe.options.sync_batchnorm or is_step(live.loss):
        return share, 0.0 if idle() else 1.0
    return 1.0, share


def first_not_finite(
    live: LiveReplica,
    gradients: Gradients,
    factor: float = 1.0,
    wire: torch.dtype | None = None,
    ranks: int = 1,
) -> str:
    """Return the first parameter on this rank whose gradient cannot be summed, or "".

    See :func:`can_be_summed`.
    """
    for (segment, _), gradient in zip(live.flat.parameters, gradients.dense, strict=True):
        if gradient is None:
            continue
        sent = gradient.to(live.flat.layout.dtype)
        sent = sent if factor == 1.0 else sent * factor
        if not can_be_summed(sent if wire is None else sent.to(wire), ranks):
            return segment.name
    return ""


def can_be_summed(sent: torch.Tensor, ranks: int) -> bool:
    """Return whether the values that a rank sends, and their sum over ``ranks``, are finite.

    This assumes that the other ranks send no larger values. Sums in float16 overflow at 65,504.
    """
    return sums_up(_most(sent, ranks)) or bool(all_finite(sent, ranks))


def all_finite(sent: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the same as :func:`can_be_summed`, as a boolean tensor on the device of ``sent``."""
    return torch.isfinite(_most(sent, ranks)).all()


def _most(sent: torch.Tensor, ranks: int) -> torch.Tensor:
    return sent * ranks if sent.dtype == torch.float16 else sent
