"""What a run must equal: plain PyTorch in one process, on the same global batches.

:func:`reference` trains one module on each global batch as a whole. :func:`simulate` trains M
copies on their parts, for what depends on the cut by its nature (batch norm, dropout, counters).
:func:`observe` runs the trainer and notes the flat vector after every iteration.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch
from pyspark.sql import DataFrame, SparkSession
from torch import nn

import sparkdl
import sparkdl.train.place_samples as placing_module
from sparkdl.data.epoch import EpochPlan, derive_seed, permutation
from sparkdl.data.partition_reader import close_partitions, open_partition
from sparkdl.data.sample_set import SampleSet
from sparkdl.data.samples import Source, materialize_here
from sparkdl.engines.local.engine import LocalEngine
from sparkdl.engines.shuffle.engine import ShuffleEngine
from sparkdl.model.layout import Layout, layout_of
from sparkdl.model.loss import call_loss
from sparkdl.model.recipe import Recipe
from sparkdl.process.determinism import seeded
from sparkdl.replica.mini_batch import to_tensors
from sparkdl.slab.root import SlabConfig, remove_root

ITERATIONS = 10
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}

Tensors = dict[str, torch.Tensor]
Batch = tuple[list[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True)
class Dataset:
    """A DataFrame whose partitions are the replicas', and its rows as the replicas number them."""

    df: DataFrame
    samples: SampleSet
    rows: tuple[list[np.ndarray] | None, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return self.samples.counts


class Datasets:
    """DataFrames with chosen partitions, each made and read once."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._made: dict[object, Dataset] = {}
        self._slabs: list[SlabConfig] = []

    def get(
        self,
        sizes: tuple[int, ...],
        make_row: Callable[[np.random.Generator], tuple],
        schema: str,
        features: tuple[str, ...] = ("features",),
        label: tuple[str, ...] = ("label",),
        float_dtype: str = "float32",
    ) -> Dataset:
        """``sizes``: rows of each partition."""
        key = (sizes, make_row, schema, features, label, float_dtype)
        if key not in self._made:
            generator = np.random.default_rng(sum(sizes) + len(sizes))
            parts = [[make_row(generator) for _ in range(size)] for size in sizes]
            context = self._spark.sparkContext
            df = self._spark.createDataFrame(
                context.parallelize(parts, len(parts)).flatMap(list), schema
            )
            slab = SlabConfig.new("auto", context.applicationId)
            self._slabs.append(slab)
            source = Source(df, features, label, len(sizes), float_dtype, slab)
            samples = materialize_here(source)
            assert samples.counts == sizes
            rows = tuple(
                open_partition(h).gather(np.arange(h.num_rows)) if h.num_rows else None
                for h in samples.handles
            )
            self._made[key] = Dataset(df, samples, rows)
        return self._made[key]

    def close(self) -> None:
        close_partitions()
        for slab in self._slabs:
            remove_root(slab)


@dataclass(frozen=True)
class Observed:
    """``steps``: every tensor of the flat vector by name, after each iteration; ``flats`` itself."""

    flats: list[torch.Tensor]
    steps: list[Tensors]
    losses: list[float]
    trained: sparkdl.TrainedModel


def observe(
    trainer: sparkdl.Trainer, data: Dataset, engine: str, iterations: int = ITERATIONS
) -> Observed:
    """Fit on ``engine``; the local one is handed the partitions that were read already."""
    kind = LocalEngine if engine == "local" else ShuffleEngine
    flats: list[torch.Tensor] = []
    original = kind.run

    def run(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        flats.append(self.weights().clone())
        return result

    stop = sparkdl.max_iteration(iterations)
    trainer = replace(trainer, engine=engine, stop=stop, replicas=len(data.counts))
    with (
        mock.patch.object(kind, "run", run),
        mock.patch.object(placing_module, "materialize_here", return_value=data.samples),
    ):
        trained = trainer.fit(data.df)
    assert len(flats) == iterations
    layout = layout_of(_recipe(trainer).build())
    return Observed(
        flats, [by_name(layout, flat) for flat in flats], trained.history.losses, trained
    )


def by_name(layout: Layout, flat: torch.Tensor) -> Tensors:
    """Parameters and buffers out of a flat vector."""
    tensors = {}
    for segment in layout.segments:
        values = flat[segment.start : segment.stop]
        if segment.kind == "exact":
            nbytes = int(np.prod(segment.shape)) * segment.dtype.itemsize
            values = values.contiguous().view(torch.uint8)[:nbytes].view(segment.dtype)
        tensors[segment.name] = values.view(segment.shape)
    return tensors


@dataclass(frozen=True)
class Expected:
    """Parameters and buffers by name after each iteration, and the loss of each."""

    steps: list[Tensors]
    losses: list[float]


def reference(trainer: sparkdl.Trainer, data: Dataset, iterations: int = ITERATIONS) -> Expected:
    """Plain PyTorch: one module, each global batch as a whole."""
    recipe = _recipe(trainer)
    module = copy.deepcopy(recipe.build())
    optimizer = recipe.build_optimizer(module)
    scheduler = trainer.schedule(optimizer) if trainer.schedule else None
    module.train()
    expected = Expected([], [])
    with one_thread():
        for t in range(iterations):
            parts = [part for part in mini_batches(trainer, data, t) if part]
            inputs, targets = (
                [torch.cat(columns) for columns in zip(*role, strict=True)]
                for role in zip(*parts, strict=True)
            )
            optimizer.zero_grad(set_to_none=True)
            loss = call_loss(trainer.loss, module(*inputs), targets)
            loss.backward()
            optimizer.step()
            if scheduler:
                scheduler.step()
            expected.steps.append(snapshot(module))
            expected.losses.append(float(loss.detach()))
    return expected


def simulate(trainer: sparkdl.Trainer, data: Dataset, iterations: int = ITERATIONS) -> Expected:
    """Plain PyTorch: M copies of the module, each on its part of the global batch.

    Gradients and floating buffers are averaged by sample count; other buffers are those of the
    first replica that has samples. Random draws are seeded as the semantics say.
    """
    recipe = _recipe(trainer)
    module = copy.deepcopy(recipe.build())
    optimizer = recipe.build_optimizer(module)
    scheduler = trainer.schedule(optimizer) if trainer.schedule else None
    expected = Expected([], [])
    with one_thread():
        for t in range(iterations):
            copies, losses, weights = [], [], []
            parts = mini_batches(trainer, data, t)
            total = sum(len(part[0][0]) for part in parts if part)
            for m, part in enumerate(parts):
                if part is None:
                    continue
                live = copy.deepcopy(module).train()
                live.zero_grad(set_to_none=True)
                with seeded(derive_seed(trainer.seed, "forward", t, m)):
                    loss = call_loss(trainer.loss, live(*part[0]), part[1])
                    loss.backward()
                copies.append(live)
                losses.append(float(loss.detach()))
                weights.append(len(part[0][0]) / total)
            _average(module, copies, weights)
            optimizer.step()
            if scheduler:
                scheduler.step()
            expected.steps.append(snapshot(module))
            expected.losses.append(sum(x * w for x, w in zip(losses, weights, strict=True)))
    return expected


@torch.no_grad()
def _average(module: nn.Module, copies: list[nn.Module], weights: list[float]) -> None:
    parameters = [dict(c.named_parameters()) for c in copies]
    for name, parameter in module.named_parameters():
        gradients = [p[name].grad for p in parameters]
        parameter.grad = None
        if any(g is not None for g in gradients):
            parameter.grad = sum(
                g * w for g, w in zip(gradients, weights, strict=True) if g is not None
            )
    buffers = [dict(c.named_buffers()) for c in copies]
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(sum(b[name] * w for b, w in zip(buffers, weights, strict=True)))
        else:
            buffer.copy_(buffers[0][name])


def mini_batches(trainer: sparkdl.Trainer, data: Dataset, t: int) -> list[Batch | None]:
    """For each replica the tensors of iteration ``t``: (inputs, targets); None where it has none."""
    plan = EpochPlan(data.counts, trainer.batch_size)
    epoch, batch = divmod(t, plan.num_iterations)
    parts: list[Batch | None] = []
    for m, (start, stop) in enumerate(plan.rows(batch)):
        rows = data.rows[m]
        if rows is None or start == stop:
            parts.append(None)
            continue
        order = permutation(trainer.seed, epoch, m, data.counts[m])[start:stop]
        tensors = to_tensors([column[order] for column in rows], torch.device("cpu"))
        inputs = data.samples.num_features
        parts.append((tensors[:inputs], tensors[inputs:]))
    return parts


def snapshot(module: nn.Module) -> Tensors:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def worst_error(observed: list[Tensors], expected: list[Tensors]) -> float:
    """The largest relative error over all steps and parameters.

    Two measures: the norm of the difference by the norm, and the worst element by the largest one.
    Tensors that are not floating must be equal.
    """
    worst = 0.0
    for seen, wanted in zip(observed, expected, strict=True):
        assert seen
        assert seen.keys() <= wanted.keys()
        for name, tensor in seen.items():
            if not tensor.is_floating_point():
                assert torch.equal(tensor, wanted[name]), name
                continue
            difference = tensor.double() - wanted[name].double()
            scale = wanted[name].double()
            if not difference.any():
                continue
            if not difference.isfinite().all():
                return math.inf
            by_norm = difference.norm() / scale.norm()
            by_element = difference.abs().max() / scale.abs().max()
            worst = max(worst, float(by_norm), float(by_element))
    return worst


def assert_same_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    """The flat vectors after each iteration are equal to the last bit."""
    for t, (a, b) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"iteration {t + 1} differs"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As in a task with one core: the number of threads changes the bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _recipe(trainer: sparkdl.Trainer) -> Recipe:
    return Recipe(trainer.model, trainer.loss, trainer.optimizer, trainer.seed)
