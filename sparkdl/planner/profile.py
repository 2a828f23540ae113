"""The profile of a model: seconds of a pass by its rows, of its blocks and of an update, and its bytes.

[Note: two clocks] Everything is timed as a pair: by the clock, and as processor time. On a CPU with one
thread the formulas use processor time, which is the clock's where nothing disturbs. Where a pass takes
:data:`BUSY` times its processor time the machine is busy, and plans say so.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import pickle
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from sparkdl.data.batches import BatchSpec, fields_to_batch
from sparkdl.data.ragged import Rows
from sparkdl.errors import ModelError
from sparkdl.model.recipe import LiveReplica, Recipe
from sparkdl.parallel.pipeline import balanced, costs_of
from sparkdl.parallel.trace import chain_of
from sparkdl.process.determinism import seeded, torch_threads
from sparkdl.replica.compute import forward_backward
from sparkdl.replica.iteration import Clock
from sparkdl.replica.step import take_gradients, to_mini_batch
from sparkdl.slices.optimizer import OptimizerSpec
from sparkdl.slices.optimizer_step import step_slice
from sparkdl.slices.spec import SliceState, slice_specs

BUSY = 1.3
"""The ratio of the clock to processor time from which a machine counts as busy."""
MOST_TIMES, WORK_SECONDS = 20, 0.6
"""The most repetitions of a piece of work, and about the seconds for them."""


class Timed(NamedTuple):
    """Seconds by the clock and of the processor."""

    clock: float
    processor: float


def timed(work: Callable[[], object], seconds: float = WORK_SECONDS) -> Timed:
    """Return the median times of ``work``, after it was done once."""
    work()
    end, clocks, processors = time.perf_counter() + seconds, list[float](), list[float]()
    while len(clocks) < 3 or (len(clocks) < MOST_TIMES and time.perf_counter() < end):
        began, spent = time.perf_counter(), time.process_time()
        work()
        clocks.append(time.perf_counter() - began)
        processors.append(time.process_time() - spent)
    return Timed(statistics.median(clocks), statistics.median(processors))


@dataclass(frozen=True)
class Line:
    """Seconds as a line over the rows of a pass, and their spread among the ranks."""

    fixed: float
    each: float
    spread: float = 0.0

    def __call__(self, rows: float) -> float:
        return self.fixed + self.each * rows

    @staticmethod
    def through(points: Sequence[tuple[float, float]], spread: float = 0.0) -> Line:
        """Return the line through two measurements, or through the origin and one."""
        (few, short), (many, long) = points[0], points[-1]
        each = (long - short) / (many - few) if many > few else short / max(1.0, few)
        if each <= 0 or short < each * few:  # noise: a pass is not faster with more rows
            return Line(0.0, long / many, spread)
        return Line(short - each * few, each, spread)


@dataclass(frozen=True)
class Block:
    """A module of a chain: its share of a pass, its operations, and the bytes of its output a row."""

    name: str
    share: float
    operations: float
    output: float


@dataclass(frozen=True)
class Profile:
    """The costs of a fit's model on one slot."""

    line: Line  # a whole pass, forward and backward
    update: float  # of all parameters
    nbytes: int  # of the parameters
    tensors: int
    state: float  # numbers of optimizer state a parameter
    kept: float  # bytes that a pass keeps for backward, a row
    blocks: tuple[Block, ...] = ()  # (): no chain
    without_gradient: frozenset[str] = frozenset()
    busy: float = 1.0  # the clock's time of a pass by its processor time
    device: str = "cpu"
    key: str = ""

    @property
    def output(self) -> float:
        """The largest output between two blocks, in bytes a row."""
        return max((block.output for block in self.blocks[:-1]), default=0.0)

    def stages(self, count: int) -> list[float]:
        """Return the share of a pass of each stage of a pipeline, cut as the engine cuts."""
        if len(self.blocks) < count:
            return [1 / count] * count
        starts = balanced([block.operations for block in self.blocks], count)
        ends = [*starts[1:], len(self.blocks)]
        return [
            sum(block.share for block in self.blocks[a:b])
            for a, b in zip(starts, ends, strict=True)
        ]


@dataclass(frozen=True)
class ProfileOrder:
    """The command that measures a model on a rank, alone or with all others at once."""

    payload: bytes
    batch_spec: BatchSpec
    rows: list[Rows]
    sizes: tuple[int, ...]  # of passes, ascending
    threads: int

    def batch(self, size: int) -> list[Rows]:
        """Return ``size`` rows, the given ones again and again."""
        return [rows[np.arange(size) % len(rows)] for rows in self.rows]

    def key(self) -> str:
        """Return a digest of what the profile depends on."""
        shapes = [(str(rows.dtype), _shape_of(rows)) for rows in self.rows]
        layout = repr((shapes, self.sizes, self.threads)).encode()
        return hashlib.sha256(self.payload + layout).hexdigest()[:16]

    def measure(self, device: torch.device) -> dict[str, Any]:
        """Return the times of passes by size, of an update and of blocks, and bytes."""
        recipe: Recipe = pickle.loads(self.payload)
        with torch_threads(self.threads), seeded(recipe.seed):
            live = LiveReplica.of(recipe, device)
            passes = {size: timed(self._pass(live, size)) for size in self.sizes}
            with _bytes_kept() as kept:
                self._pass(live, self.sizes[0])()
            gradients = take_gradients(live)
            absent = [live.flat.parameters[n][0].name for n in sorted(gradients.absent)]
            layout = live.flat.layout
            parameters = [s for s in layout.segments if s.kind == "parameter"]
            update, state = _update(recipe, live, gradients.absent)
            return {
                "passes": passes,
                "update": update,
                "state": state,
                "nbytes": sum(s.length for s in parameters) * layout.dtype.itemsize,
                "tensors": len(parameters),
                "kept": kept[0] / self.sizes[0],
                "blocks": self._blocks(live),
                "without": absent,
                "device": device.type,
            }

    def _pass(self, live: LiveReplica, size: int) -> Callable[[], None]:
        rows = self.batch(size)

        def run() -> None:
            batch = to_mini_batch(fields_to_batch(self.batch_spec, rows), live)
            forward_backward(live, batch, 0, 1.0, Clock())
            if live.device.type == "cuda":
                torch.cuda.synchronize(live.device)

        return run

    def _blocks(self, live: LiveReplica) -> list[Block]:
        """Return the blocks of a chain with their shares of a pass; [] for another model."""
        module, size = live.flat.module, self.sizes[0]
        inputs = to_mini_batch(fields_to_batch(self.batch_spec, self.batch(size)), live).inputs
        try:
            items = chain_of(module, (), inputs)
            operations, outputs = costs_of(module, items, inputs)
        except (ModelError, RuntimeError, TypeError):
            return []
        value: object = inputs[0] if len(inputs) == 1 else tuple(inputs)
        seconds = []
        for (_, item), output in zip(items, outputs, strict=True):
            seconds.append(_seconds_of_block(item, value))
            value = output
        total = sum(seconds) or 1.0
        return [
            Block(name, spent / total, cost, sum(t.nbytes for t in _tensors(output)) / size)
            for (name, _), spent, cost, output in zip(
                items, seconds, operations, outputs, strict=True
            )
        ]


def _shape_of(rows: Rows) -> tuple[int, ...]:
    return rows.shape[1:] if isinstance(rows, np.ndarray) else (int(rows.lengths.max()),)


def _seconds_of_block(item: nn.Module, value: object) -> float:
    """Return the processor time of a block's forward and backward."""

    def run() -> None:
        # the end of a graph, as it is in the middle of a model
        taken = tree_map_only(
            torch.Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), value
        )
        leaves = [tensor for tensor in _tensors(item(taken)) if tensor.requires_grad]
        if leaves:
            torch.autograd.backward(leaves, [torch.ones_like(tensor) for tensor in leaves])

    try:
        return timed(run, WORK_SECONDS / 4).processor
    finally:
        for parameter in item.parameters():
            parameter.grad = None


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _update(recipe: Recipe, live: LiveReplica, absent: frozenset[int]) -> tuple[Timed, float]:
    """Return the times of an optimizer step, and the numbers that it keeps of a parameter."""
    parameters = [parameter for _, parameter in live.flat.parameters]
    optimizer = OptimizerSpec.of(recipe, parameters, live.flat.module)
    (plan,) = slice_specs(live.flat.layout, 1)
    state = SliceState(live.flat.flat.clone())
    gradient = torch.zeros(
        plan.trainable_length, dtype=live.flat.layout.dtype, device=live.flat.flat.device
    )
    loss = torch.zeros((), dtype=live.flat.layout.dtype)

    def run() -> None:
        step_slice(plan, state, gradient, absent, optimizer, None, loss=loss)

    with torch.no_grad():
        times = timed(run)
    return times, sum(a.numel() for a in state.arrays.values()) / max(1, plan.trainable_length)


@contextlib.contextmanager
def _bytes_kept() -> Iterator[list[int]]:
    """Count the bytes of the tensors that passes in the block keep for backward, each once."""
    seen, count = set[int](), [0]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            count[0] += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield count


def profile_of(measured: Sequence[dict[str, Any]], order: ProfileOrder) -> Profile:
    """Return the profile that the ranks have measured, all at once."""
    alone = order.threads == 1 and measured[0]["device"] == "cpu"

    def mean(times: Sequence[Timed]) -> float:
        return statistics.fmean(one.processor if alone else one.clock for one in times)

    last = [found["passes"][order.sizes[-1]] for found in measured]
    seconds = [one.processor if alone else one.clock for one in last]
    spread = statistics.pstdev(seconds) / statistics.fmean(seconds) if len(seconds) > 1 else 0.0
    points = [
        (float(size), mean([found["passes"][size] for found in measured])) for size in order.sizes
    ]
    first = measured[0]
    ratios = [one.clock / max(one.processor, 1e-9) for one in last]
    return Profile(
        line=Line.through(points, min(spread, 0.1)),
        update=mean([found["update"] for found in measured]),
        nbytes=first["nbytes"],
        tensors=first["tensors"],
        state=first["state"],
        kept=first["kept"],
        blocks=tuple(first["blocks"]),
        without_gradient=frozenset(first["without"]),
        busy=statistics.median(ratios) if alone else 1.0,
        device=first["device"],
        key=order.key(),
    )


def scaled(profile: Profile, factor: float) -> Profile:
    """Return the profile of a slot on which everything takes ``factor`` times as long."""
    line = replace(profile.line, fixed=profile.line.fixed * factor, each=profile.line.each * factor)
    return replace(profile, line=line, update=profile.update * factor)


def spread_factor(spread: float, ranks: int) -> float:
    """Return by how much the slowest of some ranks takes longer than the mean one."""
    return 1.0 + spread * math.sqrt(2.0 * math.log(ranks)) if ranks > 1 else 1.0
